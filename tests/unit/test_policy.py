"""What leases are worth keeping: probabilities, prices, and the order that follows from them."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.bench.budget import reused_lru, reused_ours
from kvlease.bench.trace import Visit
from kvlease.core.policy import LeaseUse, PrefillCost, eviction_order, keep_value
from kvlease.core.reuse import RETURNS_WITHIN_S, ReuseHistory, ReuseModel

COST = PrefillCost()
USE = LeaseUse(tokens=1000, exclusive_bytes=1 << 20, turns=0, idle_s=10.0, remaining_s=18.0, duration_s=20.0)
SECONDS = st.floats(0.0, 10_000.0)


def order(uses: dict[int, LeaseUse], model: ReuseModel | None = None) -> tuple[int, ...]:
    return eviction_order(uses, model or ReuseModel(), COST)


@given(st.lists(st.tuples(st.booleans(), SECONDS), max_size=40), st.integers(0, 20), SECONDS)
def test_a_rate_is_never_below_zero_and_never_above_what_a_second_can_bring(
    history: list[tuple[bool, float]], turns: int, idle_s: float
) -> None:
    model = ReuseModel()
    for used, gap_s in history:
        if used:
            model.went_on(turns, gap_s)
        else:
            model.given_up(turns)
    assert 0.0 <= model.rate(turns, idle_s) <= 1e3


def test_before_anything_is_learnt_the_least_recently_used_of_equal_leases_goes_first() -> None:
    uses = {number: replace(USE, idle_s=idle_s) for number, idle_s in enumerate((50.0, 5.0, 500.0))}
    assert order(uses) == (2, 0, 1)


def test_leases_that_free_nothing_go_last_the_longest_idle_first() -> None:
    uses = {
        1: replace(USE, exclusive_bytes=0, idle_s=1.0),
        2: replace(USE, exclusive_bytes=0, idle_s=9.0),
        3: replace(USE, idle_s=0.0),
    }
    assert order(uses) == (3, 2, 1)


def test_of_two_equally_likely_leases_the_one_that_frees_more_for_its_work_goes_first() -> None:
    assert order({1: replace(USE, exclusive_bytes=1 << 19), 2: USE}) == (2, 1)


def test_a_long_context_is_worth_more_per_byte_than_a_short_one() -> None:
    long = replace(USE, tokens=100_000, exclusive_bytes=100 * USE.exclusive_bytes)
    assert order({1: long, 2: USE}) == (2, 1)


def test_a_lease_that_is_renewed_no_longer_goes_before_one_that_is() -> None:
    let_go = replace(USE, idle_s=1.0, remaining_s=4.0)
    assert order({1: replace(USE, idle_s=60.0), 2: let_go}) == (2, 1)


def test_where_nobody_comes_back_soon_who_has_waited_is_kept_before_who_has_not() -> None:
    model = ReuseModel()
    for _ in range(500):
        model.went_on(0, 200.0)
        model.given_up(0)
    due, overdue, fresh = (replace(USE, idle_s=idle_s) for idle_s in (150.0, 400.0, 1.0))
    assert order({1: due, 2: overdue, 3: fresh}, model) == (2, 3, 1)


def test_a_conversation_of_many_turns_is_kept_before_one_that_has_only_begun() -> None:
    model = ReuseModel()
    for _ in range(200):
        model.went_on(5, 60.0)
        model.given_up(0)
    assert order({1: replace(USE, turns=7), 2: replace(USE, turns=0)}, model) == (2, 1)


def test_conversations_that_seldom_go_on_make_every_lease_worth_less() -> None:
    model = ReuseModel()
    before = keep_value(USE, model, COST)
    for _ in range(200):
        model.given_up(0)
    assert keep_value(USE, model, COST) < before / 3


def test_where_the_hazard_never_changes_the_rate_is_that_hazard() -> None:
    draws, model = random.Random(3), ReuseModel()
    for _ in range(20_000):
        model.went_on(0, draws.expovariate(1 / 100))
    assert model.rate(0, 30.0) == pytest.approx(1 / 100, rel=0.25)
    assert model.rate(0, 60.0) == pytest.approx(1 / 100, rel=0.25)


def test_a_lease_that_was_evicted_is_followed_to_the_end_of_its_conversation() -> None:
    model = ReuseModel()
    history = ReuseHistory(model)
    before = model.rate(0, 100.0)
    for lease_id in range(1, 200):
        assert history.granted(lease_id * 120.0, lease_id, lease_id - 1) == lease_id - 1
    assert model.rate(5, 100.0) > 3 * before


def test_a_conversation_is_given_up_once_and_only_when_it_has_been_idle_for_long() -> None:
    model = ReuseModel()
    history = ReuseHistory(model)
    before = model.rate(0, 10.0)
    for lease_id in range(1, 101):
        history.granted(0.0, lease_id, 0)
    history.advance(RETURNS_WITHIN_S - 1)
    assert model.rate(0, 10.0) == before
    history.advance(RETURNS_WITHIN_S)
    after = model.rate(0, 10.0)
    assert after < before / 3
    history.advance(2 * RETURNS_WITHIN_S)
    assert model.rate(0, 10.0) == after


def test_what_is_followed_is_bounded() -> None:
    history = ReuseHistory(ReuseModel(), followed_max=2)
    for lease_id in (1, 2, 3):
        history.granted(0.0, lease_id, 0)
    assert history.granted(1.0, 4, 1) == 0
    assert history.granted(1.0, 5, 3) == 1


def test_value_is_seconds_per_byte_and_second() -> None:
    model = ReuseModel()
    expected = model.rate(0, 10.0) * COST.seconds(1000)
    assert keep_value(USE, model, COST) == pytest.approx(expected / (1 << 20))


def test_a_tight_budget_saves_more_in_our_order_than_least_recently_used() -> None:
    draws = random.Random(11)
    visits: list[Visit] = []
    due: list[tuple[float, int]] = []
    for second in range(0, 4000, 2):
        back = [item for item in due if item[0] <= second]
        parent = back[0][1] if back else -1
        if back:
            due.remove(back[0])
        visits.append(Visit(float(second), 1024, parent, 1024 if back else 0))
        if draws.random() < 0.5:
            due.append((second + draws.uniform(60.0, 180.0), len(visits) - 1))
    lru, ours = reused_lru(visits, 8), reused_ours(visits, 8)
    assert ours > 1.4 * max(lru, 1024)
