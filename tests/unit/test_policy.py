"""What leases are worth keeping: probabilities, prices, and the order that follows from them."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.policy import LeaseUse, PrefillCost, ReuseModel, eviction_order, keep_value

COST = PrefillCost()
USE = LeaseUse(tokens=1000, exclusive_bytes=1 << 20, idle_s=10.0, remaining_s=18.0, duration_s=20.0)
SECONDS = st.floats(0.0, 10_000.0)


def order(uses: dict[int, LeaseUse], model: ReuseModel | None = None) -> tuple[int, ...]:
    return eviction_order(uses, model or ReuseModel(), COST)


@given(st.lists(st.tuples(st.booleans(), SECONDS), max_size=40), SECONDS, SECONDS, SECONDS)
def test_a_probability_stays_one_and_grows_with_the_horizon(
    history: list[tuple[bool, float]], idle_s: float, one_s: float, other_s: float
) -> None:
    model = ReuseModel()
    for used, gap_s in history:
        if used:
            model.went_on(gap_s)
        else:
            model.given_up()
    shorter, longer = sorted((one_s, other_s))
    assert 0.0 <= model.probability(idle_s, shorter) <= model.probability(idle_s, longer) + 1e-12 < 1.0


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


def test_a_conversation_about_to_come_back_is_kept_before_one_that_has_outstayed_every_gap() -> None:
    model = ReuseModel()
    for _ in range(500):
        model.went_on(200.0)
        model.given_up()
    due, overdue, fresh = (replace(USE, idle_s=idle_s) for idle_s in (150.0, 400.0, 1.0))
    assert order({1: due, 2: overdue, 3: fresh}, model) == (2, 3, 1)


def test_conversations_that_seldom_go_on_make_every_lease_worth_less() -> None:
    model = ReuseModel()
    before = keep_value(USE, model, COST)
    for _ in range(200):
        model.given_up()
    assert keep_value(USE, model, COST) < before / 3


def test_what_is_learnt_is_what_happens() -> None:
    draws, model = random.Random(3), ReuseModel()
    comes_back = [draws.expovariate(1 / 100) if draws.random() < 0.7 else None for _ in range(6000)]
    for gap_s in comes_back[:3000]:
        if gap_s is None:
            model.given_up()
        else:
            model.went_on(gap_s)
    waiting = [gap_s for gap_s in comes_back[3000:] if gap_s is None or gap_s > 50]
    came = sum(gap_s is not None and gap_s <= 150 for gap_s in waiting) / len(waiting)
    assert model.probability(50.0, 100.0) == pytest.approx(came, abs=0.05)


def test_value_is_seconds_per_byte() -> None:
    model = ReuseModel()
    expected_s = model.probability(10.0, 120.0) * COST.seconds(1000)
    assert keep_value(USE, model, COST) == pytest.approx(expected_s / (1 << 20))
