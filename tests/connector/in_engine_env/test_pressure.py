"""Retained blocks give way to live requests, and to a reset of the caches."""

import pytest
from engine_harness import BLOCK, Harness, keep, make_harness, make_request, read, turn

from kvlease.core.holding import PinAsk
from kvlease.core.lease import LeaseState, MissReason
from kvlease.core.records import Pinned


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Harness:
    return make_harness(monkeypatch)


def prompt(tokens: int, start: int = 1) -> list[int]:
    return [start * 1000 + index for index in range(tokens)]


def retain(engine: Harness, lease_id: int, blocks: int, supersedes: int = 0) -> None:
    """A conversation of its own that retains `blocks` blocks."""
    orders = turn(keep_order=keep(lease_id, supersedes, duration_s=600))
    engine.add(make_request(f"keep{lease_id}", prompt(blocks * BLOCK, start=lease_id), orders, max_tokens=2))
    engine.run()
    assert engine.hold(lease_id) is not None


def retain_beside(engine: Harness, lease_id: int, blocks: int) -> None:
    """The same while another request is being read for."""
    orders = turn(keep_order=keep(lease_id, duration_s=600))
    engine.add(make_request(f"keep{lease_id}", prompt(blocks * BLOCK, start=lease_id), orders, max_tokens=2))
    while engine.hold(lease_id) is None:
        engine.step()


def branch(engine: Harness, lease_id: int) -> None:
    """Another turn on the first conversation's blocks, which retains just these."""
    orders = turn(keep_order=keep(lease_id, duration_s=600))
    engine.add(make_request("branch", [*prompt(10 * BLOCK), 5], orders, max_tokens=2))
    engine.run()


def pin(engine: Harness, lease_id: int) -> None:
    holder = engine.half._holder.holder
    tenant = engine.hold(lease_id).grant.tenant  # type: ignore[union-attr]
    ask = PinAsk(lease_id, f"pin{lease_id}", holder, tenant, reservation_s=30.0)
    assert isinstance(engine.half._holder.pin(ask), Pinned)


def held(engine: Harness) -> set[int]:
    return {lease_id for lease_id in range(1, 20) if engine.hold(lease_id) is not None}


def test_a_waiting_request_is_admitted_in_its_first_step_at_the_cost_of_a_lease(engine: Harness) -> None:
    retain(engine, 1, 15)
    retain(engine, 2, 15)
    engine.add(make_request("big", prompt(40 * BLOCK, start=50), max_tokens=2))
    assert engine.schedule().num_scheduled_tokens == {"big": 40 * BLOCK}
    assert held(engine) == {2}
    engine.finish_step()
    assert engine.half._holder.evictions == 1


def test_the_sidecars_order_says_which_lease_goes_first(engine: Harness) -> None:
    retain(engine, 1, 15)
    retain(engine, 2, 15)
    engine.half._holder.set_order([2, 1])
    engine.add(make_request("big", prompt(40 * BLOCK, start=50), max_tokens=2))
    engine.run()
    assert held(engine) == {1}


def test_a_pinned_lease_is_never_evicted(engine: Harness) -> None:
    retain(engine, 1, 15)
    retain(engine, 2, 15)
    pin(engine, 1)
    engine.half._holder.set_order([1, 2])
    engine.add(make_request("big", prompt(40 * BLOCK, start=50), max_tokens=2))
    engine.run()
    assert held(engine) == {1}
    assert not engine.half._holder.make_free(63)
    assert held(engine) == {1}


def test_a_running_request_is_not_preempted_for_retained_blocks(engine: Harness) -> None:
    retain(engine, 1, 20)
    retain(engine, 2, 10)
    request = engine.add(make_request("long", prompt(32 * BLOCK, start=50), max_tokens=25 * BLOCK))
    engine.run(700)
    assert request.num_preemptions == 0
    assert held(engine) == set()


def test_a_chunked_prompt_goes_on_at_the_cost_of_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(monkeypatch, batched_tokens=4 * BLOCK)
    retain(engine, 1, 15)
    retain(engine, 2, 15)
    request = engine.add(make_request("long", prompt(60 * BLOCK, start=50), max_tokens=2))
    engine.run(100)
    assert request.num_preemptions == 0
    assert held(engine) == set()


def test_blocks_that_a_running_request_lacks_are_evicted_when_vllm_asks(engine: Harness) -> None:
    retain(engine, 1, 10)
    pool = engine.pool
    taken = pool.get_new_blocks(engine.free - 5)
    # More blocks are free than requests run, and still one of them found too few.
    assert engine.connector.has_pending_block_frees()
    assert held(engine) == set()
    assert not engine.connector.has_pending_block_frees()
    pool.free_blocks(taken)


