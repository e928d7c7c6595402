"""A registry in the test's own process, for the router."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine, LeaseRecord, Pinned, PinOutcome
from kvlease.core.renewal import Beat
from kvlease.router.ports import BeatAck
from kvlease.store.port import Batch, Change


class StubRegistry:
    """Records what the router asks and says yes, unless told otherwise.

    Attributes:
        pin_outcome: the answer to every pin; None: pinned at the holder that was asked for.
        pin_gate: pins wait for it.
        misses: leases that no beat renews.
    """

    def __init__(self) -> None:
        self.pins: list[PinAsk] = []
        self.waits_s: list[float] = []
        self.unpinned: list[str] = []
        self.released: list[int] = []
        self.beats: list[Beat] = []
        self.pin_outcome: PinOutcome | None = None
        self.pin_gate: asyncio.Event | None = None
        self.misses: dict[int, MissReason] = {}
        self.engines: asyncio.Queue[Batch[Engine]] = asyncio.Queue()
        self.leases: asyncio.Queue[Batch[LeaseRecord]] = asyncio.Queue()

    @property
    def confirmed(self) -> list[int]:
        """Leases that beats renewed, in order of their first beat."""
        return [
            lease_id
            for beat in self.beats
            for engine in beat.engines.values()
            for lease_id in engine.added_lease_ids
        ]

    def register(self, *engines: Engine) -> None:
        """Tells the router that engines are there."""
        self.engines.put_nowait(Batch(tuple(Change(engine) for engine in engines)))

    def unregister(self, engine: Engine) -> None:
        """Tells the router that an engine is gone."""
        self.engines.put_nowait(Batch((Change(engine, gone=True),)))

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        self.pins.append(ask)
        self.waits_s.append(wait_for_offer_s)
        if self.pin_gate is not None:
            await self.pin_gate.wait()
        return self.pin_outcome if self.pin_outcome is not None else Pinned(ask.holder, 192)

    async def unpin(self, holder: Holder, lease_id: int, pin_id: str) -> None:
        self.unpinned.append(pin_id)

    async def release(self, lease_id: int, engine_id: str, tenant: str) -> MissReason | None:
        self.released.append(lease_id)
        return None

    @asynccontextmanager
    async def watch_engines(self) -> AsyncIterator[AsyncIterator[Batch[Engine]]]:
        yield _batches(self.engines)

    @asynccontextmanager
    async def watch_leases(self) -> AsyncIterator[AsyncIterator[Batch[LeaseRecord]]]:
        yield _batches(self.leases)

    @asynccontextmanager
    async def renew(self) -> AsyncIterator["StubRenewals"]:
        yield StubRenewals(self)


class StubRenewals:
    """One stream of heartbeats; every beat is acked."""

    def __init__(self, registry: StubRegistry) -> None:
        self._registry = registry
        self._acks: asyncio.Queue[BeatAck] = asyncio.Queue()
        self._session: set[int] = set()

    async def send(self, beat: Beat) -> None:
        self._registry.beats.append(beat)
        for engine in beat.engines.values():
            self._session |= set(engine.added_lease_ids)
            self._session -= set(engine.dropped_lease_ids)
        misses = {i: reason for i, reason in self._registry.misses.items() if i in self._session}
        self._acks.put_nowait(BeatAck(beat.sequence, misses))

    async def acks(self) -> AsyncIterator[BeatAck]:
        while True:
            yield await self._acks.get()


Item = TypeVar("Item", Engine, LeaseRecord)


async def _batches(queue: "asyncio.Queue[Batch[Item]]") -> AsyncIterator[Batch[Item]]:
    while True:
        yield await queue.get()
