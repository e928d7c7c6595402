"""How soon idle conversations go on, learnt from those that were followed on one engine.

Pure: times are seconds of the caller's clock. What the numbers are for, and why, stands in `core/policy.py`.
"""

from collections import OrderedDict
from dataclasses import dataclass

from kvlease.core.gaps import BUCKETS, EDGES_S, GapHistogram, bucket_of

PRIOR_WEIGHT = 20.0
"""Turns that the prior counts for: half of them followed by another, half of those within a minute."""

PRIOR_MEDIAN_S = 60.0
PRIOR_RETURNS = 0.5
_PRIOR = [PRIOR_WEIGHT * edge_s / (edge_s + PRIOR_MEDIAN_S) for edge_s in EDGES_S]
MEMORY_TURNS = 1000.0

TURNS_TOLD_APART = 6
"""Conversations with this many turns or more are alike."""

RELEARNT_SHARE = 0.01
"""Rates are computed again when so large a share of what is known is new."""

RETURNS_WITHIN_S = 600.0
"""A conversation that is idle for longer has not gone on, whatever it does later."""

FOLLOWED_MAX = 65_536


class ReuseModel:
    """At which rate idle conversations go on, learnt from how leases ended. Bounded memory."""

    def __init__(self) -> None:
        self._gaps = GapHistogram()
        self._returns = [_Returns() for _ in range(TURNS_TOLD_APART)]
        self._within: list[float] = []
        self._shares: list[float] = []
        self._rates: dict[tuple[int, int], float] = {}
        self._learnt = 0.0

    def went_on(self, turns: int, idle_s: float) -> None:
        """A conversation that was idle for so long used its lease, or had its next turn."""
        self._gaps.add(idle_s)
        self._count(turns, 1.0)

    def given_up(self, turns: int) -> None:
        """A conversation was idle for so long that it counts as ended."""
        self._count(turns, 0.0)

    def rate(self, turns: int, idle_s: float) -> float:
        """Reuses per second that are to be expected of a conversation idle for so long; see the module."""
        known = PRIOR_WEIGHT + self._gaps.weight
        if not self._within or self._learnt > RELEARNT_SHARE * known:
            self._within = self._shares_within_edges()
            self._shares = [returns.share for returns in self._returns]
            self._rates.clear()
            self._learnt = 0.0
        asked = min(turns, TURNS_TOLD_APART - 1), bucket_of(idle_s)
        rate = self._rates.get(asked)
        if rate is None:
            rate = self._rates[asked] = _rate(self._shares[asked[0]], self._within, asked[1])
        return rate

    def _count(self, turns: int, went_on: float) -> None:
        self._returns[min(turns, TURNS_TOLD_APART - 1)].count(went_on)
        self._learnt += 1.0

    def _shares_within_edges(self) -> list[float]:
        known, learnt = self._gaps.weight, self._gaps.shares_within_edges()
        weight = known + PRIOR_WEIGHT
        return [(known * share + prior) / weight for share, prior in zip(learnt, _PRIOR, strict=True)]


@dataclass(slots=True)
class _Returns:
    """Turns, and those among them that were followed by another; old ones fade."""

    went_on: float = 0.0
    turns: float = 0.0

    def count(self, went_on: float) -> None:
        kept = 1.0 - 1.0 / MEMORY_TURNS
        self.went_on, self.turns = self.went_on * kept + went_on, self.turns * kept + 1.0

    @property
    def share(self) -> float:
        """Never 0 nor 1: the prior does not fade."""
        return (self.went_on + PRIOR_RETURNS * PRIOR_WEIGHT) / (self.turns + PRIOR_WEIGHT)


def _rate(share: float, within: list[float], begin: int) -> float:
    """The rate of reuse from a bucket of idle time on.

    Args:
        share: of the turns that are followed by another.
        within: of those, by each edge, the share that has been followed.
    """
    occupied_s = best = 0.0
    for end in range(begin + 1, BUCKETS + 1):
        away = 1.0 - share * (within[end - 1] + within[end]) / 2
        occupied_s += (EDGES_S[end] - EDGES_S[end - 1]) * away
        rate = share * (within[end] - within[begin]) / occupied_s
        if rate > best:
            best = rate
    return best


@dataclass(slots=True)
class _Followed:
    turns: int
    idle_since_s: float
    used: bool = False


class ReuseHistory:
    """Follows the leases of an engine past their end, so that a model learns also of those that were not kept.

    Learning from kept leases alone would confirm whatever order they were kept in. Bounded: the one idle for longest
    leaves first.
    """

    def __init__(self, model: ReuseModel, followed_max: int = FOLLOWED_MAX) -> None:
        self._model = model
        self._followed_max = followed_max
        self._leases: OrderedDict[int, _Followed] = OrderedDict()

    def granted(self, now_s: float, lease_id: int, supersedes: int) -> int:
        """A turn left a lease; its conversation went on from the one that it supersedes. Earlier turns known."""
        self.used(now_s, supersedes)
        earlier = self._leases.pop(supersedes, None)
        turns = earlier.turns + 1 if earlier is not None else 0
        self._leases[lease_id] = _Followed(turns, now_s)
        if len(self._leases) > self._followed_max:
            self._leases.popitem(last=False)
        return turns

    def used(self, now_s: float, lease_id: int) -> None:
        """A conversation goes on from a lease, or would if it were still there."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        if not lease.used:
            self._model.went_on(lease.turns, now_s - lease.idle_since_s)
        lease.used, lease.idle_since_s = True, now_s
        self._leases.move_to_end(lease_id)

    def advance(self, now_s: float) -> None:
        """Gives up conversations that have been idle for too long."""
        while self._leases:
            lease_id, lease = next(iter(self._leases.items()))
            if now_s < lease.idle_since_s + RETURNS_WITHIN_S:
                return
            del self._leases[lease_id]
            if not lease.used:
                self._model.given_up(lease.turns)
