"""A READ that ends too late, or not at all, in vLLM's real scheduler and worker bookkeeping."""

import pytest
from engine_harness import BLOCK, REMOTE, Harness, keep, make_harness, make_request, read, turn

from kvlease.core.ids import Holder

FENCE_S = 0.8 * 60.0


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return make_harness(monkeypatch)


def prompt(tokens: int, start: int = 1) -> list[int]:
    return [start * 1000 + index for index in range(tokens)]


def begin_read(engine: Harness, name: str = "a") -> None:
    engine.add(make_request(name, prompt(4 * BLOCK), turn(read(pin_id=name), keep(1)), max_tokens=2))
    engine.answer(engine.pinned(prompt(4 * BLOCK)))
    engine.step()


def destination(engine: Harness, name: str = "a") -> list[int]:
    return next(local for request_id, local, _ in engine.ranks[0].worker.posted if request_id == name)


def test_a_read_that_is_seen_done_just_before_the_fence_counts(engine: Harness) -> None:
    begin_read(engine)
    engine.clock.advance(FENCE_S - 0.01)
    engine.finish_reads()
    engine.run()
    assert engine.reports["a"]["outcome"] == "read"


def test_a_read_that_ends_in_the_step_that_crosses_the_fence_is_refused(engine: Harness) -> None:
    begin_read(engine)
    engine.schedule()
    engine.finish_reads()
    engine.clock.advance(FENCE_S)
    engine.finish_step()
    assert engine.sidecar.unpinned == []
    assert engine.scheduler.finished_recving_kv_req_ids == set()
    engine.run()
    report = engine.reports["a"]
    assert (report["outcome"], report["read_tokens"], report["kept_tokens"]) == ("fence", 0, 4 * BLOCK)
    assert engine.sidecar.unpinned == ["a"]
    assert engine.half._quarantine.blocks == 0


def test_a_refused_read_is_computed_from_the_first_token(engine: Harness) -> None:
    begin_read(engine)
    engine.schedule()
    engine.finish_reads()
    engine.clock.advance(FENCE_S)
    engine.finish_step()
    engine.step()
    assert engine.schedule().num_scheduled_tokens == {"a": 4 * BLOCK}
    engine.finish_step()


def test_a_read_that_hangs_is_given_up_and_its_blocks_stay_out_of_the_pool(engine: Harness) -> None:
    begin_read(engine)
    blocks = destination(engine)
    engine.clock.advance(FENCE_S)
    engine.run()
    assert engine.reports["a"]["outcome"] == "fence"
    assert engine.half._quarantine.blocks == len(blocks)
    assert all(engine.pool.blocks[block].ref_cnt == 1 for block in blocks)
    other = engine.add(make_request("b", prompt(30 * BLOCK, start=4), max_tokens=2))
    engine.step()
    assert not set(blocks) & set(engine.scheduler.kv_cache_manager.get_block_ids(other.request_id)[0])


def test_quarantined_blocks_return_once_the_handles_have_ended(engine: Harness) -> None:
    begin_read(engine)
    engine.clock.advance(FENCE_S)
    engine.run()
    engine.clock.advance(60.0)
    engine.finish_reads()
    engine.add(make_request("b", prompt(3, start=9)))
    engine.run()
    assert engine.half._quarantine.blocks == 0
    assert engine.free == 63
    assert engine.ranks[0].worker.nixl_wrapper.released == [1]


def test_a_handle_that_cannot_be_released_keeps_the_blocks(engine: Harness) -> None:
    begin_read(engine)
    engine.clock.advance(FENCE_S)
    engine.run()
    engine.ranks[0].worker.nixl_wrapper.stuck = {1}
    engine.finish_reads("ERR")
    engine.add(make_request("b", prompt(3, start=9)))
    engine.run()
    assert engine.half._quarantine.blocks > 0
    engine.ranks[0].worker.nixl_wrapper.stuck = set()
    engine.add(make_request("c", prompt(3, start=9)))
    engine.run()
    assert engine.half._quarantine.blocks == 0


def test_blocks_return_only_when_both_ranks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(monkeypatch, ranks=2)
    begin_read(engine)
    engine.clock.advance(FENCE_S)
    engine.run()
    engine.ranks[0].worker.nixl_wrapper.finish()
    engine.add(make_request("b", prompt(3, start=9)))
    engine.run()
    assert engine.half._quarantine.blocks > 0
    engine.ranks[1].worker.nixl_wrapper.finish()
    engine.add(make_request("c", prompt(3, start=9)))
    engine.run()
    assert engine.half._quarantine.blocks == 0


