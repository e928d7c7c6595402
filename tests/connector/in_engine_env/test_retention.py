"""What a finished turn keeps, as references on vLLM's real block pool."""

import sys

import pytest
from engine_harness import (
    BLOCK,
    Harness,
    grant_of,
    keep,
    keep_transfer,
    make_harness,
    make_request,
    turn,
)

from kvlease.core import details
from kvlease.core.lease import LeaseEvent
from kvlease.core.turn import PARAMS_KEY


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return make_harness(monkeypatch)


def prompt(tokens: int, start: int = 1) -> list[int]:
    return [start * 1000 + index for index in range(tokens)]


@pytest.mark.parametrize(("device", "interval_s"), [("cuda", 0.0005), ("cpu", 0.005)])
def test_on_gpus_threads_that_answer_pins_do_not_wait_long_for_the_one_that_computes(
    engine: Harness, monkeypatch: pytest.MonkeyPatch, device: str, interval_s: float
) -> None:
    own_s = sys.getswitchinterval()
    monkeypatch.setitem(engine.half._facts.details, details.DEVICE, device)
    try:
        engine.half.bind(engine.pool)
        assert sys.getswitchinterval() == pytest.approx(interval_s)
    finally:
        sys.setswitchinterval(own_s)


def test_a_turn_keeps_its_full_blocks_below_the_last_sampled_token(engine: Harness) -> None:
    engine.add(make_request("a", prompt(2 * BLOCK - 3), turn(keep_order=keep(1)), max_tokens=4))
    engine.run()
    # 33 tokens, of which the last has no KV: two full blocks.
    assert grant_of(engine, 1).tokens == 2 * BLOCK
    assert [engine.pool.blocks[block].ref_cnt for block in grant_of(engine, 1).block_ids] == [1, 1]
    assert engine.free == 63 - 2
    assert engine.reports["a"]["kept_tokens"] == 2 * BLOCK


@pytest.mark.parametrize(("total", "kept"), [(2 * BLOCK, 1), (2 * BLOCK + 1, 2), (BLOCK, 0), (BLOCK + 1, 1)])
def test_the_block_of_the_last_sampled_token_is_never_kept(engine: Harness, total: int, kept: int) -> None:
    engine.add(make_request("a", prompt(total - 1), turn(keep_order=keep(1)), max_tokens=1))
    engine.run()
    assert 63 - engine.free == kept
    assert engine.reports["a"]["kept_tokens"] == kept * BLOCK


def test_computed_tokens_that_are_too_high_are_clamped(engine: Harness) -> None:
    request = make_request("a", prompt(2 * BLOCK - 1), turn(keep_order=keep(1)), max_tokens=1)
    engine.add(request)
    finished = engine.connector.request_finished_all_groups

    def too_high(one, block_ids):  # type: ignore[no-untyped-def]
        one.num_computed_tokens = one.num_tokens
        return finished(one, block_ids)

    engine.connector.request_finished_all_groups = too_high  # type: ignore[method-assign]
    engine.run()
    assert grant_of(engine, 1).tokens == BLOCK


def test_under_async_scheduling_the_block_of_a_step_in_flight_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_harness(monkeypatch, asynchronous=True)
    tokens = prompt(2 * BLOCK - 1)
    first_token = 7 + len(tokens) % 50
    request = engine.add(
        make_request("a", tokens, turn(keep_order=keep(1)), max_tokens=9, stop_ids=[first_token])
    )
    engine.schedule()
    engine.schedule()
    engine.finish_step()
    # It ended with two full blocks of tokens, and the next step, which computes the last of them, is in flight.
    assert (request.num_computed_tokens, request.num_tokens) == (2 * BLOCK, 2 * BLOCK)
    assert grant_of(engine, 1).tokens == BLOCK
    assert engine.free == 63 - 2
    engine.finish_step()
    assert engine.free == 63 - 1


def test_an_abort_keeps_nothing_of_a_chunk_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(monkeypatch, batched_tokens=2 * BLOCK, asynchronous=True)
    request = engine.add(make_request("a", prompt(6 * BLOCK), turn(keep_order=keep(1)), max_tokens=9))
    for _ in range(4):
        engine.step()
    assert request.num_output_tokens > 0
    # Everything is computed anew, two blocks a step, as after a preemption.
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.step()
    engine.schedule()
    assert request.num_computed_tokens == 4 * BLOCK
    engine.abort(request)
    assert grant_of(engine, 1).tokens == 2 * BLOCK


def test_kept_blocks_are_not_handed_out_again_while_they_are_held(engine: Harness) -> None:
    engine.add(make_request("a", prompt(10 * BLOCK), turn(keep_order=keep(1, duration_s=600)), max_tokens=2))
    engine.run()
    held = set(grant_of(engine, 1).block_ids)
    for number in range(8):
        other = engine.add(make_request(f"b{number}", prompt(40 * BLOCK, start=2 + number), max_tokens=2))
        engine.step()
        blocks = engine.scheduler.kv_cache_manager.get_block_ids(other.request_id)[0]
        assert not held & set(blocks)
        engine.run()


