"""Gaps between turns: what the histogram remembers, and what it forgets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.gaps import EDGES_S, MEMORY, GapHistogram


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


@given(gaps=st.lists(st.floats(0.0, 1e5), max_size=20))
def test_the_shares_within_all_edges_are_those_of_each(gaps: list[float]) -> None:
    histogram = GapHistogram()
    for gap_s in gaps:
        histogram.add(gap_s)
    assert histogram.shares_within_edges() == pytest.approx(list(map(histogram.share_within, EDGES_S)))


def test_a_histogram_forgets() -> None:
    histogram = GapHistogram()
    for gap_s in (10.0, 300.0):
        for _ in range(10_000):
            histogram.add(gap_s)
    assert histogram.weight <= MEMORY
    assert histogram.share_within(20.0) < 0.001