def test_a_rank_that_had_ended_in_time_does_not_make_the_read_count(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(monkeypatch, ranks=2)
    begin_read(engine)
    engine.ranks[0].worker.nixl_wrapper.finish()
    engine.step()
    engine.clock.advance(FENCE_S)
    engine.run()
    assert engine.reports["a"]["outcome"] == "fence"
    engine.finish_reads()
    engine.add(make_request("b", prompt(3, start=9)))
    engine.run()
    assert engine.half._quarantine.blocks == 0
    assert engine.free == 63 - engine.reports["a"]["kept_tokens"] // BLOCK


def test_a_read_that_ended_before_the_order_to_give_it_up_is_refused(engine: Harness) -> None:
    begin_read(engine)
    # Two steps in flight, as under async scheduling: the first one's output shows the end of the READ, the second
    # one was scheduled after the fence and gives it up.
    engine.schedule()
    engine.clock.advance(FENCE_S)
    engine.schedule()
    engine.finish_reads()
    engine.finish_step()
    engine.finish_step()
    engine.run()
    assert engine.reports["a"]["outcome"] == "fence"
    assert engine.half._quarantine.blocks == 0


def test_a_handshake_that_ends_after_the_read_was_given_up_posts_nothing(engine: Harness) -> None:
    worker = engine.ranks[0].worker
    worker.waits_for_handshake = True
    begin_read(engine)
    late = worker._recving_metadata["a"]
    engine.clock.advance(FENCE_S)
    engine.run()
    worker.waits_for_handshake = False
    worker._ready_requests.put(("a", late))
    engine.add(make_request("b", prompt(3, start=9)))
    engine.run()
    assert worker.posted == []
    assert engine.half._quarantine.blocks == 0


def test_a_handshake_that_fails_after_the_read_was_given_up_is_no_failure_of_anything(
    engine: Harness,
) -> None:
    worker = engine.ranks[0].worker
    worker.waits_for_handshake = True
    begin_read(engine)
    engine.clock.advance(FENCE_S)
    engine.run()
    worker._failed_recv_reqs.put("a")
    worker._failed_recv_reqs.put("a")
    engine.add(make_request("b", prompt(3, start=9)))
    engine.run()
    assert worker._failed_recv_reqs.empty()
    assert worker._recv_failures == set()


def test_a_handshake_that_ends_in_time_posts_the_read(engine: Harness) -> None:
    worker = engine.ranks[0].worker
    worker.waits_for_handshake = True
    begin_read(engine)
    worker.waits_for_handshake = False
    worker._ready_requests.put(("a", worker._recving_metadata["a"]))
    engine.step()
    engine.finish_reads()
    engine.run()
    assert engine.reports["a"]["outcome"] == "read"


def test_an_aborted_request_whose_read_hangs_leaves_no_trace_but_the_quarantine(engine: Harness) -> None:
    begin_read(engine)
    engine.abort(engine.scheduler.requests["a"])
    engine.clock.advance(FENCE_S)
    engine.run()
    assert engine.half._quarantine.blocks == 3
    engine.finish_reads()
    engine.add(make_request("b", prompt(3, start=9)))
    engine.run()
    assert engine.free == 63
    assert engine.sidecar.unpinned == ["a"]


def test_another_boot_of_the_holder_is_shaken_hands_with_again(engine: Harness) -> None:
    worker = engine.ranks[0].worker
    begin_read(engine)
    engine.finish_reads()
    engine.run()
    again = Holder(REMOTE.engine_id, "another-boot")
    engine.add(make_request("b", prompt(4 * BLOCK, start=2), turn(read(pin_id="b"))))
    engine.answer(engine.pinned(prompt(4 * BLOCK, start=2), holder=again))
    engine.step()
    assert worker.cleaned == [REMOTE.engine_id]


def test_no_read_is_posted_from_another_boot_while_the_former_is_being_read(engine: Harness) -> None:
    worker = engine.ranks[0].worker
    begin_read(engine)
    again = Holder(REMOTE.engine_id, "another-boot")
    engine.add(make_request("b", prompt(4 * BLOCK, start=2), turn(read(pin_id="b"))))
    engine.answer(engine.pinned(prompt(4 * BLOCK, start=2), holder=again))
    engine.step()
    assert [request_id for request_id, _, _ in worker.posted] == ["a"]
    engine.finish_reads()
    engine.run()
    assert (engine.reports["a"]["outcome"], engine.reports["b"]["outcome"]) == ("read", "failed")
