"""How long a conversation is likely to pause before its next turn, learnt from the pauses seen so far.

A distribution is a histogram over logarithmic buckets in which old gaps fade: bounded memory, whatever comes.
What is known least of borrows from what is known better: a conversation from its tenant, a tenant from the
fleet. Pure: gaps are seconds that the caller measured.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvlease.core.errors import InvalidArgument

FIRST_EDGE_S = 1.0
BUCKETS_PER_DOUBLING = 4
BUCKETS = 64
"""Buckets from 1 s to 18 hours, each 19 % wider than the one before; shorter and longer gaps share the ends."""

EDGES_S = (0.0, *(FIRST_EDGE_S * 2 ** (edge / BUCKETS_PER_DOUBLING) for edge in range(1, BUCKETS + 1)))
"""Where the buckets begin and end."""

MEMORY = 1000.0
"""Gaps that a histogram remembers: each new one fades the others by a thousandth."""

OWN_GAPS_MAX = 8
BORROWED_WEIGHT = 8.0
"""What is borrowed counts as so many gaps of one's own."""

KNOWN_WEIGHT = 20.0
"""Gaps below which the fleet's distribution says nothing yet."""


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

    def shares(self) -> list[float]:
        """Share of the gaps in each bucket; all 0 when nothing is known."""
        if not self._weight:
            return [0.0] * BUCKETS
        return [weight / self._weight for weight in self._weights]

    def share_within(self, gap_s: float) -> float:
        """Share of the gaps that are at most so long, 0 when nothing is known. Never falls as `gap_s` grows."""
        if not self._weight or gap_s <= 0:
            return 0.0
        if not self._up_to:
            self._up_to = [0.0, *accumulate(self._weights)]
        place = _place(gap_s)
        whole = min(int(place), BUCKETS - 1)
        part = min(place - whole, 1.0)
        return min((self._up_to[whole] + part * self._weights[whole]) / self._weight, 1.0)


@dataclass(frozen=True, slots=True)
class GapPolicy:
    """How long a conversation is kept after a turn.

    Attributes:
        quantile: share of the gaps that are to be outlived.
        floor_s: kept at least this long, and exactly this long while nothing is known.
        cap_s: kept at most this long.
    """

    quantile: float = 0.9
    floor_s: float = 30.0
    cap_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise InvalidArgument(f"quantile is {self.quantile}: it must lie between 0 and 1")
        if not 0 < self.floor_s <= self.cap_s:
            raise InvalidArgument(
                f"floor_s is {self.floor_s} and cap_s {self.cap_s}: the floor is above 0, and not above the cap"
            )


class GapEstimator:
    """Predicts gaps of conversations. The conversation's own latest gaps stay with its owner."""

    def __init__(self, policy: GapPolicy, tenants_max: int = 1000) -> None:
        self._policy = policy
        self._tenants_max = tenants_max
        self._fleet = GapHistogram()
        self._tenants: OrderedDict[str, GapHistogram] = OrderedDict()

    def observe(self, tenant: str, gap_s: float) -> None:
        """Learns that a conversation of the tenant went on after `gap_s`."""
        self._fleet.add(gap_s)
        self._tenants.setdefault(tenant, GapHistogram()).add(gap_s)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > self._tenants_max:
            self._tenants.popitem(last=False)

    def predict_s(self, tenant: str, own_gaps_s: Sequence[float]) -> float:
        """Seconds within which the next turn of a conversation comes, as often as the quantile says.

        Args:
            own_gaps_s: the conversation's latest gaps; the first `OWN_GAPS_MAX` from the end count.
        """
        policy = self._policy
        own = own_gaps_s[-OWN_GAPS_MAX:]
        if not own and self._fleet.weight < KNOWN_WEIGHT:
            return policy.floor_s
        mixture = self._tenant_shares(tenant)
        weights = [BORROWED_WEIGHT * share for share in mixture]
        for gap_s in own:
            weights[bucket_of(gap_s)] += 1.0
        return min(max(_quantile_s(weights, policy.quantile), policy.floor_s), policy.cap_s)

    def _tenant_shares(self, tenant: str) -> list[float]:
        """The tenant's distribution, filled up from the fleet's while the tenant is little known."""
        fleet = self._fleet.shares()
        known = self._tenants.get(tenant)
        if known is None:
            return fleet
        share = known.weight / (known.weight + KNOWN_WEIGHT)
        return [share * own + (1 - share) * all_ for own, all_ in zip(known.shares(), fleet, strict=True)]


def _place(gap_s: float) -> float:
    """Where a gap lies, in buckets from the first edge; 0 for all that is shorter."""
    return max(0.0, math.log2(max(gap_s, FIRST_EDGE_S) / FIRST_EDGE_S) * BUCKETS_PER_DOUBLING)


def bucket_of(gap_s: float) -> int:
    """The bucket in which a gap lies."""
    return min(int(_place(gap_s)), BUCKETS - 1)


def _quantile_s(weights: Sequence[float], quantile: float) -> float:
    """The upper edge of the bucket in which the quantile lies: rather kept too long than just too short."""
    wanted = quantile * sum(weights)
    reached = next(
        (bucket for bucket, total in enumerate(accumulate(weights)) if total >= wanted), BUCKETS - 1
    )
    return EDGES_S[reached + 1]
