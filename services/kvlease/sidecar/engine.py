"""One attached engine as its sidecar sees it: what it holds, and the way to its holder's table."""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvlease.core.attachment import LeaseOffer
from kvlease.core.clock import Clock
from kvlease.core.errors import HolderUnreachable, NotOwner
from kvlease.core.holding import HoldEvent, PinAsk
from kvlease.core.ids import Holder, lease_id_to_hex
from kvlease.core.lease import TERMINAL, LeaseKind, LeaseState, MissReason
from kvlease.core.policy import LeaseUse, PrefillCost, eviction_order
from kvlease.core.records import Engine, HolderGauges, LeaseRecord, Pinned, PinOutcome
from kvlease.core.reuse import ReuseHistory, ReuseModel
from kvlease.sidecar.ports import ConnectorLink, LeaseEnded, no_listener
from kvlease.sidecar.recorder import EngineRecorder

OFFER_WAITERS_MAX = 4096
"""Pins that wait for offers at one engine; past that a pin for an unknown lease is answered at once."""

EARLY_EVENTS_MAX = 4096
"""Events kept for leases whose offers come later: the connector's two threads send on their own."""

RANK_INTERVAL_S = 1.0
"""Leases are ranked again this long after the last time, or when one was offered or used since."""

_ENDING = TERMINAL | {LeaseState.DRAINING}

