"""What keeping conversations alive costs and saves when memory is unlimited: a lease ends by its time alone.

A request's lease is let go when it is continued, when its time has passed, or when the trace ends. Everything counts as
one tenant, and bytes that conversations share are counted for each of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlease.bench.trace import Visit
from kvlease.core.gaps import OWN_GAPS_MAX, GapEstimator, GapPolicy

KeepFor = Callable[[Sequence[float]], float]
"""Seconds for which a request is kept, from its conversation's gaps so far."""


@dataclass(slots=True)
class Kept:
    """What is kept of a request, and its conversation's gaps."""

    until_s: float
    gaps_s: tuple[float, ...]
    let_go: bool = False


@dataclass(slots=True)
class Cost:
    """What a policy cost and saved.

    Attributes:
        continued: requests that continue an earlier one.
        hits: those among them whose earlier one was still kept.
    """

    requests: int = 0
    hits: int = 0
    continued: int = 0
    reused_tokens: int = 0
    held_s: float = 0.0
    held_gib_s: float = 0.0


def keep_fixed(visits: Sequence[Visit], seconds: float) -> Cost:
    """Every request is kept for the same time."""
    return replay(visits, lambda _: seconds, lambda _: None)


def keep_predicted(visits: Sequence[Visit], policy: GapPolicy) -> Cost:
    """Every request is kept for the predicted gap, learnt from the gaps that ended before it."""
    estimator = GapEstimator(policy)
    return replay(
        visits,
        lambda gaps_s: estimator.predict_s("all", gaps_s),
        lambda gap_s: estimator.observe("all", gap_s),
    )


def replay(visits: Sequence[Visit], keep_for: KeepFor, observe: Callable[[float], None]) -> Cost:
    """Runs a policy over a trace in order of time; it learns of a gap when the gap has ended."""
    cost, kept = Cost(requests=len(visits)), list[Kept]()
    for visit in visits:
        gaps_s: tuple[float, ...] = ()
        if visit.parent >= 0:
            parent, earlier = visits[visit.parent], kept[visit.parent]
            gap_s = visit.at_s - parent.at_s
            _continue(cost, visit, earlier)
            _let_go(cost, parent, earlier, visit.at_s)
            observe(gap_s)
            gaps_s = (*earlier.gaps_s, gap_s)[-OWN_GAPS_MAX:]
        kept.append(Kept(visit.at_s + keep_for(gaps_s), gaps_s))
    for visit, held in zip(visits, kept, strict=True):
        _let_go(cost, visit, held, visits[-1].at_s)
    return cost


def _continue(cost: Cost, visit: Visit, earlier: Kept) -> None:
    cost.continued += 1
    if visit.at_s <= earlier.until_s and not earlier.let_go:
        cost.hits += 1
        cost.reused_tokens += visit.shared_tokens


def _let_go(cost: Cost, visit: Visit, held: Kept, now_s: float) -> None:
    if not held.let_go:
        held.let_go = True
        seconds = min(now_s, held.until_s) - visit.at_s
        cost.held_s += seconds
        cost.held_gib_s += seconds * visit.gib
