"""The life of a READ: its pin, its fence, and the one UNPIN that ends it."""

import pytest

from kvlease.core.digests import BlockChain
from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, MissReason
from kvlease.core.records import BlockList, KvLocation, Pinned
from kvlease.core.turn import ReadOrder
from kvlease.testing.clock import ManualClock
from kvlease_vllm.reader import Read, Reads, Stage

PEER = Holder("peer", "boot")
READ_PART_S = 10.0
FENCE_S = 8.0


class Bench:
    """Reads with a sidecar that notes what it is sent."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.attached = True
        self.sent: list[tuple[str, str]] = []
        self.asks: list[tuple[int, PinAsk]] = []
        self.reads = Reads(self._ask, self._unpin, READ_PART_S, 60.0, 2.0, self.clock.now_s)
        self.reads._met.add(PEER.engine_id)

    def _ask(self, attempt_id: int, ask: PinAsk, order: ReadOrder) -> bool:
        if self.attached:
            self.sent.append(("ask", ask.pin_id))
            self.asks.append((attempt_id, ask))
        return self.attached

    def _unpin(self, order: ReadOrder) -> None:
        self.sent.append(("unpin", order.pin_id))

    def begin(self, request_id: str = "r", pin_id: str = "pin", holder: Holder = PEER) -> Read:
        self.reads.begin(request_id, ReadOrder(7, pin_id, LeaseKind.CONVERSATION, holder, "a:1"), "tenant")
        read = self.reads.get(request_id)
        assert read is not None
        return read

    def answer(self, read: Read, reason: MissReason | None = None) -> None:
        self.reads.answer(read.attempt_id, reason or pinned())

    def unpins(self, pin_id: str = "pin") -> int:
        return self.sent.count(("unpin", pin_id))


def pinned() -> Pinned:
    return Pinned(PEER, 8, "layout", BlockList((1, 2), b"x" * 32, 8), KvLocation("host", 1))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_fence_counts_from_before_the_question_was_sent(bench: Bench) -> None:
    read = bench.begin()
    bench.clock.advance(1.5)
    bench.answer(read)
    assert bench.reads.post(read, (3,), 4)
    bench.clock.advance(FENCE_S - 1.5 - 0.01)
    assert bench.reads.accept(read)
    bench.clock.advance(0.01)
    assert not bench.reads.accept(read)


def test_the_first_read_from_a_peer_has_a_longer_part(bench: Bench) -> None:
    read = bench.begin(holder=Holder("stranger", "boot"))
    assert bench.asks[0][1].read_part_s == 60.0
    bench.answer(read)
    bench.reads.post(read, (3,), 4)
    bench.reads.settle(read, "read")
    bench.begin("second", "other", holder=Holder("stranger", "boot"))
    assert bench.asks[1][1].read_part_s == READ_PART_S


def test_a_read_part_that_queues_is_asked_for_again(bench: Bench) -> None:
    read = bench.begin()
    bench.answer(read)
    bench.clock.advance(3.9)
    bench.reads.ask_again()
    assert len(bench.asks) == 1
    bench.clock.advance(0.2)
    bench.reads.ask_again()
    bench.reads.ask_again()
    assert len(bench.asks) == 2
    assert bench.reads.is_waiting(read)
    bench.answer(read)
    assert not bench.reads.is_waiting(read)
    assert read.fence_s == pytest.approx(bench.clock.now_s() + FENCE_S)


def test_a_read_part_that_is_not_granted_again_bounds_the_wait(bench: Bench) -> None:
    read = bench.begin()
    bench.answer(read)
    bench.clock.advance(4.0)
    bench.reads.ask_again()
    bench.clock.advance(2.1)
    assert not bench.reads.is_waiting(read)
    assert read.outcome == "unreachable"
    assert bench.unpins() == 1


def test_a_posted_read_keeps_its_fence_whatever_is_answered(bench: Bench) -> None:
    read = bench.begin()
    bench.answer(read)
    bench.clock.advance(4.1)
    bench.reads.ask_again()
    fence_s = read.fence_s
    bench.reads.post(read, (3,), 4)
    bench.answer(read)
    bench.answer(read, MissReason.EXPIRED)
    assert (read.fence_s, read.stage, read.outcome) == (fence_s, Stage.POSTED, "")
    assert bench.unpins() == 0


def test_nothing_is_asked_after_the_pin_was_ended(bench: Bench) -> None:
    read = bench.begin()
    bench.answer(read)
    bench.reads.settle(read, "below_threshold")
    bench.clock.advance(5.0)
    bench.reads.ask_again()
    assert bench.sent == [("ask", "pin"), ("unpin", "pin")]


def test_a_pin_that_was_lost_before_the_post_makes_the_read_fail_and_is_ended_once(bench: Bench) -> None:
    read = bench.begin()
    bench.answer(read)
    bench.clock.advance(4.1)
    bench.reads.ask_again()
    bench.answer(read, MissReason.LOST)
    assert not bench.reads.post(read, (3,), 4)
    assert not bench.reads.accept(read)
    bench.clock.advance(60.0)
    assert bench.reads.overdue() == []
    bench.reads.settle(read, "failed")
    assert (read.outcome, bench.unpins()) == ("lost", 1)
    assert bench.reads.counters["reads"] == 0


def test_an_overdue_read_is_given_up_once(bench: Bench) -> None:
    read = bench.begin()
    bench.answer(read)
    bench.reads.post(read, (3,), 4)
    bench.clock.advance(FENCE_S)
    assert bench.reads.overdue() == [read]
    assert bench.reads.overdue() == []
    assert not bench.reads.accept(read)


def test_a_read_that_one_rank_saw_fail_is_still_given_up(bench: Bench) -> None:
    read = bench.begin()
    bench.answer(read)
    bench.reads.post(read, (3,), 4)
    read.failed = True
    bench.clock.advance(FENCE_S)
    assert bench.reads.overdue() == [read]


def test_without_a_sidecar_a_read_is_unreachable_at_once(bench: Bench) -> None:
    bench.attached = False
    read = bench.begin()
    assert (read.outcome, bench.reads.is_waiting(read)) == ("unreachable", False)


@pytest.mark.parametrize("settled", ["never", "before", "after"])
def test_every_ending_unpins_exactly_once(bench: Bench, settled: str) -> None:
    read = bench.begin()
    bench.answer(read)
    if settled == "before":
        bench.reads.settle(read, "mismatch")
    bench.reads.forget("r")
    if settled == "after":
        bench.reads.settle(read, "mismatch")
    assert bench.unpins() == 1
    assert bench.reads.get("r") is None


def test_a_posted_read_outlives_its_request(bench: Bench) -> None:
    read = bench.begin()
    bench.answer(read)
    bench.reads.post(read, (3,), 4)
    assert bench.reads.forget("r") is read
    assert (bench.reads.posted(), bench.unpins()) == ([read], 0)
    bench.reads.settle(read, "read")
    bench.reads.drop(read)
    assert (bench.reads.posted(), bench.unpins()) == ([], 1)


def test_requests_that_share_a_pin_end_it_together(bench: Bench) -> None:
    first, second = bench.begin("0"), bench.begin("1")
    bench.reads.settle(first, "read")
    bench.reads.settle(first, "read")
    assert bench.unpins() == 0
    bench.reads.settle(second, "failed")
    assert bench.unpins() == 1


def test_a_reset_of_the_caches_loses_every_read_and_gives_up_what_is_in_flight(bench: Bench) -> None:
    asking, held, posted = (bench.begin(name, name) for name in "ahp")
    for read in (held, posted):
        bench.answer(read)
    bench.reads.post(posted, (3,), 4)
    bench.reads.lose()
    assert [read.outcome for read in (asking, held, posted)] == ["lost", "lost", ""]
    assert not bench.reads.post(held, (4,), 4)
    assert not bench.reads.accept(posted)
    assert posted in bench.reads.overdue()
    assert bench.unpins("p") == 0


def test_nothing_is_read_under_a_pin_that_was_ended_before(bench: Bench) -> None:
    bench.reads.settle(bench.begin("0"), "read")
    bench.reads.begin("1", ReadOrder(7, "pin", LeaseKind.CONVERSATION, PEER, "a:1"), "tenant")
    assert bench.reads.get("1") is None
    assert bench.sent == [("ask", "pin"), ("unpin", "pin")]


def test_a_short_common_prefix_counts_as_a_mismatch_and_a_whole_one_does_not(bench: Bench) -> None:
    read = bench.begin()
    held, prompt = BlockChain(4, b"x" * 32, 8), BlockChain(4, b"x" * 32, 9)
    bench.reads.verify(read, held, prompt, 8)
    assert bench.reads.counters["mismatches"] == 0
    bench.reads.verify(read, held, prompt, 4)
    assert bench.reads.counters["mismatches"] == 1


def test_answers_to_nobody_change_nothing(bench: Bench) -> None:
    read = bench.begin()
    bench.reads.answer(read.attempt_id + 1, pinned())
    bench.answer(read)
    bench.answer(read, MissReason.EXPIRED)
    assert read.stage is Stage.PINNED
