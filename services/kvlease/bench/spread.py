"""Distributions of times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution of milliseconds."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @staticmethod
    def of(seconds: Sequence[float]) -> "Spread":
        """The distribution of times in seconds; zeros without any."""
        ordered = sorted(seconds) or [0.0]

        def at(share_of_all: float) -> float:
            return round(1e3 * ordered[max(0, math.ceil(share_of_all * len(ordered)) - 1)], 2)

        return Spread(len(seconds), at(0.5), at(0.99), at(1.0))