def test_blocks_that_were_only_waiting_to_be_given_back_count_as_freed(engine: Harness) -> None:
    retain(engine, 1, 10)
    engine.half._holder.renew([1], 1.0, [], 0.0)
    engine.clock.advance(700.0)
    assert engine.connector.has_pending_block_frees()
    assert engine.half._holder.evictions == 0


def test_a_request_that_goes_on_after_its_read_is_not_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(monkeypatch, batched_tokens=16 * BLOCK, retention_budget=1.0)
    tokens = prompt(40 * BLOCK, start=50)
    engine.add(make_request("a", tokens, turn(read())))
    engine.answer(engine.pinned(tokens[: 10 * BLOCK]))
    engine.step()
    for lease_id in range(1, 6):
        orders = turn(keep_order=keep(lease_id, duration_s=600))
        engine.add(make_request(f"keep{lease_id}", prompt(9 * BLOCK, start=lease_id), orders, max_tokens=2))
        for _ in range(3):
            engine.step()
    engine.finish_reads()
    engine.run(20)
    assert engine.reports["a"]["read_tokens"] == 10 * BLOCK


def test_leases_go_where_vllm_keeps_blocks_free_beside_what_a_request_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_harness(monkeypatch, watermark=0.25)
    retain(engine, 1, 15)
    retain(engine, 2, 15)
    engine.add(make_request("runs", prompt(BLOCK, start=50), max_tokens=100))
    engine.step()
    assert held(engine) == {1, 2}
    # 31 blocks are free, which are enough for its 20 but for the 16 that vLLM keeps free while another one runs.
    engine.add(make_request("big", prompt(20 * BLOCK, start=51), max_tokens=2))
    assert engine.schedule().num_scheduled_tokens["big"] == 20 * BLOCK
    assert held(engine) == {2}


def test_a_request_that_goes_on_after_its_read_finds_what_vllm_keeps_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_harness(monkeypatch, watermark=0.25)
    tokens = prompt(20 * BLOCK, start=50)
    engine.add(make_request("a", tokens, turn(read())))
    engine.answer(engine.pinned(tokens[: 10 * BLOCK]))
    engine.step()
    retain_beside(engine, 1, 15)
    retain_beside(engine, 2, 15)
    engine.add(make_request("runs", prompt(BLOCK, start=51), max_tokens=100))
    engine.step()
    engine.finish_reads()
    engine.step()
    assert "a" in engine.schedule().num_scheduled_tokens


