"""Random histories of the table of holds, against a model without its heap and its rows."""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlease.core.holding import Grant, Hold, HoldLimits, HoldTable, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import TERMINAL, LeaseEvent, LeaseKind, LeaseState, MissReason

LIFETIME_S = 16.0
READING_BLOCKS_MAX = 10

BACK_MAX = 3
BACK = st.integers(min_value=0, max_value=BACK_MAX)
PINS = st.sampled_from(["a", "b", "c"])
POSITIVE_SECONDS = st.sampled_from([5.0, 10.0, 3.0, 1.0, 0.25, 25.0])
SECONDS = st.just(0.0) | POSITIVE_SECONDS
USED = st.sampled_from([False, False, False, True])
STEPS = st.sampled_from([1.0, 0.25, 0.5, 2.0, 3.0, 5.0, 13.0])
ENDINGS = {
    LeaseEvent.RELEASE: "released",
    LeaseEvent.SUPERSEDE: "released",
    LeaseEvent.EVICT: "evicted",
    LeaseEvent.EXPIRE: "expired",
    LeaseEvent.LOSE_ENGINE: "lost",
}


@dataclass
class Modelled:
    """One lease: `doom` is how it must end once its pins are gone, `end` how it did."""

    kind: LeaseKind
    blocks: int
    granted_s: float
    deadline_s: float
    supersedes: int = 0
    confirmed: bool = True
    reservations: dict[str, float] = field(default_factory=dict)
    reads: dict[str, float] = field(default_factory=dict)
    doom: str = ""
    end: str = ""
    confirmed_s: float | None = None

    @property
    def pins(self) -> set[str]:
        return set(self.reservations) | set(self.reads)

    def pin_deadline_s(self, pin_id: str) -> float:
        return max(self.reservations.get(pin_id, 0.0), self.reads.get(pin_id, 0.0))

    def drop(self, pin_id: str) -> None:
        self.reservations.pop(pin_id, None)
        self.reads.pop(pin_id, None)
        if not self.pins:
            if self.doom:
                self.end = self.doom
            elif self.kind is LeaseKind.TRANSFER:
                self.end = "released"

    def ask_to_end(self, how: str) -> None:
        if self.end:
            return
        if not self.pins:
            self.end = how
        elif not self.doom or how == "lost":
            self.doom = how

    def pass_time(self, now_s: float) -> None:
        """Lives through every moment up to `now_s` in order."""
        while not self.end:
            moments = [(self.pin_deadline_s(pin), 0, pin) for pin in self.pins]
            if not self.doom:
                moments.append((min(self.deadline_s, self.granted_s + LIFETIME_S), 1, ""))
            due_s, _, pin_id = min(moments)
            if due_s > now_s:
                return
            if pin_id:
                self.drop(pin_id)
            else:
                self.ask_to_end("expired")


class HoldTableMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.epoch = 1
        self.table = HoldTable(
            Holder("engine", "boot", 1),
            HoldLimits(reading_blocks_max=READING_BLOCKS_MAX, lifetime_max_s=LIFETIME_S),
        )
        self.model: dict[int, Modelled] = {}
        self.handed_out: set[int] = set()
        self.applied = True

    def lease_id(self, back: int) -> int:
        """The lease granted `back` grants ago among those alive, or among all for the largest `back`."""
        living = [lease_id for lease_id, lease in self.model.items() if not lease.end]
        if back == BACK_MAX or not living:
            return 100 + len(self.model) - back
        return living[-1 - back % len(living)]

    def next_id(self, used: bool) -> int:
        return 100 + len(self.model) + (0 if used else 1)

    def live(self, lease_id: int) -> Modelled | None:
        lease = self.model.get(lease_id)
        return lease if lease is not None and not lease.end else None

    def pass_time(self) -> None:
        for lease in self.model.values():
            lease.pass_time(self.now_s)
        self.applied = True

    def confirm(self, lease: Modelled) -> None:
        if lease.confirmed:
            return
        lease.confirmed, lease.confirmed_s = True, self.now_s
        before = self.model.get(lease.supersedes)
        if before is not None and before is not lease:
            before.ask_to_end("released")

    def owner_of(self, pin_id: str) -> int | None:
        owners = [number for number, lease in self.model.items() if not lease.end and pin_id in lease.pins]
        assert len(owners) <= 1
        return owners[0] if owners else None

    # --- what happens -----------------------------------------------------------------------

    @initialize()
    def two_turns_are_kept(self) -> None:
        self.a_turn_is_kept(blocks=2, duration_s=5.0, provisional=False, used=False)
        self.a_turn_is_kept(blocks=3, duration_s=5.0, provisional=True, used=False)

    @rule(seconds=STEPS, seen=st.booleans())
    def time_passes(self, seconds: float, seen: bool) -> None:
        self.now_s += seconds
        self.applied = False
        if seen:
            self.table.advance(self.now_s)
            self.pass_time()

    @rule(blocks=st.integers(1, 6), duration_s=POSITIVE_SECONDS, provisional=st.booleans(), used=USED)
    def a_turn_is_kept(self, blocks: int, duration_s: float, provisional: bool, used: bool) -> None:
        self.pass_time()
        lease_id = self.next_id(used)
        supersedes = lease_id - 1
        granted = self.table.grant(
            self.now_s,
            grant_of(lease_id, LeaseKind.CONVERSATION, blocks, supersedes),
            duration_s,
            provisional=provisional,
        )
        assert granted == (lease_id not in self.model)
        if granted:
            self.model[lease_id] = Modelled(
                LeaseKind.CONVERSATION,
                blocks,
                self.now_s,
                self.now_s + duration_s,
                supersedes,
                not provisional,
            )

    @rule(pin_id=PINS, blocks=st.integers(1, 6), reservation_s=POSITIVE_SECONDS, used=USED)
    def a_prefill_is_kept(self, pin_id: str, blocks: int, reservation_s: float, used: bool) -> None:
        self.pass_time()
        lease_id = self.next_id(used)
        free = lease_id not in self.model and self.owner_of(pin_id) is None
        grant = grant_of(lease_id, LeaseKind.TRANSFER, blocks, 0)
        assert self.table.grant_transfer(self.now_s, grant, pin_id, reservation_s) == free
        if free:
            lease = Modelled(LeaseKind.TRANSFER, blocks, self.now_s, self.now_s + LIFETIME_S)
            lease.reservations[pin_id] = self.now_s + reservation_s
            self.model[lease_id] = lease

    @rule(back=st.lists(BACK, max_size=4, unique=True), duration_s=POSITIVE_SECONDS)
    def leases_are_renewed(self, back: list[int], duration_s: float) -> None:
        # A lease named twice may be renewed first and superseded by what stands in between.
        lease_ids = list(dict.fromkeys(self.lease_id(steps) for steps in back))
        self.pass_time()
        misses = self.table.renew(self.now_s, lease_ids, duration_s)
        for lease_id in lease_ids:
            lease = self.live(lease_id)
            if lease is None or lease.doom:
                self.check_miss(lease_id, misses.get(lease_id))
                continue
            assert lease_id not in misses
            lease.deadline_s = max(lease.deadline_s, self.now_s + duration_s)
            self.confirm(lease)

    @rule(pin_ids=st.lists(PINS, max_size=3, unique=True), reservation_s=POSITIVE_SECONDS)
    def reservations_are_renewed(self, pin_ids: list[str], reservation_s: float) -> None:
        self.pass_time()
        gone = self.table.renew_reservations(self.now_s, pin_ids, reservation_s)
        assert set(gone) == {pin_id for pin_id in pin_ids if self.owner_of(pin_id) is None}
        for pin_id in set(pin_ids) - set(gone):
            lease = self.model[self.owner_of(pin_id) or 0]
            if not lease.doom:
                earlier_s = lease.reservations.get(pin_id, 0.0)
                lease.reservations[pin_id] = max(earlier_s, self.now_s + reservation_s)

    @rule(back=BACK, pin_id=PINS, reservation_s=SECONDS, read_part_s=SECONDS, stale=USED)
    @precondition(lambda machine: machine.model)
    def a_pin_is_asked_for(
        self, back: int, pin_id: str, reservation_s: float, read_part_s: float, stale: bool
    ) -> None:
        lease_id = self.lease_id(back)
        self.table.advance(self.now_s)
        self.pass_time()
        if (reservation_s <= 0 and read_part_s <= 0) or self.owner_of(pin_id) not in (None, lease_id):
            return
        holder = Holder("engine", "boot", self.epoch + (1 if stale else 0))
        asked = PinAsk(lease_id, pin_id, holder, "t", reservation_s, read_part_s)
        answer = self.table.pin(self.now_s, asked)
        lease = self.live(lease_id)
        if stale:
            assert answer is MissReason.HOLDER_CHANGED
        elif lease is None:
            self.check_miss(lease_id, answer)
        elif lease.doom and (pin_id not in lease.pins or not read_part_s or lease.doom == "lost"):
            assert answer is (
                MissReason.LOST if lease.doom == "lost" and pin_id in lease.pins else MissReason.DRAINING
            )
        elif not lease.pins and self.reading_blocks() + lease.blocks > READING_BLOCKS_MAX:
            assert answer is MissReason.READING_CAP
        else:
            assert isinstance(answer, Hold)
            self.note_pin(lease, pin_id, reservation_s, read_part_s)
            self.confirm(lease)

    def note_pin(self, lease: Modelled, pin_id: str, reservation_s: float, read_part_s: float) -> None:
        if reservation_s and not lease.doom:
            earlier_s = lease.reservations.get(pin_id, 0.0)
            lease.reservations[pin_id] = max(earlier_s, self.now_s + reservation_s)
        if read_part_s:
            lease.reads[pin_id] = max(lease.reads.get(pin_id, 0.0), self.now_s + read_part_s)

    @rule(back=BACK, pin_id=PINS)
    def a_pin_ends(self, back: int, pin_id: str) -> None:
        lease_id = self.lease_id(back)
        self.pass_time()
        self.table.unpin(self.now_s, lease_id, pin_id)
        lease = self.live(lease_id)
        if lease is not None and pin_id in lease.pins:
            lease.drop(pin_id)

    @rule(
        rarely=st.booleans(), back=BACK, event=st.sampled_from(sorted(ENDINGS, key=lambda event: event.value))
    )
    def a_lease_is_ended(self, rarely: bool, back: int, event: LeaseEvent) -> None:
        if not rarely:
            return
        lease_id = self.lease_id(back)
        self.pass_time()
        miss = self.table.end(self.now_s, lease_id, event)
        lease = self.live(lease_id)
        if lease is None:
            self.check_miss(lease_id, miss)
            return
        assert miss is None
        if event is LeaseEvent.LOSE_ENGINE:
            lease.end = "lost"
        else:
            lease.ask_to_end(ENDINGS[event])

    @rule(rarely=st.integers(0, 9))
    def the_cache_is_reset(self, rarely: int) -> None:
        if rarely < 9:
            return
        self.pass_time()
        before = self.table.holder
        clean = self.table.reset(self.now_s)
        for lease in self.model.values():
            lease.ask_to_end("lost")
        self.epoch += 1
        assert self.table.holder == Holder(before.engine_id, before.boot_id, before.epoch + 1)
        assert clean == (not any(not lease.end for lease in self.model.values()))

    @rule()
    def ended_holds_are_taken(self) -> None:
        self.table.advance(self.now_s)
        self.pass_time()
        for hold in self.table.take_ended():
            lease_id = hold.grant.lease_id
            assert lease_id not in self.handed_out
            assert self.model[lease_id].end
            assert (
                hold.grant.block_ids
                == grant_of(lease_id, hold.grant.kind, self.model[lease_id].blocks, 0).block_ids
            )
            self.handed_out.add(lease_id)
        assert not self.table.has_ended()
        assert self.handed_out == {lease_id for lease_id, lease in self.model.items() if lease.end}

    # --- what must hold ---------------------------------------------------------------------

    def check_miss(self, lease_id: int, miss: object) -> None:
        assert isinstance(miss, MissReason)
        lease = self.model.get(lease_id)
        if lease is None:
            assert miss is MissReason.UNKNOWN
        elif not lease.end:
            assert miss is MissReason.DRAINING
        elif lease.kind is LeaseKind.TRANSFER:
            assert miss.value in {lease.end, "released", "expired"}
        else:
            assert miss.value == lease.end

    def reading_blocks(self) -> int:
        return sum(
            lease.blocks
            for lease in self.model.values()
            if not lease.end and lease.pins and lease.kind is LeaseKind.CONVERSATION
        )

    @invariant()
    def the_table_and_the_model_agree(self) -> None:
        if not self.applied:
            return
        assert {hold.grant.lease_id for hold in self.table.holds()} == {
            lease_id for lease_id, lease in self.model.items() if not lease.end
        }
        for hold in self.table.holds():
            lease = self.model[hold.grant.lease_id]
            assert set(hold.pins) == lease.pins
            expected = "draining" if lease.doom else "reading" if lease.pins else "held"
            assert hold.state.value == expected
            assert hold.state not in TERMINAL
            assert hold.provisional == (not lease.confirmed)
            for pin_id in lease.pins:
                assert self.table.lease_of_pin(pin_id) == hold.grant.lease_id

    @invariant()
    def at_most_one_lease_of_a_chain_lives_once_confirmed(self) -> None:
        if not self.applied:
            return
        for lease in self.model.values():
            if lease.end or lease.confirmed_s is None:
                continue
            before = self.table.get(lease.supersedes)
            if before is not None and before.granted_s < lease.confirmed_s:
                assert before.state is LeaseState.DRAINING

    @invariant()
    def the_cap_holds_and_the_queue_is_bounded(self) -> None:
        if not self.applied:
            return
        assert self.table.reading_blocks() == self.reading_blocks() <= READING_BLOCKS_MAX
        assert self.table.queued_moments() <= 2 * len(self.table) + 65


def grant_of(lease_id: int, kind: LeaseKind, blocks: int, supersedes: int) -> Grant:
    return Grant(
        lease_id=lease_id,
        kind=kind,
        block_ids=tuple(range(lease_id * 10, lease_id * 10 + blocks)),
        digests=b"d" * 16 * blocks,
        tokens=16 * blocks,
        block_size=16,
        tenant="t",
        supersedes=supersedes,
    )


HoldTableMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
TestRandomHistories = HoldTableMachine.TestCase
