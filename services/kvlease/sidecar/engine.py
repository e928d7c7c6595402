"""One attached engine as its sidecar sees it: what it holds, and the way to its holder's table."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from kvlease.core.attachment import LeaseOffer
from kvlease.core.clock import Clock
from kvlease.core.errors import HolderUnreachable, NotOwner
from kvlease.core.holding import HoldEvent, PinAsk
from kvlease.core.ids import Holder, lease_id_to_hex
from kvlease.core.lease import TERMINAL, LeaseKind, LeaseState, MissReason
from kvlease.core.policy import eviction_order
from kvlease.core.records import Engine, HolderGauges, PinOutcome
from kvlease.sidecar.ports import ConnectorLink
from kvlease.sidecar.recorder import EngineRecorder

OFFER_WAITERS_MAX = 4096
"""Pins that wait for offers at one engine; past that a pin for an unknown lease is answered at once."""

EARLY_EVENTS_MAX = 4096
"""Events kept for leases whose offers come later: the connector's two threads send on their own."""

_ENDING = TERMINAL | {LeaseState.DRAINING}

_log = logging.getLogger(__name__)


class AttachedEngine:
    """An engine whose connector is attached. The holder's table decides; this is only what it last said."""

    def __init__(self, engine: Engine, link: ConnectorLink, recorder: EngineRecorder, clock: Clock) -> None:
        self.engine = engine
        self._link = link
        self._recorder = recorder
        self._clock = clock
        self._offers: dict[int, LeaseOffer] = {}
        self._renewed_s: dict[int, float] = {}
        self._ordered: tuple[int, ...] = ()
        self._waiters: dict[int, asyncio.Event] = {}
        self._early: OrderedDict[int, HoldEvent] = OrderedDict()

    # --- what the connector says --------------------------------------------------------------------------

    def offer(self, offer: LeaseOffer) -> None:
        """Learns of a hold; a confirmed one is recorded."""
        lease_id = offer.record.lease_id
        early = self._early.pop(lease_id, None)
        if offer.record.state in _ENDING or (early is not None and early.state in _ENDING):
            self._forget(lease_id)
            return
        if early is not None and early.confirmed:
            offer = replace(offer, provisional=False)
        self._offers[lease_id] = offer
        self._renewed_s[lease_id] = self._clock.now_s()
        waiter = self._waiters.get(lease_id)
        if waiter is not None:
            waiter.set()
        if not offer.provisional:
            self._record(offer)

    def apply_events(self, holder: Holder, events: Sequence[HoldEvent]) -> None:
        """Learns what happened to holds. A later epoch of the holder loses every hold of the earlier one."""
        if holder.epoch > self.engine.holder.epoch:
            self._begin_epoch(holder)
        for event in events:
            offer = self._offers.get(event.lease_id)
            if offer is None:
                self._keep_early(event)
            elif event.state in _ENDING:
                self._log_ending(offer, event.state)
                self._forget(event.lease_id)
            elif event.confirmed:
                confirmed = replace(offer, provisional=False)
                self._offers[event.lease_id] = confirmed
                self._record(confirmed)

    # --- what others ask ----------------------------------------------------------------------------------

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """Asks the holder's table; asks again when an unknown lease is offered in time."""
        try:
            outcome = await self._link.pin(ask)
            if outcome is not MissReason.UNKNOWN or wait_for_offer_s <= 0:
                return outcome
            if not await self._is_offered(ask.lease_id, wait_for_offer_s):
                return outcome
            return await self._link.pin(ask)
        except HolderUnreachable:
            return MissReason.UNREACHABLE

    def unpin(self, lease_id: int, pin_id: str) -> None:
        """Ends a pin; idempotent."""
        self._link.unpin(lease_id, pin_id)

    async def renew(
        self, lease_ids: Sequence[int], duration_s: float, pin_ids: Sequence[str], reservation_s: float
    ) -> dict[int, MissReason]:
        """Renews, then tells the order of eviction when it changed. The leases that could not be renewed.

        Raises:
            HolderUnreachable: the holder did not answer; what it renewed is unknown.
        """
        misses = await self._link.renew(lease_ids, duration_s, pin_ids, reservation_s)
        now_s = self._clock.now_s()
        self._renewed_s |= {
            lease_id: now_s for lease_id in lease_ids if lease_id in self._offers and lease_id not in misses
        }
        order = eviction_order(self._renewed_s)
        if order != self._ordered:
            self._ordered = order
            self._link.order_evictions(order)
        return misses

    async def release(self, lease_id: int, tenant: str, *, superseded: bool) -> MissReason | None:
        """Ends a lease for its tenant, or for an operator (empty tenant). None, or what it was already.

        Raises:
            NotOwner: the lease is another tenant's.
            HolderUnreachable: the holder did not answer.
        """
        offer = self._offers.get(lease_id)
        if tenant and offer is None:
            return MissReason.UNKNOWN
        if tenant and offer is not None and offer.record.tenant != tenant:
            raise NotOwner("the lease belongs to another tenant")
        return await self._link.release(lease_id, superseded=superseded)

    async def read_gauges(self) -> HolderGauges:
        """The holder's gauges and counters.

        Raises:
            HolderUnreachable: the holder did not answer.
        """
        return await self._link.read_gauges()

    def close(self, reason: str) -> None:
        """Ends the attachment."""
        self._link.close(reason)

    # --- inside -------------------------------------------------------------------------------------------

    async def _is_offered(self, lease_id: int, seconds: float) -> bool:
        """Whether a lease is offered, or will be within `seconds`."""
        if lease_id in self._offers:
            return True
        if len(self._waiters) >= OFFER_WAITERS_MAX:
            return False
        waiter = self._waiters.setdefault(lease_id, asyncio.Event())
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await waiter.wait()
        if self._waiters.get(lease_id) is waiter:
            del self._waiters[lease_id]
        return waiter.is_set()

    def _record(self, offer: LeaseOffer) -> None:
        if offer.record.kind is LeaseKind.CONVERSATION:
            self._recorder.put(replace(offer.record, state=LeaseState.HELD), offer.supersedes)

    def _keep_early(self, event: HoldEvent) -> None:
        if event.confirmed or event.state in _ENDING:
            self._early[event.lease_id] = event
            self._early.move_to_end(event.lease_id)
            if len(self._early) > EARLY_EVENTS_MAX:
                self._early.popitem(last=False)

    def _log_ending(self, offer: LeaseOffer, state: LeaseState) -> None:
        if offer.record.kind is LeaseKind.CONVERSATION:
            lease_id = lease_id_to_hex(offer.record.lease_id)
            engine_id = self.engine.holder.engine_id
            _log.info(
                "lease ended", extra={"lease_id": lease_id, "state": state.value, "engine_id": engine_id}
            )

    def _forget(self, lease_id: int) -> None:
        self._offers.pop(lease_id, None)
        self._renewed_s.pop(lease_id, None)
        self._recorder.remove(lease_id)

    def _begin_epoch(self, holder: Holder) -> None:
        self.engine = replace(self.engine, holder=holder)
        self._recorder.set_engine(self.engine)
        for lease_id, offer in list(self._offers.items()):
            if offer.record.holder.epoch < holder.epoch:
                self._forget(lease_id)
