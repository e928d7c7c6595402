"""Heartbeats: what each router's session keeps alive, and one call per engine for all of them.

Only a message renews: a session that falls silent renews nothing. While a call to an engine is under way, or
within `spacing_s` of the last one, what comes for the engine waits and goes as one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kvlease.core.clock import Clock
from kvlease.core.errors import KvleaseError, QuotaExceeded
from kvlease.core.lease import MissReason

_log = logging.getLogger(__name__)

_LASTING = frozenset(MissReason) - {MissReason.UNREACHABLE, MissReason.UNKNOWN}
"""Misses after which a renewal is of no more use; an unknown lease may still be offered."""


@dataclass(frozen=True, slots=True)
class EngineDelta:
    """What a session adds to and drops from what it keeps alive on one engine."""

    engine_id: str
    added_lease_ids: tuple[int, ...] = ()
    dropped_lease_ids: tuple[int, ...] = ()
    added_pin_ids: tuple[str, ...] = ()
    dropped_pin_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One message of a session.

    Attributes:
        epoch: grows when the full list is sent again; a delta of another epoch is refused.
        full: the lists are complete, not deltas.
        duration_s: what leases are renewed for.
        reservation_s: what the reservations of pins are renewed for.
    """

    session: str
    epoch: int
    sequence: int
    full: bool
    engines: tuple[EngineDelta, ...]
    duration_s: float
    reservation_s: float


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """What became of a heartbeat.

    Attributes:
        sequence: every lease and pin up to this message was renewed by its holder, or is among the misses.
        misses: leases that were not renewed; UNREACHABLE when the holder did not answer.
        resync: nothing was renewed, since the registry does not know the session: send the full list.
    """

    sequence: int
    misses: Mapping[int, MissReason] = field(default_factory=dict[int, MissReason])
    resync: bool = False


@dataclass(slots=True)
class EngineIds:
    """Leases and pins of one engine, in the order in which they were added."""

    lease_ids: dict[int, None] = field(default_factory=dict[int, None])
    pin_ids: dict[str, None] = field(default_factory=dict[str, None])

    def apply(self, delta: EngineDelta) -> None:
        """Adds what is added, then drops what is dropped."""
        self.lease_ids |= dict.fromkeys(delta.added_lease_ids)
        self.pin_ids |= dict.fromkeys(delta.added_pin_ids)
        for lease_id in delta.dropped_lease_ids:
            self.lease_ids.pop(lease_id, None)
        for pin_id in delta.dropped_pin_ids:
            self.pin_ids.pop(pin_id, None)

    def __len__(self) -> int:
        return len(self.lease_ids) + len(self.pin_ids)


class RenewalSession:
    """What one router's session keeps alive, as its messages told it. Lives as long as its stream."""

    def __init__(self, ids_max: int) -> None:
        self._ids_max = ids_max
        self._epoch: int | None = None
        self._engines: dict[str, EngineIds] = {}

    def apply(self, beat: Heartbeat) -> bool:
        """Takes a message in. False when the full list is needed first.

        Raises:
            QuotaExceeded: the session keeps more alive than it may.
        """
        if beat.full:
            self._epoch = beat.epoch
            self._engines = {}
        elif beat.epoch != self._epoch:
            return False
        for delta in beat.engines:
            self._engines.setdefault(delta.engine_id, EngineIds()).apply(delta)
        self._engines = {engine_id: ids for engine_id, ids in self._engines.items() if len(ids)}
        count = sum(len(ids) for ids in self._engines.values())
        if count > self._ids_max:
            raise QuotaExceeded(f"a session may renew {self._ids_max} leases and pins, not {count}")
        return True

    def drop_leases(self, lease_ids: Iterable[int]) -> None:
        """Stops renewing leases that are gone for good."""
        for lease_id in lease_ids:
            for ids in self._engines.values():
                ids.lease_ids.pop(lease_id, None)

    def engines(self) -> Mapping[str, EngineIds]:
        """What is kept alive, by engine."""
        return self._engines


RenewEngine = Callable[[str, list[int], float, list[str], float], Awaitable[dict[int, MissReason]]]
"""Renews at one engine: its id, lease ids, their duration in seconds, pin ids, their reservation."""


