"""What is READ, and into which blocks, in vLLM's real scheduler."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_harness import BLOCK, Harness, keep, make_harness, make_request, read, turn

from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, MissReason
from kvlease.core.records import Pinned


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return make_harness(monkeypatch)


def prompt(tokens: int, start: int = 1) -> list[int]:
    return [start * 1000 + index for index in range(tokens)]


def test_the_pin_is_asked_for_when_the_request_arrives(engine: Harness) -> None:
    engine.add(make_request("a", prompt(40), turn(read())))
    ((_, ask),) = engine.sidecar.asked
    assert (ask.lease_id, ask.pin_id, ask.reservation_s, ask.read_part_s) == (77, "pin", 0.0, 60.0)


def test_a_request_waits_for_its_pin_and_others_overtake_it(engine: Harness) -> None:
    engine.add(make_request("a", prompt(40), turn(read())))
    engine.add(make_request("b", prompt(40, start=3)))
    assert list(engine.schedule().num_scheduled_tokens) == ["b"]
    engine.finish_step()
    assert set(engine.scheduler.requests) == {"a"}


def test_a_pin_that_never_comes_is_recomputed_after_the_bound(engine: Harness) -> None:
    engine.add(make_request("a", prompt(40), turn(read(), keep(1))))
    engine.step()
    engine.clock.advance(2.1)
    engine.run()
    assert engine.reports["a"]["outcome"] == "unreachable"
    assert engine.sidecar.unpinned == ["pin"]


def test_without_a_sidecar_a_request_recomputes_at_once(engine: Harness) -> None:
    engine.sidecar.is_attached = False
    engine.add(make_request("a", prompt(40), turn(read())))
    assert list(engine.schedule().num_scheduled_tokens) == ["a"]


@pytest.mark.parametrize("reason", [MissReason.EXPIRED, MissReason.FORBIDDEN, MissReason.HOLDER_CHANGED])
def test_a_miss_is_recomputed_and_reported(engine: Harness, reason: MissReason) -> None:
    engine.add(make_request("a", prompt(40), turn(read())))
    engine.answer(reason)
    engine.run()
    assert engine.reports["a"]["outcome"] == reason.value
    assert engine.ranks[0].worker.posted == []


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(4 * BLOCK - 1, 3), (4 * BLOCK, 3), (4 * BLOCK + 1, 4), (4 * BLOCK + 9, 4)]
)
def test_whole_blocks_that_leave_one_token_are_read(engine: Harness, tokens: int, blocks: int) -> None:
    engine.add(make_request("a", prompt(tokens), turn(read())))
    engine.answer(engine.pinned(prompt(6 * BLOCK)))
    engine.step()
    ((_, local, remote),) = engine.ranks[0].worker.posted
    assert remote == list(range(100, 100 + blocks))
    assert len(local) == blocks
    engine.finish_reads()
    engine.run()
    report = engine.reports["a"]
    assert (report["outcome"], report["read_tokens"]) == ("read", blocks * BLOCK)
    assert engine.sidecar.unpinned == ["pin"]


def test_a_lease_that_goes_on_differently_is_trimmed_from_its_head(engine: Harness) -> None:
    common = prompt(2 * BLOCK + 3)
    engine.add(make_request("a", common + prompt(3 * BLOCK, start=7), turn(read())))
    engine.answer(engine.pinned(common + prompt(3 * BLOCK, start=8)))
    engine.step()
    ((_, _, remote),) = engine.ranks[0].worker.posted
    assert remote == [100, 101]
    assert engine.half.counters()["mismatches"] == 1


def test_after_a_local_hit_only_the_rest_of_the_verified_head_is_read(engine: Harness) -> None:
    engine.add(make_request("first", prompt(2 * BLOCK) + prompt(9, start=5)))
    engine.run()
    engine.add(make_request("a", [*prompt(5 * BLOCK), 1, 2], turn(read())))
    engine.answer(engine.pinned(prompt(5 * BLOCK)))
    engine.step()
    ((_, local, remote),) = engine.ranks[0].worker.posted
    assert remote == [102, 103, 104]
    assert local == engine.scheduler.kv_cache_manager.get_block_ids("a")[0][2:]
    engine.finish_reads()
    engine.run()
    assert (engine.reports["a"]["local_tokens"], engine.reports["a"]["read_tokens"]) == (2 * BLOCK, 3 * BLOCK)


@pytest.mark.parametrize("tokens", [4 * BLOCK - 1, 4 * BLOCK, 4 * BLOCK + 1])
def test_a_transfer_is_read_whole_with_its_partial_tail(engine: Harness, tokens: int) -> None:
    engine.add(make_request("a", prompt(tokens), turn(read(LeaseKind.TRANSFER))))
    engine.answer(engine.pinned(prompt(tokens)))
    engine.step()
    ((_, _, remote),) = engine.ranks[0].worker.posted
    assert len(remote) == -(-tokens // BLOCK)
    engine.finish_reads()
    engine.step()
    # Only the last token is computed again.
    assert sum(engine.schedule().num_scheduled_tokens.values()) == 1
    engine.finish_step()
    assert engine.reports["a"]["read_tokens"] == tokens


def test_a_transfer_with_another_tail_is_read_without_it(engine: Harness) -> None:
    engine.add(make_request("a", [*prompt(2 * BLOCK), 5, 6], turn(read(LeaseKind.TRANSFER))))
    engine.answer(engine.pinned([*prompt(2 * BLOCK), 5, 7]))
    engine.step()
    ((_, _, remote),) = engine.ranks[0].worker.posted
    assert remote == [100, 101]


def test_nothing_is_read_below_the_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(monkeypatch, recompute_threshold_tokens=3 * BLOCK)
    engine.add(make_request("a", prompt(2 * BLOCK + 1), turn(read())))
    engine.answer(engine.pinned(prompt(2 * BLOCK)))
    engine.run()
    assert engine.reports["a"]["outcome"] == "below_threshold"
    assert engine.ranks[0].worker.posted == []
    assert engine.sidecar.unpinned == ["pin"]


def test_other_tokens_are_a_mismatch(engine: Harness) -> None:
    engine.add(make_request("a", prompt(40), turn(read())))
    engine.answer(engine.pinned(prompt(40, start=2)))
    engine.run()
    assert engine.reports["a"]["outcome"] == "mismatch"
    assert engine.ranks[0].worker.posted == []


def test_another_cache_salt_is_a_mismatch(engine: Harness) -> None:
    engine.add(make_request("a", prompt(40), turn(read()), cache_salt="other"))
    engine.answer(engine.pinned(prompt(40)))
    engine.run()
    assert engine.reports["a"]["outcome"] == "mismatch"


def test_another_layout_is_a_mismatch_whatever_the_tokens(engine: Harness) -> None:
    engine.add(make_request("a", prompt(40), turn(read())))
    engine.answer(engine.pinned(prompt(40), layout_hash="other"))
    engine.run()
    assert engine.reports["a"]["outcome"] == "mismatch"
    assert engine.half.counters()["layout_mismatches"] == 1


def test_a_local_hit_that_covers_the_lease_reads_nothing(engine: Harness) -> None:
    engine.add(make_request("first", prompt(3 * BLOCK + 1)))
    engine.run()
    engine.add(make_request("a", prompt(3 * BLOCK + 5), turn(read())))
    engine.answer(engine.pinned(prompt(3 * BLOCK)))
    engine.run()
    assert engine.reports["a"]["outcome"] == "local"
    assert engine.sidecar.unpinned == ["pin"]


def test_an_answer_without_blocks_or_place_is_recomputed(engine: Harness) -> None:
    engine.add(make_request("a", prompt(40), turn(read(pin_id="x"))))
    engine.answer(Pinned(Holder("remote-engine", "remote-boot"), 40))
    engine.add(make_request("b", prompt(40, start=2), turn(read(pin_id="y"))))
    engine.answer(engine.pinned(prompt(40, start=2), location=None))
    engine.run()
    assert [engine.reports[name]["read_tokens"] for name in ("a", "b")] == [0, 0]
    assert sorted(engine.sidecar.unpinned) == ["x", "y"]


def test_prompt_logprobs_read_nothing_and_end_the_pin(engine: Harness) -> None:
    request = make_request("a", prompt(40), turn(read()))
    request.skip_reading_prefix_cache = True
    engine.add(request)
    engine.answer(engine.pinned(prompt(40)))
    engine.run()
    assert engine.ranks[0].worker.posted == []
    assert engine.sidecar.unpinned == ["pin"]


def test_an_abort_while_waiting_ends_the_pin(engine: Harness) -> None:
    request = engine.add(make_request("a", prompt(40), turn(read())))
    engine.answer(engine.pinned(prompt(40)))
    engine.abort(request)
    assert engine.sidecar.unpinned == ["pin"]
    assert engine.half._reads.get("a") is None


def test_an_abort_during_the_read_ends_the_pin_only_when_the_read_has_ended(engine: Harness) -> None:
    request = engine.add(make_request("a", prompt(40), turn(read())))
    engine.answer(engine.pinned(prompt(40)))
    engine.step()
    engine.abort(request)
    assert engine.sidecar.unpinned == []
    engine.finish_reads()
    engine.step()
    assert engine.sidecar.unpinned == ["pin"]
    assert engine.free == 63
    assert engine.scheduler.requests == {}


def test_a_failed_read_is_recomputed_and_never_tried_again(engine: Harness) -> None:
    engine.add(make_request("a", prompt(4 * BLOCK), turn(read(), keep(1)), max_tokens=2))
    engine.answer(engine.pinned(prompt(4 * BLOCK)))
    engine.step()
    engine.finish_reads("ERR")
    engine.run()
    assert engine.reports["a"]["outcome"] == "failed"
    assert engine.reports["a"]["kept_tokens"] == 4 * BLOCK
    assert len(engine.ranks[0].worker.posted) == 1
    assert engine.sidecar.unpinned == ["pin"]


def test_a_pin_that_is_lost_between_the_answer_and_the_load_is_recomputed(engine: Harness) -> None:
    engine.add(make_request("a", prompt(4 * BLOCK), turn(read())))
    engine.answer(engine.pinned(prompt(4 * BLOCK)))
    matched = engine.connector.get_num_new_matched_tokens

    def lose_after(request, computed):  # type: ignore[no-untyped-def]
        answer = matched(request, computed)
        pending = engine.half._reads.get("a")
        if pending is not None and answer[0]:
            engine.half._reads.settle(pending, "expired")
        return answer

    engine.connector.get_num_new_matched_tokens = lose_after  # type: ignore[method-assign]
    engine.run()
    assert engine.ranks[0].worker.posted == []
    assert engine.sidecar.unpinned == ["pin"]
    assert engine.reports["a"]["outcome"] == "expired"
    assert engine.half.counters()["reads"] == 0


@pytest.mark.parametrize("blocks", [1, 3])
def test_another_number_of_blocks_than_is_to_be_read_is_recomputed(engine: Harness, blocks: int) -> None:
    request = make_request("a", prompt(5 * BLOCK), turn(read()))
    engine.add(request)
    engine.answer(engine.pinned(prompt(4 * BLOCK)))
    assert engine.half.matched_tokens(request, 2 * BLOCK) == (2 * BLOCK, True)
    allocated = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: ([*range(1, 1 + blocks)],))
    assert not engine.half.before_load(request, allocated, 2 * BLOCK)
    assert [refused.request_id for refused in engine.half._orders.refused] == ["a"]


def test_choices_that_share_a_pin_end_it_with_the_last_read(engine: Harness) -> None:
    for name in ("0_a", "1_a"):
        engine.add(make_request(name, prompt(4 * BLOCK), turn(read(LeaseKind.TRANSFER))))
        engine.answer(engine.pinned(prompt(4 * BLOCK)))
    engine.step()
    worker = engine.ranks[0].worker
    assert len(worker.posted) == 2
    worker.nixl_wrapper.states[1] = "DONE"
    engine.step()
    assert engine.sidecar.unpinned == []
    engine.finish_reads()
    engine.run()
    assert engine.sidecar.unpinned == ["pin"]


def test_the_completion_note_of_our_reads_does_not_reach_vllm(engine: Harness) -> None:
    worker = engine.ranks[0].worker
    engine.add(make_request("a", prompt(4)))
    engine.step()
    worker.nixl_wrapper.notes = {"peer": [b"kvlease-pin:1"]}
    told: list[str] = []
    worker.xfer_stats.record_notification_after_expiry = lambda: told.append("expired")
    engine.add(make_request("b", prompt(4)))
    engine.step()
    assert told == []


def test_blocks_are_read_in_the_order_in_which_they_lie_at_the_holder(engine: Harness) -> None:
    tokens = prompt(4 * BLOCK)
    engine.add(make_request("a", tokens, turn(read(pin_id="a", kind=LeaseKind.TRANSFER))))
    pinned = engine.pinned(tokens)
    assert pinned.blocks is not None
    there = (43, 42, 41, 40)
    engine.answer(replace(pinned, blocks=replace(pinned.blocks, block_ids=there)))
    engine.step()
    ((_, local, remote),) = engine.ranks[0].worker.posted
    assert remote == [40, 41, 42, 43]
    read_of = engine.half._reads.get("a")
    # Each block still comes to the place that its tokens have in the prompt.
    assert dict(zip(remote, local, strict=True)) == dict(zip(there, read_of.block_ids, strict=True))