@pytest.mark.parametrize("tokens", [32 * BLOCK + 1, 33 * BLOCK - 1])
def test_leases_go_where_vllm_wants_blocks_to_speculate_into_before_it_reads(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    engine = make_harness(monkeypatch, speculative_tokens=BLOCK)
    retain(engine, 1, 30)
    engine.step()
    assert engine.free == 33
    ids = prompt(tokens, start=50)
    engine.add(make_request("reads", ids, turn(read())))
    engine.answer(engine.pinned(ids[: 32 * BLOCK]))
    engine.step()
    engine.finish_reads()
    engine.run()
    assert engine.reports["reads"]["read_tokens"] == 32 * BLOCK
    assert held(engine) == set()


def test_the_budget_bounds_what_is_retained(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(monkeypatch, retention_budget=0.25)
    for lease_id in (1, 2, 3, 4):
        retain(engine, lease_id, 5)
    assert held(engine) == {2, 3, 4}
    assert engine.free == 63 - 15


def test_a_turn_larger_than_the_budget_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(monkeypatch, retention_budget=0.25)
    engine.add(make_request("a", prompt(17 * BLOCK), turn(keep_order=keep(1)), max_tokens=2))
    engine.run()
    assert held(engine) == set()
    assert engine.reports["a"]["kept_tokens"] == 0
    assert engine.free == 63


def test_a_turn_that_finds_only_pinned_leases_in_the_budget_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_harness(monkeypatch, retention_budget=0.25)
    retain(engine, 1, 10)
    pin(engine, 1)
    engine.add(make_request("a", prompt(8 * BLOCK, start=9), turn(keep_order=keep(2)), max_tokens=2))
    engine.run()
    assert held(engine) == {1}


def test_a_shared_prefix_counts_once_in_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_harness(monkeypatch, retention_budget=0.25)
    system = prompt(10 * BLOCK, start=60)
    for lease_id in (1, 2, 3):
        orders = turn(keep_order=keep(lease_id, duration_s=600))
        engine.add(make_request(f"a{lease_id}", system + prompt(BLOCK, start=lease_id), orders, max_tokens=2))
        engine.run()
    assert held(engine) == {1, 2, 3}
    assert engine.free == 63 - 13


def test_a_lease_that_alone_keeps_blocks_goes_before_one_that_shares_all_of_its(engine: Harness) -> None:
    retain(engine, 1, 10)
    engine.add(
        make_request(
            "branch",
            [*prompt(10 * BLOCK, start=1), 5],
            turn(keep_order=keep(2, duration_s=600)),
            max_tokens=2,
        )
    )
    engine.run()
    retain(engine, 3, 5)
    assert engine.free == 63 - 15
    engine.half._holder.make_free(50)
    assert held(engine) == {1, 2}


def test_leases_that_share_all_their_blocks_are_evicted_together(engine: Harness) -> None:
    retain(engine, 1, 10)
    engine.add(
        make_request(
            "branch",
            [*prompt(10 * BLOCK, start=1), 5],
            turn(keep_order=keep(2, duration_s=600)),
            max_tokens=2,
        )
    )
    engine.run()
    assert engine.half._holder.make_free(60)
    assert held(engine) == set()
    assert engine.free == 63


def test_a_lease_whose_blocks_a_running_request_uses_is_left_alone(engine: Harness) -> None:
    retain(engine, 1, 10)
    request = engine.add(make_request("next", [*prompt(10 * BLOCK), 1, 2, 3], max_tokens=30))
    engine.step()
    assert not engine.half._holder.make_free(62)
    assert held(engine) == {1}
    engine.abort(request)


def test_a_confirmed_turn_ends_the_one_before(engine: Harness) -> None:
    retain(engine, 1, 5)
    retain(engine, 2, 6, supersedes=1)
    assert held(engine) == {1, 2}
    assert engine.half._holder.renew([2], 20.0, [], 0.0) == {}
    assert held(engine) == {2}


def test_a_reset_loses_every_hold_and_begins_an_epoch(engine: Harness) -> None:
    retain(engine, 1, 10)
    before = engine.half._holder.holder.epoch
    assert engine.scheduler.reset_prefix_cache(reset_connector=False)
    assert held(engine) == set()
    assert engine.free == 63
    assert engine.half._holder.holder.epoch == before + 1
    assert engine.sidecar.events[-1].state is LeaseState.LOST


def test_a_reset_fails_only_for_pinned_blocks_and_succeeds_when_they_are_let_go(engine: Harness) -> None:
    retain(engine, 1, 10)
    retain(engine, 2, 5)
    pin(engine, 1)
    assert not engine.scheduler.reset_prefix_cache()
    assert engine.free == 63 - 10
    engine.half._holder.unpin(1, "pin1")
    assert engine.scheduler.reset_prefix_cache()
    assert engine.free == 63


def test_a_reset_of_the_reader_ends_the_reads_that_it_has_not_begun(engine: Harness) -> None:
    engine.add(make_request("a", prompt(4 * BLOCK), turn(read())))
    engine.answer(engine.pinned(prompt(4 * BLOCK)))
    assert engine.scheduler.reset_prefix_cache()
    engine.run()
    assert (engine.reports["a"]["outcome"], engine.ranks[0].worker.posted) == ("lost", [])


@pytest.mark.parametrize("ended", [False, True])
def test_what_is_being_read_during_a_reset_of_the_reader_is_computed_instead(
    engine: Harness, *, ended: bool
) -> None:
    request = make_request("a", prompt(4 * BLOCK), turn(read()), max_tokens=2)
    engine.add(request)
    engine.answer(engine.pinned(prompt(4 * BLOCK)))
    engine.step()
    if ended:
        engine.finish_reads()
    assert not engine.scheduler.reset_prefix_cache()
    engine.step()
    engine.finish_reads()
    engine.run()
    assert (engine.reports["a"]["outcome"], engine.reports["a"]["read_tokens"]) == ("fence", 0)
    assert engine.scheduler.reset_prefix_cache()
    assert engine.free == 63


def test_an_address_from_before_a_reset_pins_nothing(engine: Harness) -> None:
    retain(engine, 1, 10)
    old = engine.half._holder.holder
    engine.scheduler.reset_prefix_cache()
    retain(engine, 2, 5)
    tenant = engine.hold(2).grant.tenant  # type: ignore[union-attr]
    for lease_id in (1, 2):
        answer = engine.half._holder.pin(PinAsk(lease_id, "p", old, tenant, read_part_s=5.0))
        assert answer is MissReason.HOLDER_CHANGED


def test_clearing_the_connectors_cache_loses_every_hold(engine: Harness) -> None:
    retain(engine, 1, 10)
    engine.connector.reset_cache()
    assert held(engine) == set()
