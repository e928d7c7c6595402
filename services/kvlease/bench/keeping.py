"""What keeping conversations alive costs and saves when memory is unlimited: a lease ends by its time alone.

A request's lease is let go when it is continued, when its time has passed, or when the trace ends. Everything counts as
one tenant, and bytes that conversations share are counted for each of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlease.bench.trace import Visit
from kvlease.core.pauses import KeepPolicy, PauseModel, TurnEnd


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
    return replay(visits, [seconds] * len(visits))


def keep_predicted(visits: Sequence[Visit], policies: Sequence[KeepPolicy]) -> list[Cost]:
    """Every request is kept for as long as it is worth at a policy's price, by what was learnt until then."""
    model, times_s = PauseModel(), [list[float]() for _ in policies]
    turns: list[TurnEnd] = []
    for index, visit in enumerate(visits):
        turn = turn_of(visit, visits, turns)
        turns.append(turn)
        model.went_on(visit.at_s, visit.parent)
        model.begin(visit.at_s, index, turn)
        for policy, kept_s in zip(policies, times_s, strict=True):
            kept_s.append(model.keep_s(turn, policy))
    return [replay(visits, kept_s) for kept_s in times_s]


def turn_of(visit: Visit, visits: Sequence[Visit], turns: Sequence[TurnEnd]) -> TurnEnd:
    """What is known of a request when it has been answered; the turns are those before it."""
    continues = visit.parent >= 0
    return TurnEnd(
        tenant="all",
        turns=turns[visit.parent].turns + 1 if continues else 0,
        prompt_tokens=visit.prompt_tokens,
        new_tokens=visit.prompt_tokens - visit.shared_tokens,
        reply_tokens=visit.tokens - visit.prompt_tokens,
        last_gap_s=visit.at_s - visits[visit.parent].at_s if continues else None,
    )


def replay(visits: Sequence[Visit], times_s: Sequence[float]) -> Cost:
    """Keeps every request for its time."""
    cost, held = Cost(requests=len(visits)), [True] * len(visits)
    for visit in visits:
        if visit.parent >= 0:
            _continue(
                cost, visit, visits[visit.parent], times_s[visit.parent] if held[visit.parent] else None
            )
            held[visit.parent] = False
    for visit, time_s, still in zip(visits, times_s, held, strict=True):
        if still:
            _let_go(cost, visit, min(visits[-1].at_s - visit.at_s, time_s))
    return cost


def _continue(cost: Cost, visit: Visit, earlier: Visit, time_s: float | None) -> None:
    """A request goes on from an earlier one, which is kept for so long unless another one did so first."""
    cost.continued += 1
    if time_s is None:
        return
    gap_s = visit.at_s - earlier.at_s
    if gap_s <= time_s:
        cost.hits += 1
        cost.reused_tokens += visit.shared_tokens
    _let_go(cost, earlier, min(gap_s, time_s))


def _let_go(cost: Cost, visit: Visit, seconds: float) -> None:
    cost.held_s += seconds
    cost.held_gib_s += seconds * visit.gib