_DENIALS = frozenset(
    {MissReason.UNKNOWN, MissReason.RELEASED, MissReason.EXPIRED, MissReason.EVICTED, MissReason.LOST}
)
"""Answers of a holder that does not hold a lease it has offered."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Offered:
    """A lease that the connector offered.

    Attributes:
        idle_since_s: its last turn or READ.
        until_s: when it ends unless it is renewed, as far as is known here.
        duration_s: what it was renewed for.
        turns: earlier turns of its conversation that were seen here.
    """

    offer: LeaseOffer
    idle_since_s: float
    until_s: float
    duration_s: float
    turns: int

    def use(self, now_s: float) -> LeaseUse:
        """What its value depends on."""
        record = self.offer.record
        return LeaseUse(
            record.tokens,
            record.exclusive_bytes,
            self.turns,
            now_s - self.idle_since_s,
            self.until_s - now_s,
            self.duration_s,
        )


class AttachedEngine:
    """An engine whose connector is attached. The holder's table decides; this is only what it last said."""

    def __init__(
        self,
        engine: Engine,
        link: ConnectorLink,
        recorder: EngineRecorder,
        clock: Clock,
        ended: LeaseEnded = no_listener,
    ) -> None:
        self.engine = engine
        self._link = link
        self._recorder = recorder
        self._clock = clock
        self._ended = ended
        self._leases: dict[int, _Offered] = {}
        self._reuse = ReuseModel()
        self._history = ReuseHistory(self._reuse)
        self._cost = PrefillCost()
        self._ordered: tuple[int, ...] = ()
        self._ranked_s = -math.inf
        self._rank_due = False
        self._waiters: dict[int, list[asyncio.Event]] = {}
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
        now_s = self._clock.now_s()
        known = self._leases.get(lease_id)
        since_s = known.idle_since_s if known is not None else now_s
        turns = known.turns if known is not None else self._note_grant(now_s, offer)
        self._leases[lease_id] = _Offered(offer, since_s, now_s + offer.remaining_s, offer.remaining_s, turns)
        self._rank_due = True
        for waiter in self._waiters.get(lease_id, ()):
            waiter.set()
        if not offer.provisional:
            self._record(offer)

    def apply_events(self, holder: Holder, events: Sequence[HoldEvent]) -> None:
        """Learns what happened to holds. A later epoch of the holder loses every hold of the earlier one."""
        if holder.epoch > self.engine.holder.epoch:
            self._begin_epoch(holder)
        for event in events:
            lease = self._leases.get(event.lease_id)
            if lease is None:
                self._keep_early(event)
            elif event.state in _ENDING:
                self._log_ending(lease.offer.record, event.state)
                self._ended(lease.offer.record, event.state)
                self._forget(event.lease_id)
            elif event.confirmed:
                lease.offer = replace(lease.offer, provisional=False)
                self._record(lease.offer)

    def leases(self) -> Iterator[tuple[LeaseKind, bool]]:
        """Kind of each lease that the engine holds, and whether it is provisional."""
        return ((lease.offer.record.kind, lease.offer.provisional) for lease in self._leases.values())

    def lose_all(self) -> None:
        """The connector is gone, and with it every lease."""
        for lease in self._leases.values():
            self._ended(lease.offer.record, LeaseState.LOST)

    # --- what others ask ----------------------------------------------------------------------------------

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """Asks the holder's table; asks again when an unknown lease is offered in time."""
        try:
            outcome = await self._link.pin(ask)
            if (
                outcome is MissReason.UNKNOWN
                and wait_for_offer_s > 0
                and await self._is_offered(ask.lease_id, wait_for_offer_s)
            ):
                outcome = await self._link.pin(ask)
        except HolderUnreachable:
            return MissReason.UNREACHABLE
        if isinstance(outcome, Pinned):
            self._note_use(self._clock.now_s(), ask.lease_id)
        else:
            self._forget_denied({ask.lease_id: outcome})
        return outcome

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
        self._forget_denied(misses)
        now_s = self._clock.now_s()
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is not None and lease_id not in misses and now_s + duration_s >= lease.until_s:
                lease.until_s, lease.duration_s = now_s + duration_s, duration_s
        if self._rank_due or now_s >= self._ranked_s + RANK_INTERVAL_S:
            self._rank(now_s)
        return misses

    async def release(self, lease_id: int, tenant: str, *, superseded: bool) -> MissReason | None:
        """Ends a lease for its tenant, or for an operator (empty tenant). None, or what it was already.

        Raises:
            NotOwner: the lease is another tenant's.
            HolderUnreachable: the holder did not answer.
        """
        lease = self._leases.get(lease_id)
        if tenant and lease is None:
            return MissReason.UNKNOWN
        if tenant and lease is not None and lease.offer.record.tenant != tenant:
            raise NotOwner("the lease belongs to another tenant")
        return await self._link.release(lease_id, superseded=superseded)

    def drain(self, *, draining: bool) -> None:
        """Registers the engine as one that gets no new turns, or that gets them again."""
        if draining is not self.engine.draining:
            self.engine = replace(self.engine, draining=draining)
            self._recorder.set_engine(self.engine)

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
        if lease_id in self._leases:
            return True
        if sum(map(len, self._waiters.values())) >= OFFER_WAITERS_MAX:
            return False
        waiter = asyncio.Event()
        waiters = self._waiters.setdefault(lease_id, [])
        waiters.append(waiter)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await waiter.wait()
        finally:
            waiters.remove(waiter)
            if not waiters and self._waiters.get(lease_id) is waiters:
                del self._waiters[lease_id]
        return waiter.is_set()

    def _rank(self, now_s: float) -> None:
        self._ranked_s, self._rank_due = now_s, False
        self._history.advance(now_s)
        uses = {lease_id: lease.use(now_s) for lease_id, lease in self._leases.items()}
        order = eviction_order(uses, self._reuse, self._cost)
        if order != self._ordered:
            self._ordered = order
            self._link.order_evictions(order)

    def _note_grant(self, now_s: float, offer: LeaseOffer) -> int:
        """A turn has ended, and the one before it was followed. Earlier turns that were seen here."""
        if offer.record.kind is not LeaseKind.CONVERSATION:
            return 0
        self._note_use(now_s, offer.supersedes)
        return self._history.granted(now_s, offer.record.lease_id, offer.supersedes)

    def _note_use(self, now_s: float, lease_id: int) -> None:
        """A conversation goes on from a lease: it was pinned, or its successor is there."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.idle_since_s = now_s
            self._history.used(now_s, lease_id)
            self._rank_due = True

    def _record(self, offer: LeaseOffer) -> None:
        if offer.record.kind is LeaseKind.CONVERSATION:
            self._recorder.put(replace(offer.record, state=LeaseState.HELD), offer.supersedes)

    def _keep_early(self, event: HoldEvent) -> None:
        if event.confirmed or event.state in _ENDING:
            self._early[event.lease_id] = event
            self._early.move_to_end(event.lease_id)
            if len(self._early) > EARLY_EVENTS_MAX:
                self._early.popitem(last=False)

    def _log_ending(self, record: LeaseRecord, state: LeaseState) -> None:
        if record.kind is LeaseKind.CONVERSATION:
            lease_id = lease_id_to_hex(record.lease_id)
            engine_id = self.engine.holder.engine_id
            _log.info(
                "lease ended", extra={"lease_id": lease_id, "state": state.value, "engine_id": engine_id}
            )

    def _forget_denied(self, misses: Mapping[int, MissReason]) -> None:
        """Leases that the holder says have ended, whether or not it was heard when they did."""
        for lease_id, miss in misses.items():
            if miss in _DENIALS and lease_id in self._leases:
                self._forget(lease_id)

    def _forget(self, lease_id: int) -> None:
        self._leases.pop(lease_id, None)
        self._recorder.remove(lease_id)

    def _begin_epoch(self, holder: Holder) -> None:
        self.engine = replace(self.engine, holder=holder)
        self._recorder.set_engine(self.engine)
        for lease_id, lease in list(self._leases.items()):
            if lease.offer.record.holder.epoch < holder.epoch:
                self._ended(lease.offer.record, LeaseState.LOST)
                self._forget(lease_id)