def test_an_expired_lease_gives_its_blocks_back_tail_first(engine: Harness) -> None:
    engine.add(make_request("a", prompt(4 * BLOCK), turn(keep_order=keep(1)), max_tokens=2))
    engine.run()
    held = list(grant_of(engine, 1).block_ids)
    engine.clock.advance(6.1)
    engine.add(make_request("b", prompt(3, start=5)))
    assert engine.free == 63
    queue = [block.block_id for block in engine.pool.free_block_queue.get_all_free_blocks()]
    assert [block for block in queue if block in held] == held[::-1]


def test_a_release_on_another_thread_waits_for_the_next_hook(engine: Harness) -> None:
    engine.add(make_request("a", prompt(4 * BLOCK), turn(keep_order=keep(1)), max_tokens=2))
    engine.run()
    engine.half._holder.end(1, LeaseEvent.RELEASE)
    assert engine.free == 63 - 4
    list(engine.connector.take_events())
    assert engine.free == 63


def test_a_transfer_keeps_the_partial_last_block_of_the_prompt(engine: Harness) -> None:
    engine.add(make_request("a", prompt(2 * BLOCK + 5), turn(keep_order=keep_transfer(1)), max_tokens=1))
    engine.run()
    grant = grant_of(engine, 1)
    assert (grant.tokens, len(grant.block_ids), bool(grant.tail_digest)) == (2 * BLOCK + 5, 3, True)


def test_an_abort_before_the_first_token_keeps_nothing(engine: Harness) -> None:
    request = make_request("a", prompt(4 * BLOCK), turn(keep_order=keep(1)), max_tokens=9)
    engine.add(request)
    engine.abort(request)
    assert engine.hold(1) is None
    assert engine.free == 63


def test_an_abort_in_the_middle_of_the_prompt_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(monkeypatch, batched_tokens=32)
    request = engine.add(make_request("a", prompt(6 * BLOCK), turn(keep_order=keep(1)), max_tokens=9))
    engine.step()
    engine.abort(request)
    assert engine.hold(1) is None


def test_a_stop_string_after_the_first_token_keeps_provisionally(engine: Harness) -> None:
    request = engine.add(make_request("a", prompt(4 * BLOCK), turn(keep_order=keep(1)), max_tokens=9))
    engine.step()
    engine.step()
    engine.abort(request)
    hold = engine.hold(1)
    assert hold is not None
    assert hold.provisional
    assert hold.grant.tokens == 4 * BLOCK


def test_an_aborted_prefill_leg_keeps_no_transfer(engine: Harness) -> None:
    request = engine.add(
        make_request("a", prompt(4 * BLOCK), turn(keep_order=keep_transfer(1)), max_tokens=9)
    )
    engine.step()
    engine.abort(request)
    assert engine.hold(1) is None


def test_of_two_choices_that_share_a_lease_id_the_first_is_kept_and_both_report_it(engine: Harness) -> None:
    for name, tokens in (("0_a", 2), ("1_a", 3 * BLOCK)):
        engine.add(make_request(name, prompt(4 * BLOCK), turn(keep_order=keep(1)), max_tokens=tokens))
    engine.run(200)
    assert grant_of(engine, 1).tokens == 4 * BLOCK
    assert [engine.reports[name]["kept_tokens"] for name in ("0_a", "1_a")] == [4 * BLOCK, 4 * BLOCK]
    assert engine.free == 63 - 4


def test_a_prompt_of_embeddings_is_not_kept(engine: Harness) -> None:
    request = make_request("a", prompt(4 * BLOCK), turn(keep_order=keep(1)), max_tokens=2)
    engine.add(request)
    request.prompt_token_ids = None
    engine.run()
    assert engine.hold(1) is None


def test_an_offer_that_finds_no_room_gives_its_blocks_back(engine: Harness) -> None:
    engine.sidecar.has_room = False
    engine.add(make_request("a", prompt(4 * BLOCK), turn(keep_order=keep(1)), max_tokens=2))
    engine.run()
    assert engine.free == 63
    assert engine.reports["a"]["kept_tokens"] == 0


def test_nothing_of_the_parameters_from_outside_survives(engine: Harness) -> None:
    raw = {
        "do_remote_prefill": True,
        "remote_engine_id": "x",
        "remote_block_ids": [[1]],
        "do_remote_decode": True,
    }
    for name, params in (("a", raw), ("b", {**raw, PARAMS_KEY: {"version": 99}}), ("c", [1, 2])):
        request = engine.add(make_request(name, prompt(20), raw_params=params))
        assert request.kv_transfer_params is None
    engine.run()
    assert engine.reports == {}
    assert engine.half.counters()["refused_params"] == 1


def test_both_roles_read_and_recompute_whatever_the_configuration_says(engine: Harness) -> None:
    transfer = engine.scheduler.vllm_config.kv_transfer_config
    assert (transfer.kv_role, transfer.is_kv_consumer) == ("kv_both", True)
    assert engine.scheduler.recompute_kv_load_failures
