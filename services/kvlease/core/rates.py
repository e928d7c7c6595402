"""Rates that were measured: how long work of so many units takes, as a straight line through recent samples.

Pure: times are seconds of the caller's clock. A unit is a token, of a prompt that an engine computes or of KV that
one engine READs from another. A READ costs per descriptor rather than per byte, and a block has a fixed number of
them: with a fixed layout tokens stand for blocks, descriptors and bytes alike.
"""

from collections.abc import Mapping
from itertools import combinations
from statistics import median

from kvlease.core.values import value

MEMORY_SAMPLES = 64.0
"""A sample's weight falls to 1/e after so many others."""

EARLY_SAMPLES = 8
"""So many samples are kept as they are and fitted by medians: one of the first is often a cold start."""

COLD_MIN = 2.0
"""An early sample of so many times what the early ones say together was a cold start, and is left out."""

SPREAD_MIN = 0.1
"""Units that vary by less than this share of their mean say nothing of what is fixed and what is per unit."""

SURPRISE_MAX = 4.0
"""A sample counts for at most so many times what was expected: a first handshake takes seconds, once."""

PAIRS_MAX = 65_536


@value
class Line:
    """Seconds that so many units take.

    Attributes:
        fixed_s: seconds that any work takes.
        unit_s: seconds of one unit more.
        samples: how many measurements it rests on.
    """

    fixed_s: float
    unit_s: float
    samples: int

    def seconds(self, units: float) -> float:
        """Seconds of so many units; nothing takes no time."""
        return self.fixed_s + self.unit_s * units if units > 0 else 0.0


class LineEstimate:
    """A line through samples of which old ones fade.

    What counts are relative errors: paths are compared by sums of short and of long times, and what takes longest,
    whose times grow faster than its units, would else decide the line alone. With x for 1/units and y for seconds a
    unit, seconds = fixed + unit * units is y = unit + fixed * x, so that all errors of y count alike.
    """

    def __init__(self) -> None:
        self._samples = 0
        self._early: list[tuple[float, float]] = []
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._line: Line | None = None

    def add(self, units: float, seconds: float) -> None:
        """Takes a measurement."""
        if units <= 0 or seconds < 0:
            return
        self._samples += 1
        if self._samples <= EARLY_SAMPLES:
            self._early.append((1.0 / units, seconds / units))
        else:
            if self._samples == EARLY_SAMPLES + 1:
                self._summarise_early()
            expected_s = self.line.seconds(units)
            self._sum(units, min(seconds, SURPRISE_MAX * expected_s) if expected_s else seconds)
        self._line = None

    @property
    def samples(self) -> int:
        """How many measurements it rests on."""
        return self._samples

    @property
    def line(self) -> Line:
        """The line with the least relative errors among those that neither fall nor begin below zero."""
        if self._line is None:
            fixed_s, unit_s = _median_line(self._early) if self._early else self._least_squares()
            self._line = Line(fixed_s, unit_s, self._samples)
        return self._line

    def _summarise_early(self) -> None:
        expected = self.line
        early, self._early = self._early, []
        for x, y in early:
            if y / x <= COLD_MIN * expected.seconds(1.0 / x):
                self._sum(1.0 / x, y / x)

    def _sum(self, units: float, seconds: float) -> None:
        x, y, kept = 1.0 / units, seconds / units, 1.0 - 1.0 / MEMORY_SAMPLES
        self._weight = self._weight * kept + 1.0
        self._x = self._x * kept + x
        self._y = self._y * kept + y
        self._xx = self._xx * kept + x * x
        self._xy = self._xy * kept + x * y

    def _least_squares(self) -> tuple[float, float]:
        """Seconds that are fixed, and seconds per unit."""
        if not self._weight:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - mean_x * mean_x
        if variance < (SPREAD_MIN * mean_x) ** 2:
            return 0.0, mean_y
        slope = (self._xy / self._weight - mean_x * mean_y) / variance
        fixed_s = min(max(slope, 0.0), mean_y / mean_x)
        return fixed_s, max(0.0, mean_y - fixed_s * mean_x)


def _median_line(samples: list[tuple[float, float]]) -> tuple[float, float]:
    """Fixed seconds and seconds per unit by medians of what each two samples say (the estimator of Theil and Sen)."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    slopes = [
        (second_y - first_y) / (second_x - first_x)
        for (first_x, first_y), (second_x, second_y) in combinations(samples, 2)
        if abs(second_x - first_x) >= SPREAD_MIN * mean_x
    ]
    most_s = median(y / x for x, y in samples)
    fixed_s = min(max(median(slopes), 0.0), most_s) if slopes else 0.0
    return fixed_s, max(0.0, median(y - fixed_s * x for x, y in samples))


class ServiceMeter:
    """Tells how long each of overlapping requests was served by an engine that serves one after another."""

    def __init__(self) -> None:
        self._ended_s = float("-inf")

    def served_s(self, began_s: float, ended_s: float) -> float:
        """Of the time that a request spent at the engine, what came after the one before it had ended."""
        served_s = max(0.0, ended_s - max(began_s, self._ended_s))
        self._ended_s = max(self._ended_s, ended_s)
        return served_s


class RateTable:
    """Lines per engine and per pair; of one with too few samples the line of its whole group counts.

    Args:
        samples_min: an engine or pair with fewer samples counts as its group.
    """

    def __init__(self, samples_min: int) -> None:
        self._samples_min = samples_min
        self._prefill: dict[str, LineEstimate] = {}
        self._pairs: dict[tuple[str, str], LineEstimate] = {}
        self._groups: dict[str, LineEstimate] = {}
        self._pair_lines: dict[tuple[str, str], Line] = {}

    @property
    def pair_lines(self) -> Mapping[tuple[str, str], Line]:
        """The line of each (source, sink) that has enough samples of its own."""
        return self._pair_lines

    def computed(self, engine_id: str, group: str, tokens: int, seconds: float) -> None:
        """An engine computed so many tokens of a prompt."""
        self._prefill.setdefault(engine_id, LineEstimate()).add(tokens, seconds)
        self._groups.setdefault(group, LineEstimate()).add(tokens, seconds)

    def moved(self, source_id: str, sink_id: str, group: str, tokens: int, seconds: float) -> None:
        """KV of so many tokens went from one engine to another."""
        pair = source_id, sink_id
        if pair not in self._pairs and len(self._pairs) >= PAIRS_MAX:
            return
        self._pairs.setdefault(pair, LineEstimate()).add(tokens, seconds)
        self._groups.setdefault(group, LineEstimate()).add(tokens, seconds)
        if self._pairs[pair].samples >= self._samples_min:
            self._pair_lines[pair] = self._pairs[pair].line

    def prefill_line(self, engine_id: str, group: str) -> Line | None:
        """How fast an engine computes prompts, None while nothing is known of it and its like."""
        own = self._prefill.get(engine_id)
        if own is not None and own.samples >= self._samples_min:
            return own.line
        return self.group_line(group)

    def group_line(self, group: str) -> Line | None:
        """The line of a group, None while nothing is known of it."""
        known = self._groups.get(group)
        return known.line if known is not None and known.samples else None

    def forget(self, engine_id: str) -> None:
        """An engine is gone for good."""
        self._prefill.pop(engine_id, None)
        for pair in [pair for pair in self._pairs if engine_id in pair]:
            del self._pairs[pair]
            self._pair_lines.pop(pair, None)
