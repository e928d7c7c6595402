"""A distribution of the gaps between turns: a histogram over logarithmic buckets in which old gaps fade.

Bounded memory, whatever comes. Pure: gaps are seconds that the caller measured.
"""

import math
from itertools import accumulate

FIRST_EDGE_S = 1.0
BUCKETS_PER_DOUBLING = 4
BUCKETS = 64
"""Buckets from 1 s to 18 hours, each 19 % wider than the one before; shorter and longer gaps share the ends."""

EDGES_S = (0.0, *(FIRST_EDGE_S * 2 ** (edge / BUCKETS_PER_DOUBLING) for edge in range(1, BUCKETS + 1)))
"""Where the buckets begin and end."""

MEMORY = 1000.0
"""Gaps that a histogram remembers: each new one fades the others by a thousandth."""


class GapHistogram:
    """A distribution of gaps in `BUCKETS` numbers."""

    def __init__(self) -> None:
        self._weights = [0.0] * BUCKETS
        self._weight = 0.0
        self._up_to: list[float] = []

    @property
    def weight(self) -> float:
        """Gaps that it remembers, faded ones in part; at most `MEMORY`."""
        return self._weight

    def add(self, gap_s: float) -> None:
        """Learns of a gap."""
        kept = 1.0 - 1.0 / MEMORY
        self._weights = [weight * kept for weight in self._weights]
        self._weights[bucket_of(gap_s)] += 1.0
        self._weight = self._weight * kept + 1.0
        self._up_to = []

    def share_within(self, gap_s: float) -> float:
        """Share of the gaps that are at most so long, 0 when nothing is known. Never falls as `gap_s` grows."""
        if not self._weight or gap_s <= 0:
            return 0.0
        up_to = self._cumulated()
        place = _place(gap_s)
        whole = min(int(place), BUCKETS - 1)
        part = min(place - whole, 1.0)
        return min((up_to[whole] + part * self._weights[whole]) / self._weight, 1.0)

    def shares_within_edges(self) -> list[float]:
        """`share_within` each of `EDGES_S`."""
        weight = self._weight or 1.0
        return [min(up_to / weight, 1.0) for up_to in self._cumulated()]

    def _cumulated(self) -> list[float]:
        if not self._up_to:
            self._up_to = [0.0, *accumulate(self._weights)]
        return self._up_to


def _place(gap_s: float) -> float:
    """Where a gap lies, in buckets from the first edge; 0 for all that is shorter."""
    return max(0.0, math.log2(max(gap_s, FIRST_EDGE_S) / FIRST_EDGE_S) * BUCKETS_PER_DOUBLING)


def bucket_of(gap_s: float) -> int:
    """The bucket in which a gap lies."""
    return min(int(_place(gap_s)), BUCKETS - 1)
