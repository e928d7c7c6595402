"""The registry's own part: it finds the sidecar of a holder and forwards; the holder's table decides."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from kvlease.core.clock import Clock
from kvlease.core.errors import HolderUnreachable, InvalidArgument, NotOwner, StoreUnavailable, UnknownEngine
from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine, LeaseRecord, PinOutcome
from kvlease.registry.config import RegistryConfig
from kvlease.registry.directory import EngineDirectory
from kvlease.registry.ports import SidecarTransport
from kvlease.registry.renewals import EngineRenewals, Heartbeat, PendingBeat, RenewalSession
from kvlease.store.port import Batch, Store

Result = TypeVar("Result")


class Registry:
    """What every replica answers. State is in the store and at the holders, not here."""

    def __init__(
        self, config: RegistryConfig, store: Store, sidecars: SidecarTransport, clock: Clock
    ) -> None:
        self._config = config
        self._store = store
        self._sidecars = sidecars
        self._directory = EngineDirectory(store)
        self._renewals = EngineRenewals(self._renew_engine, config.renewal_spacing_s, clock)

    # --- engines and leases -------------------------------------------------------------------------------

    async def list_engines(self) -> tuple[Engine, ...]:
        """Every registered engine."""
        return await self._stored(self._store.list_engines())

    def watch_engines(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[Engine]]]:
        """First a snapshot, then every change."""
        return self._store.watch_engines()

    async def get_lease(self, lease_id: int) -> LeaseRecord | MissReason:
        """The record of a lease; UNKNOWN for one that is not confirmed, has ended or never was."""
        return await self._stored(self._store.get_lease(lease_id)) or MissReason.UNKNOWN

    async def list_leases(self, engine_id: str, tenant: str) -> tuple[LeaseRecord, ...]:
        """Every recorded lease of an engine and of a tenant; empty: of any."""
        return await self._stored(self._store.list_leases(engine_id, tenant))

    def watch_leases(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[LeaseRecord]]]:
        """First a snapshot, then every change."""
        return self._store.watch_leases()

    # --- verbs --------------------------------------------------------------------------------------------

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """Pins at the holder. UNREACHABLE when its engine is not registered or does not answer in time."""
        engine = await self._engine(ask.holder.engine_id)
        if engine is None:
            return MissReason.UNREACHABLE
        if engine.holder.boot_id != ask.holder.boot_id:
            return MissReason.HOLDER_CHANGED
        wait_s = min(wait_for_offer_s, self._config.wait_for_offer_max_s)
        try:
            return await self._sidecars.pin(engine.sidecar_address, ask, wait_s, self._config.sidecar_call_s)
        except HolderUnreachable:
            return MissReason.UNREACHABLE

    async def unpin(self, holder: Holder, lease_id: int, pin_id: str) -> None:
        """Ends a pin; idempotent, also for an engine that is gone.

        Raises:
            HolderUnreachable: the sidecar did not answer; the pin's deadline ends it.
        """
        engine = await self._engine(holder.engine_id)
        if engine is not None:
            await self._sidecars.unpin(
                engine.sidecar_address, holder, lease_id, pin_id, self._config.sidecar_call_s
            )

    async def release(self, lease_id: int, engine_id: str, tenant: str) -> MissReason | None:
        """Ends a lease at its holder for its tenant, or for an operator (empty tenant).

        None, or what the lease was already.

        Raises:
            NotOwner: the lease is another tenant's.
            HolderUnreachable: the sidecar did not answer.
        """
        record = await self._stored(self._store.get_lease(lease_id))
        if record is not None and tenant not in ("", record.tenant):
            raise NotOwner("the lease belongs to another tenant")
        holder_id = record.holder.engine_id if record is not None else engine_id
        engine = await self._engine(holder_id) if holder_id else None
        if engine is None:
            return MissReason.UNKNOWN
        return await self._sidecars.release(
            engine.sidecar_address,
            holder_id,
            lease_id,
            tenant,
            self._config.renew_call_s,
            superseded=False,
        )

    async def drain(self, engine_id: str, *, undo: bool) -> None:
        """Keeps new turns away from an engine, or lets them come again; routers learn of it by their watch.

        Raises:
            UnknownEngine: no such engine is registered.
            HolderUnreachable: its sidecar did not answer.
        """
        address = (await self._registered(engine_id)).sidecar_address
        await self._sidecars.drain(address, engine_id, self._config.sidecar_call_s, undo=undo)

    def open_session(self) -> RenewalSession:
        """A session of heartbeats, for one stream."""
        return RenewalSession(self._config.session_ids_max)

    def renew(self, session: RenewalSession, beat: Heartbeat) -> PendingBeat:
        """Takes a heartbeat in and sends all that its session keeps alive on its way; never waits.

        So a holder that does not answer delays acks, but no renewal of a later heartbeat at another holder.

        Raises:
            InvalidArgument: a duration that renews nothing.
            QuotaExceeded: the session keeps more alive than it may.
        """
        if not session.apply(beat):
            return PendingBeat(session, beat.sequence, resync=True)
        engines = session.engines()
        if any(ids.lease_ids for ids in engines.values()) and beat.duration_s <= 0:
            raise InvalidArgument("leases are renewed for a duration above 0 s")
        if any(ids.pin_ids for ids in engines.values()) and beat.reservation_s <= 0:
            raise InvalidArgument("pins are renewed for a reservation above 0 s")
        urgent = {delta.engine_id for delta in beat.engines if delta.added_lease_ids or delta.added_pin_ids}
        answers = tuple(
            (
                frozenset(ids.lease_ids),
                self._renewals.join(
                    engine_id, ids, beat.duration_s, beat.reservation_s, urgent=engine_id in urgent
                ),
            )
            for engine_id, ids in engines.items()
        )
        return PendingBeat(session, beat.sequence, answers)

    def known_engines(self) -> tuple[Engine, ...]:
        """The engines that the watch has told of, without asking the store."""
        return self._directory.all()

    async def follow_engines(self) -> None:
        """Keeps the engines at hand until cancelled; without it the store is asked for each call."""
        await self._directory.follow()

    async def engines_told(self) -> None:
        """Waits until the watch has told of the engines for the first time: before it, none can be found."""
        await self._directory.told()

    async def close(self) -> None:
        """Ends the calls that are under way."""
        await self._renewals.close()

    # --- inside -------------------------------------------------------------------------------------------

    async def _renew_engine(
        self,
        engine_id: str,
        lease_ids: list[int],
        duration_s: float,
        pin_ids: list[str],
        reservation_s: float,
    ) -> dict[int, MissReason]:
        engine = await self._registered(engine_id)
        return await self._sidecars.renew(
            engine.sidecar_address,
            engine_id,
            lease_ids,
            duration_s,
            pin_ids,
            reservation_s,
            self._config.renew_call_s,
        )

    async def _registered(self, engine_id: str) -> Engine:
        engine = await self._engine(engine_id)
        if engine is None:
            raise UnknownEngine(f"engine {engine_id} is not registered")
        return engine

    async def _engine(self, engine_id: str) -> Engine | None:
        known = self._directory.get(engine_id)
        return known or await self._stored(self._store.get_engine(engine_id))

    async def _stored(self, call: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(self._config.store_call_s):
                return await call
        except TimeoutError as error:
            bound_s = self._config.store_call_s
            raise StoreUnavailable(f"the store did not answer within {bound_s:g} s") from error
