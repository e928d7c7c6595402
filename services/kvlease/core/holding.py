"""The table of an engine's holds: the one place that says whether a block may be read or freed.

Pure and not thread-safe: the caller brings the time (`now_s`, monotonic and its own) and a lock. A hold whose
lease has ended waits in `take_ended` until the owner of the block pool has given its blocks back; a block
never leaves while a pin lives. Deadlines are applied by `advance`, which every question calls first, so an
answer is never given on a lease whose time has passed.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvlease.core.errors import InvalidArgument
from kvlease.core.ids import Holder
from kvlease.core.lease import (
    ENDINGS,
    MISS_OF_STATE,
    TERMINAL,
    LeaseEvent,
    LeaseKind,
    LeaseState,
    MissReason,
    transition,
)

REMEMBERED_ENDINGS_MAX = 65_536
STALE_MOMENTS_MAX = 64


@dataclass(frozen=True, slots=True)
class HoldLimits:
    """Bounds of the table.

    Attributes:
        reading_blocks_max: blocks of CONVERSATION leases that may be pinned at once; at the cap a PIN is
            refused, since pinned blocks cannot be evicted for a live request.
        lifetime_max_s: a lease ends this long after its grant, however often it is renewed.
        tenant_leases_max: CONVERSATION leases that one tenant may keep; None: any number. A lease and the
            successor that nobody confirmed yet count as one.
        tenant_blocks_max: blocks that a tenant's CONVERSATION leases may keep, shared ones counted once.
    """

    reading_blocks_max: int
    lifetime_max_s: float = 1800.0
    tenant_leases_max: int | None = None
    tenant_blocks_max: int | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """What a hold is made of; nothing in it changes after the grant.

    Attributes:
        block_ids: physical block ids in prompt order.
        digests: 16 bytes per full block, concatenated.
        tail_digest: digest of a partial last block, empty when there is none.
        tokens: tokens whose KV lies in the blocks.
        supersedes: the lease of the conversation's previous turn, 0 when there is none.
    """

    lease_id: int
    kind: LeaseKind
    block_ids: tuple[int, ...]
    digests: bytes
    tokens: int
    block_size: int
    tail_digest: bytes = b""
    tenant: str = ""
    conversation_key: bytes = b""
    chain_keys: tuple[int, ...] = ()
    supersedes: int = 0
    model: str = ""
    lora: str = ""


@dataclass(frozen=True, slots=True)
class PinAsk:
    """A question for a pin. At least one part must be present.

    Attributes:
        reservation_s: seconds that the router's heartbeat renews; 0 leaves that part as it is.
        read_part_s: seconds that the READ fence counts; 0 leaves that part as it is.
    """

    lease_id: int
    pin_id: str
    holder: Holder
    tenant: str
    reservation_s: float = 0.0
    read_part_s: float = 0.0


@dataclass(slots=True)
class Pin:
    """A live pin; `deadline_s` is the later of its two parts."""

    reservation_deadline_s: float
    read_deadline_s: float

    @property
    def deadline_s(self) -> float:
        """When the pin ends by itself."""
        return max(self.reservation_deadline_s, self.read_deadline_s)


@dataclass(slots=True)
class Hold:
    """A lease at its holder."""

    grant: Grant
    state: LeaseState
    granted_s: float
    deadline_s: float
    provisional: bool
    remembered: LeaseState | None = None
    pins: dict[str, Pin] = field(default_factory=dict[str, Pin])
    due_s: float | None = None


@dataclass(frozen=True, slots=True)
class HoldEvent:
    """Something that happened to a hold, for the sidecar.

    Attributes:
        state: the state after it.
        confirmed: a provisional lease was confirmed.
    """

    lease_id: int
    state: LeaseState
    confirmed: bool = False


class HoldTable:
    """All holds of one engine incarnation."""

    def __init__(self, holder: Holder, limits: HoldLimits) -> None:
        self.holder = holder
        self._limits = limits
        self._holds: dict[int, Hold] = {}
        self._endings: OrderedDict[int, LeaseState] = OrderedDict()
        self._keepers: Counter[int] = Counter()
        self._pin_lease: dict[str, int] = {}
        self._due: list[tuple[float, int]] = []
        self._ended: list[Hold] = []
        self._events: list[HoldEvent] = []

    # --- what others read -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._holds)

    def get(self, lease_id: int) -> Hold | None:
        """The hold of a lease that has not ended."""
        return self._holds.get(lease_id)

    def holds(self) -> Iterator[Hold]:
        """Every hold that has not ended, oldest grant first."""
        return iter(self._holds.values())

    def lease_of_pin(self, pin_id: str) -> int | None:
        """The lease that a live pin keeps."""
        return self._pin_lease.get(pin_id)

    def reading_blocks(self) -> int:
        """Blocks of CONVERSATION leases that pins keep from ending."""
        return sum(len(hold.grant.block_ids) for hold in self._holds.values() if _counts_as_reading(hold))

    def is_over_cap(self, tenant: str) -> bool:
        """Whether a tenant keeps more than it may: the owner of the blocks evicts one of its leases then."""
        leases_max, blocks_max = self._limits.tenant_leases_max, self._limits.tenant_blocks_max
        kept = [
            hold
            for hold in self._holds.values()
            if hold.grant.tenant == tenant and hold.grant.kind is LeaseKind.CONVERSATION
        ]
        if leases_max is not None and len(kept) > leases_max:
            replaced = {hold.grant.supersedes for hold in kept if hold.provisional}
            if sum(hold.grant.lease_id not in replaced for hold in kept) > leases_max:
                return True
        if blocks_max is None or sum(len(hold.grant.block_ids) for hold in kept) <= blocks_max:
            return False
        return len({block_id for hold in kept for block_id in hold.grant.block_ids}) > blocks_max

    def exclusive_blocks(self, hold: Hold) -> int:
        """Blocks that only this hold keeps, not counting the lease that it is about to supersede."""
        replaced = self._holds.get(hold.grant.supersedes) if hold.provisional else None
        shared = frozenset(replaced.grant.block_ids) if replaced is not None else frozenset[int]()
        return sum(self._keepers[block] - (block in shared) == 1 for block in hold.grant.block_ids)

    def queued_moments(self) -> int:
        """Length of the queue of deadlines; bounded by the number of holds."""
        return len(self._due)

    def take_ended(self) -> list[Hold]:
        """Holds whose blocks the pool's owner must give back now; each is handed out once."""
        ended, self._ended = self._ended, []
        return ended

    def has_ended(self) -> bool:
        """Whether `take_ended` has something to give back."""
        return bool(self._ended)

    def take_events(self) -> list[HoldEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    # --- verbs ----------------------------------------------------------------------------------------

    def grant(self, now_s: float, grant: Grant, duration_s: float, *, provisional: bool) -> bool:
        """Grants a CONVERSATION lease for `duration_s`. False, and no change, when the id was used before."""
        if grant.kind is not LeaseKind.CONVERSATION:
            raise InvalidArgument("a TRANSFER lease is granted under its pin")
        return self._admit(now_s, grant, LeaseEvent.GRANT_CONVERSATION, now_s + duration_s, provisional)

    def grant_transfer(self, now_s: float, grant: Grant, pin_id: str, reservation_s: float) -> bool:
        """Grants a TRANSFER lease in READING under its turn's pin. False when the id was used before."""
        if grant.kind is not LeaseKind.TRANSFER:
            raise InvalidArgument("only a TRANSFER lease is granted under a pin")
        self.advance(now_s)
        deadline_s = now_s + self._limits.lifetime_max_s
        if pin_id in self._pin_lease or not self._admit(
            now_s, grant, LeaseEvent.GRANT_TRANSFER, deadline_s, False
        ):
            return False
        self._add_pin(self._holds[grant.lease_id], pin_id, Pin(now_s + reservation_s, now_s))
        return True

    def renew(self, now_s: float, lease_ids: Iterable[int], duration_s: float) -> dict[int, MissReason]:
        """Renews leases to at least `duration_s` from now, and confirms provisional ones. Returns the misses.

        A renewal never shortens: whoever asked before believes in the time that it was promised.
        """
        self.advance(now_s)
        misses: dict[int, MissReason] = {}
        for lease_id in lease_ids:
            hold = self._holds.get(lease_id)
            if hold is None or transition(hold.state, LeaseEvent.RENEW) is None:
                misses[lease_id] = self._miss(lease_id)
                continue
            self._apply(hold, LeaseEvent.RENEW)
            self._set_deadline(hold, max(hold.deadline_s, now_s + duration_s))
            self._confirm(now_s, hold)
        return misses

    def renew_reservations(self, now_s: float, pin_ids: Iterable[str], reservation_s: float) -> list[str]:
        """Renews the reservation part of pins; returns the pins that are gone. DRAINING renews none."""
        self.advance(now_s)
        gone: list[str] = []
        for pin_id in pin_ids:
            lease_id = self._pin_lease.get(pin_id)
            if lease_id is None:
                gone.append(pin_id)
                continue
            hold = self._holds[lease_id]
            if hold.state is LeaseState.READING:
                self._extend_pin(hold, pin_id, reservation_deadline_s=now_s + reservation_s)
        return gone

    def pin(self, now_s: float, ask: PinAsk) -> Hold | MissReason:
        """Takes a pin, or renews the parts of one that lives. The hold, or why not."""
        if ask.reservation_s <= 0 and ask.read_part_s <= 0:
            raise InvalidArgument("a pin needs a reservation or a read part longer than 0 s")
        self.advance(now_s)
        hold = self._holds.get(ask.lease_id)
        refusal = self._pin_refusal(ask, hold)
        if refusal is not None or hold is None:
            return refusal or MissReason.UNKNOWN
        if ask.pin_id not in hold.pins:
            self._apply(hold, LeaseEvent.PIN)
            self._add_pin(hold, ask.pin_id, Pin(now_s, now_s))
        pinned = hold.state is LeaseState.READING
        self._extend_pin(
            hold,
            ask.pin_id,
            reservation_deadline_s=now_s + ask.reservation_s if pinned else now_s,
            read_deadline_s=now_s + ask.read_part_s,
        )
        self._confirm(now_s, hold)
        return hold

    def unpin(self, now_s: float, lease_id: int, pin_id: str) -> None:
        """Ends a pin; idempotent, also for a lease that is gone."""
        self.advance(now_s)
        hold = self._holds.get(lease_id)
        if hold is not None and pin_id in hold.pins:
            self._drop_pin(now_s, hold, pin_id)

    def end(self, now_s: float, lease_id: int, event: LeaseEvent) -> MissReason | None:
        """Applies an ending (RELEASE, SUPERSEDE, EVICT, ...). None, or what the lease was already."""
        if event not in ENDINGS:
            raise InvalidArgument(f"{event.value} does not end a lease")
        self.advance(now_s)
        hold = self._holds.get(lease_id)
        if hold is None:
            return self._miss(lease_id)
        self._apply(hold, event)
        return None

    def reset(self, now_s: float) -> bool:
        """Loses every hold and begins the next epoch. False when pinned blocks stay referenced."""
        self.advance(now_s)
        for hold in list(self._holds.values()):
            self._apply(hold, LeaseEvent.LOSE_RESET)
        holder = self.holder
        self.holder = Holder(holder.engine_id, holder.boot_id, holder.epoch + 1)
        return not self._holds

    def advance(self, now_s: float) -> None:
        """Applies every deadline up to `now_s`."""
        while self._due and self._due[0][0] <= now_s:
            due_s, lease_id = heapq.heappop(self._due)
            hold = self._holds.get(lease_id)
            if hold is not None and hold.due_s == due_s:
                hold.due_s = None
                self._advance_hold(now_s, hold)

    # --- inside ---------------------------------------------------------------------------------------

    def _admit(
        self, now_s: float, grant: Grant, event: LeaseEvent, deadline_s: float, provisional: bool
    ) -> bool:
        self.advance(now_s)
        row = transition(LeaseState.NONE, event)
        if row is None or row.target is None:
            raise InvalidArgument(f"{event.value} does not begin a lease")
        if grant.lease_id in self._holds or grant.lease_id in self._endings:
            return False
        hold = Hold(grant, row.target, now_s, deadline_s, provisional)
        self._holds[grant.lease_id] = hold
        self._keepers.update(grant.block_ids)
        self._set_deadline(hold, deadline_s)
        self._events.append(HoldEvent(grant.lease_id, hold.state))
        return True

    def _pin_refusal(self, ask: PinAsk, hold: Hold | None) -> MissReason | None:
        if not self.holder.answers_for(ask.holder):
            return MissReason.HOLDER_CHANGED
        if hold is None:
            return self._miss(ask.lease_id)
        if hold.grant.tenant != ask.tenant:
            return MissReason.FORBIDDEN
        if ask.pin_id in hold.pins:
            return _renewed_pin_refusal(ask, hold)
        if ask.pin_id in self._pin_lease:
            raise InvalidArgument("the pin id is in use for another lease")
        if transition(hold.state, LeaseEvent.PIN) is None:
            return MISS_OF_STATE[hold.state]
        first = hold.state is LeaseState.HELD
        if first and self.reading_blocks() + len(hold.grant.block_ids) > self._limits.reading_blocks_max:
            return MissReason.READING_CAP
        return None

    def _confirm(self, now_s: float, hold: Hold) -> None:
        if not hold.provisional:
            return
        hold.provisional = False
        self._events.append(HoldEvent(hold.grant.lease_id, hold.state, confirmed=True))
        if hold.grant.supersedes and hold.grant.supersedes != hold.grant.lease_id:
            superseded = self._holds.get(hold.grant.supersedes)
            if superseded is not None and superseded.grant.tenant == hold.grant.tenant:
                self._apply(superseded, LeaseEvent.SUPERSEDE)

    def _advance_hold(self, now_s: float, hold: Hold) -> None:
        for pin_id in [pin_id for pin_id, pin in hold.pins.items() if pin.deadline_s <= now_s]:
            self._drop_pin(now_s, hold, pin_id)
        if hold.state in (LeaseState.HELD, LeaseState.READING):
            self._expire_if_due(now_s, hold)
        if hold.state not in TERMINAL:
            self._schedule(hold)

    def _expire_if_due(self, now_s: float, hold: Hold) -> None:
        if now_s >= hold.granted_s + self._limits.lifetime_max_s:
            self._apply(hold, LeaseEvent.MAX_LIFETIME)
        elif now_s >= hold.deadline_s:
            self._apply(hold, LeaseEvent.EXPIRE)

    def _drop_pin(self, now_s: float, hold: Hold, pin_id: str) -> None:
        del hold.pins[pin_id]
        del self._pin_lease[pin_id]
        if hold.pins:
            event = LeaseEvent.UNPIN
        elif hold.grant.kind is LeaseKind.TRANSFER:
            event = LeaseEvent.LAST_UNPIN_TRANSFER
        else:
            event = LeaseEvent.LAST_UNPIN
        self._apply(hold, event)
        if hold.state is LeaseState.HELD:
            self._expire_if_due(now_s, hold)
        if hold.state is LeaseState.HELD:
            self._schedule(hold)

    def _add_pin(self, hold: Hold, pin_id: str, pin: Pin) -> None:
        hold.pins[pin_id] = pin
        self._pin_lease[pin_id] = hold.grant.lease_id
        self._schedule(hold)

    def _extend_pin(
        self, hold: Hold, pin_id: str, *, reservation_deadline_s: float = 0.0, read_deadline_s: float = 0.0
    ) -> None:
        pin = hold.pins[pin_id]
        pin.reservation_deadline_s = max(pin.reservation_deadline_s, reservation_deadline_s)
        pin.read_deadline_s = max(pin.read_deadline_s, read_deadline_s)
        self._schedule(hold)

    def _set_deadline(self, hold: Hold, deadline_s: float) -> None:
        hold.deadline_s = deadline_s
        self._schedule(hold)

    def _schedule(self, hold: Hold) -> None:
        """Queues the hold's next moment unless an earlier one is queued: that one looks at it again."""
        moments = [pin.deadline_s for pin in hold.pins.values()]
        if hold.state in (LeaseState.HELD, LeaseState.READING):
            moments.append(min(hold.deadline_s, hold.granted_s + self._limits.lifetime_max_s))
        if not moments:
            return
        due_s = min(moments)
        if hold.due_s is None or due_s < hold.due_s:
            hold.due_s = due_s
            heapq.heappush(self._due, (due_s, hold.grant.lease_id))
            self._compact_due()

    def _compact_due(self) -> None:
        """Drops moments that no hold waits for once they outnumber those that one does."""
        if len(self._due) <= 2 * len(self._holds) + STALE_MOMENTS_MAX:
            return
        self._due = [
            (hold.due_s, lease_id) for lease_id, hold in self._holds.items() if hold.due_s is not None
        ]
        heapq.heapify(self._due)

    def _apply(self, hold: Hold, event: LeaseEvent) -> None:
        row = transition(hold.state, event)
        if row is None:
            raise InvalidArgument(f"a lease in {hold.state.value} refuses {event.value}")
        if row.remember is not None:
            hold.remembered = row.remember
        before = hold.state
        hold.state = row.target or hold.remembered or LeaseState.LOST
        if hold.state is before:
            return
        self._events.append(HoldEvent(hold.grant.lease_id, hold.state))
        if hold.state in TERMINAL:
            self._finish(hold)

    def _finish(self, hold: Hold) -> None:
        lease_id = hold.grant.lease_id
        del self._holds[lease_id]
        for block_id in hold.grant.block_ids:
            self._keepers[block_id] -= 1
            if not self._keepers[block_id]:
                self._keepers.pop(block_id)
        for pin_id in hold.pins:
            self._pin_lease.pop(pin_id, None)
        self._endings[lease_id] = hold.state
        if len(self._endings) > REMEMBERED_ENDINGS_MAX:
            self._endings.popitem(last=False)
        self._ended.append(hold)

    def _miss(self, lease_id: int) -> MissReason:
        hold = self._holds.get(lease_id)
        state = hold.state if hold is not None else self._endings.get(lease_id)
        return MISS_OF_STATE.get(state, MissReason.UNKNOWN) if state is not None else MissReason.UNKNOWN


def _renewed_pin_refusal(ask: PinAsk, hold: Hold) -> MissReason | None:
    """A draining lease lets a pin that lives start its read part, but renews no reservation.

    After a reset it does neither: what the blocks hold may come from other weights.
    """
    if hold.remembered is LeaseState.LOST:
        return MissReason.LOST
    if hold.state is LeaseState.DRAINING and ask.read_part_s <= 0:
        return MissReason.DRAINING
    return None


def _counts_as_reading(hold: Hold) -> bool:
    pinned = hold.state in (LeaseState.READING, LeaseState.DRAINING)
    return pinned and hold.grant.kind is LeaseKind.CONVERSATION
