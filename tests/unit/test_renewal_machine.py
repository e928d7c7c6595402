"""Random histories of the heartbeat against a plain holder: no belief outlives what the holder keeps."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlease.core.lease import MissReason
from kvlease.core.renewal import Beat, Belief, RenewalPolicy, RenewalTable

POLICY = RenewalPolicy()
LEASES = range(1, 5)
HOLDERS = st.sampled_from(["answers", "is silent", "is out of reach"])


class Heartbeats(RuleBasedStateMachine):
    """One router and one holder; beats and acks travel in order, take their time, and may be lost with the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.table = RenewalTable(POLICY)
        self.deadlines: dict[int, float] = {}
        self.session: set[int] = set()
        self.epoch = 0
        self.beats: list[Beat] = []
        self.acks: list[tuple[int, dict[int, MissReason]]] = []

    @rule(lease_id=st.sampled_from(LEASES))
    def grant(self, lease_id: int) -> None:
        if lease_id not in self.deadlines:
            self.deadlines[lease_id] = self.now_s + POLICY.provisional_s
            self.table.expect(self.now_s, lease_id, "d")

    @rule(lease_id=st.sampled_from(LEASES))
    def begin_a_turn(self, lease_id: int) -> None:
        self.table.open(lease_id)

    @rule(lease_id=st.sampled_from(LEASES))
    def end_a_turn(self, lease_id: int) -> None:
        self.table.close(self.now_s, lease_id)

    @rule(lease_id=st.sampled_from(LEASES))
    def supersede(self, lease_id: int) -> None:
        self.table.drop(lease_id)

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 9.0, 15.0, 20.5, 31.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def send(self) -> None:
        self.beats.append(self.table.beat(self.now_s))

    @precondition(lambda self: self.beats)
    @rule(holder=HOLDERS)
    def deliver(self, holder: str = "answers") -> None:
        beat = self.beats.pop(0)
        if beat.full:
            self.session, self.epoch = set(), beat.epoch
        elif beat.epoch != self.epoch:
            self.acks.append((0, {}))
            return
        for delta in beat.engines.values():
            self.session |= set(delta.added_lease_ids)
            self.session -= set(delta.dropped_lease_ids)
        if holder == "is out of reach":
            self.acks.append((beat.sequence, dict.fromkeys(self.session, MissReason.UNREACHABLE)))
            return
        misses = {i: MissReason.EXPIRED for i in self.session if self.deadlines.get(i, 0.0) <= self.now_s}
        self.session -= set(misses)
        for lease_id in self.session:
            self.deadlines[lease_id] = max(self.deadlines[lease_id], self.now_s + POLICY.duration_s)
        if holder == "is silent":
            misses = dict.fromkeys(self.session, MissReason.UNREACHABLE) | misses
        self.acks.append((beat.sequence, misses))

    @precondition(lambda self: self.acks)
    @rule()
    def acknowledge(self) -> None:
        sequence, misses = self.acks.pop(0)
        self.table.ack(self.now_s, sequence, misses)

    @rule(there_s=st.sampled_from([0.0, 3.0]), back_s=st.sampled_from([0.0, 9.0]), holder=HOLDERS)
    def exchange(self, there_s: float, back_s: float, holder: str) -> None:
        """Sends a beat, and lets everything in flight arrive and be answered."""
        self.send()
        self.now_s += there_s
        while self.beats:
            self.deliver(holder)
        self.now_s += back_s
        while self.acks:
            self.acknowledge()

    @rule()
    def break_the_stream(self) -> None:
        self.beats.clear()
        self.acks.clear()
        self.session, self.epoch = set(), 0
        self.table.resync()

    @invariant()
    def a_lease_believed_held_is_held(self) -> None:
        for lease_id in LEASES:
            if self.table.belief(self.now_s, lease_id) is Belief.HELD:
                assert self.deadlines[lease_id] > self.now_s


Heartbeats.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestHeartbeats = Heartbeats.TestCase
