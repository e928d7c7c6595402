"""Rates learnt from measurements: lines, service times, and whose line counts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.rates import LineEstimate, RateTable, ServiceMeter


def estimate(*samples: tuple[float, float]) -> LineEstimate:
    made = LineEstimate()
    for units, seconds in samples:
        made.add(units, seconds)
    return made


@given(st.floats(0.0, 1.0), st.floats(1e-6, 1e-2))
def test_a_straight_line_is_found_again(fixed_s: float, unit_s: float) -> None:
    made = estimate(*[(units, fixed_s + unit_s * units) for units in (100, 500, 2000, 8000, 300, 4000)])
    assert made.line.seconds(1000) == pytest.approx(fixed_s + unit_s * 1000, rel=1e-3)


@given(st.lists(st.tuples(st.floats(1, 1e5), st.floats(0, 1e3)), max_size=40))
def test_a_line_neither_falls_nor_begins_below_zero(samples: list[tuple[float, float]]) -> None:
    line = estimate(*samples).line
    assert line.fixed_s >= 0
    assert line.unit_s >= 0
    assert line.samples == len(samples)
    assert line.seconds(0) == 0


def test_samples_of_one_size_make_everything_count_per_unit() -> None:
    line = estimate((100, 0.5), (100, 0.5), (101, 0.5)).line
    assert (line.fixed_s, line.unit_s) == (0.0, pytest.approx(0.005, rel=0.01))


def test_a_cold_start_among_the_first_samples_moves_a_line_little() -> None:
    sizes = (512, 4000, 128, 256, 1024, 256)
    cold = estimate((512, 4.0), *[(units, 0.05 + 1e-4 * units) for units in sizes])
    assert cold.line.seconds(256) == pytest.approx(0.0756, rel=0.1)
    assert cold.line.seconds(8000) == pytest.approx(0.85, rel=0.2)
    for units in sizes * 2:
        cold.add(units, 0.05 + 1e-4 * units)
    assert cold.line.seconds(256) == pytest.approx(0.0756, rel=0.01)


def test_a_line_that_began_at_nothing_learns_that_work_takes_time() -> None:
    made = estimate(*[(1000, 0.0)] * 20, *[(1000, 0.5)] * 400)
    assert made.line.seconds(1000) == pytest.approx(0.5, rel=0.01)


def test_work_that_grows_faster_than_its_units_hides_nothing_of_what_is_fixed() -> None:
    samples = [
        (units, 0.03 + 3e-5 * units + 2e-10 * units * units) for units in (128, 256, 1024, 8192, 24576)
    ]
    for made in (estimate(*samples), estimate(*samples * 6)):
        for units, seconds in samples:
            assert made.line.seconds(units) == pytest.approx(seconds, rel=0.25)


def test_old_samples_fade() -> None:
    made = estimate(*[(1000, 1.0)] * 50, *[(1000, 2.0)] * 400)
    assert made.line.seconds(1000) == pytest.approx(2.0, rel=0.01)


def test_one_surprise_moves_a_line_little_and_a_lasting_change_moves_it_all_the_way() -> None:
    made = estimate(*[(1000, 0.1)] * 50)
    made.add(1000, 60.0)
    assert made.line.seconds(1000) < 0.12
    for _ in range(600):
        made.add(1000, 60.0)
    assert made.line.seconds(1000) == pytest.approx(60.0, rel=0.05)


def test_requests_that_overlap_are_served_one_after_another() -> None:
    meter = ServiceMeter()
    assert meter.served_s(0.0, 2.0) == 2.0
    assert meter.served_s(1.0, 3.0) == 1.0
    assert meter.served_s(0.5, 2.5) == 0.0
    assert meter.served_s(10.0, 11.0) == 1.0


def test_an_engine_with_too_few_samples_counts_as_its_group() -> None:
    table = RateTable(samples_min=3)
    assert table.prefill_line("new", "g") is None
    for _ in range(3):
        table.computed("old", "g", 1000, 1.0)
    table.computed("new", "g", 1000, 5.0)
    old, new = table.prefill_line("old", "g"), table.prefill_line("new", "g")
    assert old is not None
    assert old.seconds(1000) == pytest.approx(1.0)
    assert new is not None
    assert new.seconds(1000) == pytest.approx(1.0)
    assert new.samples == 4


def test_a_pair_is_known_by_itself_from_enough_samples_on_until_an_engine_is_gone() -> None:
    table = RateTable(samples_min=2)
    table.moved("d", "p", "g", 1000, 0.5)
    assert table.pair_lines == {}
    table.moved("d", "p", "g", 1000, 0.5)
    assert table.pair_lines[("d", "p")].seconds(2000) == pytest.approx(1.0)
    table.forget("p")
    assert table.pair_lines == {}
    assert table.group_line("g") is not None
