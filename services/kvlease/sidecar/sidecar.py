"""The sidecar's own part: it finds the holder of a question and forwards it. It never promises by itself."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from kvlease.core.attachment import EngineFacts, LeaseOffer
from kvlease.core.clock import Clock
from kvlease.core.errors import HolderUnreachable, KvleaseError, UnknownEngine
from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine, HolderGauges, LeaseRecord, PinOutcome
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.engine import AttachedEngine
from kvlease.sidecar.ports import ConnectorLink, LeaseEnded, PeerTransport, no_listener
from kvlease.sidecar.recorder import EngineRecorder, RecorderTimes
from kvlease.store.port import Store

_log = logging.getLogger(__name__)


class Sidecar:
    """All engines of one pod: one registration per attached EngineCore.

    Args:
        address: `host:port` under which other sidecars and the registry reach this one.
    """

    def __init__(
        self,
        config: SidecarConfig,
        address: str,
        store: Store,
        peers: PeerTransport,
        clock: Clock,
        ended: LeaseEnded = no_listener,
    ) -> None:
        self._config = config
        self._address = address
        self._store = store
        self._peers = peers
        self._clock = clock
        self._ended = ended
        self._engines: dict[str, AttachedEngine] = {}
        self._attachments: dict[AttachedEngine, asyncio.Event] = {}
        self._draining: set[Holder] = set()
        self._closing = False

    # --- for the connectors beside it ---------------------------------------------------------------------

    @asynccontextmanager
    async def attached(
        self, facts: EngineFacts, holds: Iterable[LeaseOffer], link: ConnectorLink
    ) -> AsyncGenerator[AttachedEngine, None]:
        """Registers an engine for as long as the context lasts; then all its leases are lost in one event.

        Raises:
            EngineIdReused: the engine id was seen under another boot id.
            HolderUnreachable: the sidecar is stopping.
        """
        if self._closing:
            raise HolderUnreachable("the sidecar is stopping")
        engine = self._engine_of(facts)
        recorder = EngineRecorder(
            self._store,
            engine,
            RecorderTimes(self._config.engine_ttl_s, self._config.store_call_s),
            self._clock,
            self._supersede,
            lambda error: link.close(str(error)),
        )
        attached = AttachedEngine(engine, link, recorder, self._clock, self._ended)
        await recorder.open()
        for hold in holds:
            attached.offer(hold)
        engine_id = engine.holder.engine_id
        earlier = self._engines.get(engine_id)
        self._engines[engine_id] = attached
        detached = self._attachments[attached] = asyncio.Event()
        if earlier is not None:
            earlier.close("the engine attached by another stream")
        running = asyncio.create_task(recorder.run(), name=f"recorder of {engine_id}")
        _log.info("engine attached", extra={"engine_id": engine_id, "retain": facts.retain})
        try:
            yield attached
        finally:
            if self._engines.get(engine_id) is attached:
                del self._engines[engine_id]
            attached.lose_all()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await recorder.end()
            del self._attachments[attached]
            detached.set()
            _log.info("engine detached, its leases are lost", extra={"engine_id": engine_id})

    async def close(self) -> None:
        """Ends every attachment, and returns when the sessions of their engines have ended."""
        self._closing = True
        detached = list(self._attachments.values())
        for engine in self._attachments:
            engine.close("the sidecar stops")
        for event in detached:
            await event.wait()

    async def remote_pin(self, ask: PinAsk, wait_for_offer_s: float, address: str) -> PinOutcome:
        """A connector here asks, as a reader, for a pin at the sidecar `address`."""
        if self._is_here(ask.holder.engine_id, address):
            return await self.pin(ask, wait_for_offer_s)
        try:
            return await self._peers.pin(address, ask, wait_for_offer_s, self._config.peer_call_s)
        except KvleaseError as error:
            # Whatever a peer makes of it: one question must not end the stream, and with it every lease here.
            _log.info("a pin was not answered", extra={"address": address, "reason": str(error)})
            return MissReason.UNREACHABLE

    async def remote_unpin(self, holder: Holder, lease_id: int, pin_id: str, address: str) -> None:
        """A connector here ends its pin at the sidecar `address`; unheard, the pin's deadline ends it."""
        if self._is_here(holder.engine_id, address):
            await self.unpin(holder, lease_id, pin_id)
            return
        try:
            await self._peers.unpin(address, holder, lease_id, pin_id, self._config.peer_call_s)
        except KvleaseError as error:
            _log.info("an unpin was not heard", extra={"address": address, "reason": str(error)})

    # --- for registries and other sidecars ----------------------------------------------------------------

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """The answer of the holder's table, or UNREACHABLE. Waits for an offer up to the bound here."""
        engine = self._engines.get(ask.holder.engine_id)
        if engine is None:
            return MissReason.UNREACHABLE
        return await engine.pin(ask, min(wait_for_offer_s, self._config.wait_for_offer_max_s))

    async def unpin(self, holder: Holder, lease_id: int, pin_id: str) -> None:
        """Ends a pin; idempotent, also for an engine that is gone."""
        engine = self._engines.get(holder.engine_id)
        if engine is not None:
            engine.unpin(lease_id, pin_id)

    async def renew(
        self,
        engine_id: str,
        lease_ids: Sequence[int],
        duration_s: float,
        pin_ids: Sequence[str],
        reservation_s: float,
    ) -> dict[int, MissReason]:
        """Renews at the holder. The leases that could not be renewed.

        Raises:
            UnknownEngine: no such engine is attached.
            HolderUnreachable: the holder did not answer in time.
        """
        return await self._attached(engine_id).renew(lease_ids, duration_s, pin_ids, reservation_s)

    async def release(
        self, engine_id: str, lease_id: int, tenant: str, *, superseded: bool
    ) -> MissReason | None:
        """Ends a lease at its holder. None, or what it was already.

        Raises:
            UnknownEngine: no such engine is attached.
            NotOwner: the lease is another tenant's.
            HolderUnreachable: the holder did not answer in time.
        """
        return await self._attached(engine_id).release(lease_id, tenant, superseded=superseded)

    async def read_gauges(self, engine_id: str) -> HolderGauges:
        """The gauges of an engine's holder.

        Raises:
            UnknownEngine: no such engine is attached.
            HolderUnreachable: the holder did not answer in time.
        """
        return await self._attached(engine_id).read_gauges()

    async def drain(self, engine_id: str, *, undo: bool) -> None:
        """Keeps new turns away from an engine, or lets them come again.

        Lasts as long as this process and the engine's: a stream that breaks and comes back changes nothing.

        Raises:
            UnknownEngine: no such engine is attached.
        """
        attached = self._attached(engine_id)
        process = replace(attached.engine.holder, epoch=0)
        if undo:
            self._draining.discard(process)
        else:
            self._draining.add(process)
        attached.drain(draining=not undo)
        _log.info(
            "engine drained" if not undo else "engine takes turns again", extra={"engine_id": engine_id}
        )

    def engines(self) -> tuple[AttachedEngine, ...]:
        """The engines that are attached."""
        return tuple(self._engines.values())

    # --- inside -------------------------------------------------------------------------------------------

    def _attached(self, engine_id: str) -> AttachedEngine:
        engine = self._engines.get(engine_id)
        if engine is None:
            raise UnknownEngine(f"engine {engine_id} is not attached to the sidecar at {self._address}")
        return engine

    def _is_here(self, engine_id: str, address: str) -> bool:
        return engine_id in self._engines or address == self._address

    def _engine_of(self, facts: EngineFacts) -> Engine:
        return Engine(
            holder=facts.holder,
            role=self._config.role,
            model=facts.model,
            url=self._config.engine_url.rstrip("/"),
            sidecar_address=self._address,
            layout=facts.layout,
            vllm_version=facts.vllm_version,
            data_parallel_rank=facts.data_parallel_rank,
            total_blocks=facts.total_blocks,
            prefix_caching=facts.prefix_caching,
            retain=facts.retain,
            retain_refusal=facts.retain_refusal,
            draining=replace(facts.holder, epoch=0) in self._draining,
            location=facts.location,
            details=facts.details,
        )

    async def _supersede(self, record: LeaseRecord) -> None:
        """Ends a lease that a later turn replaced, wherever it is held; unheard, its own deadline ends it."""
        engine_id, lease_id = record.holder.engine_id, record.lease_id
        try:
            here = self._engines.get(engine_id)
            if here is not None:
                await here.release(lease_id, "", superseded=True)
                return
            async with asyncio.timeout(self._config.store_call_s):
                engine = await self._store.get_engine(engine_id)
            if engine is not None:
                await self._peers.release(
                    engine.sidecar_address, engine_id, lease_id, "", self._config.peer_call_s, superseded=True
                )
        except (KvleaseError, TimeoutError) as error:
            _log.info("a superseded lease was not released", extra={"reason": str(error)})
