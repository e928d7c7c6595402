"""Gaps between turns: what the histogram remembers, and what is predicted from how little."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.errors import InvalidArgument
from kvlease.core.gaps import MEMORY, GapEstimator, GapHistogram, GapPolicy

BUCKET = 2**0.25


@pytest.fixture
def estimator() -> GapEstimator:
    return GapEstimator(GapPolicy(quantile=0.9, floor_s=30.0, cap_s=600.0))


def observe(estimator: GapEstimator, tenant: str, gap_s: float, times: int) -> None:
    for _ in range(times):
        estimator.observe(tenant, gap_s)


def test_nothing_is_predicted_above_the_floor_while_nothing_is_known(estimator: GapEstimator) -> None:
    assert estimator.predict_s("t", ()) == 30.0


def test_a_conversation_without_gaps_follows_its_tenant_not_the_fleet(estimator: GapEstimator) -> None:
    observe(estimator, "slow", 400.0, 300)
    observe(estimator, "fast", 50.0, 300)
    assert 400.0 <= estimator.predict_s("slow", ()) <= 400.0 * BUCKET
    assert estimator.predict_s("fast", ()) < 100.0


def test_a_tenant_that_is_not_known_follows_the_fleet(estimator: GapEstimator) -> None:
    observe(estimator, "slow", 400.0, 300)
    assert 400.0 <= estimator.predict_s("new", ()) <= 400.0 * BUCKET


def test_a_conversation_with_gaps_of_its_own_is_kept_longer_than_its_tenants_others(
    estimator: GapEstimator,
) -> None:
    observe(estimator, "t", 50.0, 300)
    assert estimator.predict_s("t", (300.0,) * 8) >= 300.0 > estimator.predict_s("t", ())


def test_the_floor_and_the_cap_bound_what_is_predicted(estimator: GapEstimator) -> None:
    observe(estimator, "quick", 2.0, 300)
    assert estimator.predict_s("quick", ()) == 30.0
    observe(estimator, "rare", 5000.0, 2000)
    assert estimator.predict_s("rare", (5000.0,) * 8) == 600.0


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=60), st.floats(0.0, 1e6), st.floats(0.0, 1e6))
def test_the_share_within_never_falls_and_ends_at_one(
    gaps: list[float], one_s: float, other_s: float
) -> None:
    histogram = GapHistogram()
    for gap_s in gaps:
        histogram.add(gap_s)
    shorter, longer = sorted((one_s, other_s))
    assert 0.0 <= histogram.share_within(shorter) <= histogram.share_within(longer) <= 1.0
    assert histogram.share_within(1e6) == pytest.approx(1.0)


def test_a_histogram_forgets_and_stays_as_small_as_it_was() -> None:
    histogram = GapHistogram()
    for gap_s in (10.0, 300.0):
        for _ in range(10_000):
            histogram.add(gap_s)
    assert histogram.weight <= MEMORY
    assert len(histogram.shares()) == len(GapHistogram().shares())
    assert histogram.share_within(20.0) < 0.001


def test_the_tenants_that_paused_longest_ago_are_forgotten_first() -> None:
    estimator = GapEstimator(GapPolicy(), tenants_max=2)
    observe(estimator, "a", 400.0, 100)
    observe(estimator, "b", 50.0, 3000)
    observe(estimator, "c", 50.0, 1)
    assert estimator.predict_s("a", ()) < 100.0


def test_a_predicted_quantile_hits_as_often_as_it_says_once_it_has_learnt() -> None:
    draws = random.Random(7)
    estimator = GapEstimator(GapPolicy(quantile=0.75))
    hits = 0
    for number in range(4000):
        gap_s = draws.lognormvariate(4.8, 0.8)
        if number >= 1000:
            hits += gap_s <= estimator.predict_s("t", ())
        estimator.observe("t", gap_s)
    assert 0.72 <= hits / 3000 <= 0.82


@pytest.mark.parametrize(
    ("policy", "values"),
    [({"quantile": 1.0}, ("1.0",)), ({"floor_s": 700.0}, ("700.0", "600.0")), ({"floor_s": 0.0}, ("0.0",))],
)
def test_a_policy_that_cannot_be_is_refused_with_its_values(
    policy: dict[str, float], values: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        GapPolicy(**policy)
    assert all(value in str(refused.value) for value in values)