@dataclass(frozen=True, slots=True)
class PendingBeat:
    """A heartbeat on its way to the holders.

    Attributes:
        answers: per engine, the leases that this heartbeat named, and the misses of the call that carries them.
    """

    session: RenewalSession
    sequence: int
    answers: tuple[tuple[frozenset[int], "asyncio.Future[dict[int, MissReason]]"], ...] = ()
    resync: bool = False

    async def ack(self) -> HeartbeatAck:
        """What became of it, once every holder has answered or was given up."""
        misses: dict[int, MissReason] = {}
        for asked, answer in self.answers:
            missed = await asyncio.shield(answer)
            misses |= {lease_id: miss for lease_id, miss in missed.items() if lease_id in asked}
        self.session.drop_leases(lease_id for lease_id, miss in misses.items() if miss in _LASTING)
        return HeartbeatAck(0 if self.resync else self.sequence, misses, self.resync)


@dataclass(slots=True)
class _Batch:
    """What waits for the next call to one engine; the longest duration asked for counts."""

    done: "asyncio.Future[dict[int, MissReason]]"
    ids: EngineIds = field(default_factory=EngineIds)
    duration_s: float = 0.0
    reservation_s: float = 0.0
    urgent: asyncio.Event = field(default_factory=asyncio.Event)


class EngineRenewals:
    """Sends renewals to engines, at most one call at a time to each.

    Args:
        renew: the call; raises a `KvleaseError` when the holder cannot be asked.
        spacing_s: least time between the begin of two calls to one engine, unless something is urgent.
    """

    def __init__(self, renew: RenewEngine, spacing_s: float, clock: Clock) -> None:
        self._renew = renew
        self._spacing_s = spacing_s
        self._clock = clock
        self._waiting: dict[str, _Batch] = {}
        self._not_before_s: dict[str, float] = {}
        self._owners: dict[str, asyncio.Task[None]] = {}

    def join(
        self, engine_id: str, ids: EngineIds, duration_s: float, reservation_s: float, *, urgent: bool
    ) -> "asyncio.Future[dict[int, MissReason]]":
        """Adds to the next call to an engine. The misses of that call, those of others among them."""
        batch = self._waiting.get(engine_id)
        if batch is None:
            batch = self._waiting[engine_id] = _Batch(asyncio.get_running_loop().create_future())
        batch.ids.lease_ids |= ids.lease_ids
        batch.ids.pin_ids |= ids.pin_ids
        batch.duration_s = max(batch.duration_s, duration_s)
        batch.reservation_s = max(batch.reservation_s, reservation_s)
        if urgent:
            batch.urgent.set()
        if engine_id not in self._owners:
            self._owners[engine_id] = asyncio.create_task(
                self._serve(engine_id), name=f"renewals of {engine_id}"
            )
        return batch.done

    async def close(self) -> None:
        """Ends every call that is under way; whoever waits for one is cancelled."""
        owners = list(self._owners.values())
        for owner in owners:
            owner.cancel()
        await asyncio.gather(*owners, return_exceptions=True)

    async def _serve(self, engine_id: str) -> None:
        """Owns one engine's calls until nothing waits for it."""
        batch: _Batch | None = None
        try:
            while (batch := self._waiting.get(engine_id)) is not None:
                await self._space(engine_id, batch)
                del self._waiting[engine_id]
                self._not_before_s[engine_id] = self._clock.now_s() + self._spacing_s
                misses = await self._send(engine_id, batch)
                if not batch.done.done():
                    batch.done.set_result(misses)
        finally:
            del self._owners[engine_id]
            for waiting in (batch, self._waiting.pop(engine_id, None)):
                if waiting is not None:
                    waiting.done.cancel()

    async def _space(self, engine_id: str, batch: _Batch) -> None:
        """Waits until the next call may begin, or until something urgent joins the batch."""
        now_s = self._clock.now_s()
        self._not_before_s = {key: time_s for key, time_s in self._not_before_s.items() if time_s > now_s}
        left_s = self._not_before_s.get(engine_id, now_s) - now_s
        if left_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await batch.urgent.wait()

    async def _send(self, engine_id: str, batch: _Batch) -> dict[int, MissReason]:
        lease_ids, pin_ids = list(batch.ids.lease_ids), list(batch.ids.pin_ids)
        try:
            return await self._renew(engine_id, lease_ids, batch.duration_s, pin_ids, batch.reservation_s)
        except (KvleaseError, TimeoutError):
            return dict.fromkeys(lease_ids, MissReason.UNREACHABLE)
        except Exception:
            # A bug at one holder must not break the streams of all routers that renew there.
            _log.exception("renewal failed", extra={"engine_id": engine_id})
            return dict.fromkeys(lease_ids, MissReason.UNREACHABLE)
