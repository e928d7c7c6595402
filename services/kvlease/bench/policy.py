"""`kvlease bench policy`: what keeping conversations costs and saves on a trace, by policy."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlease.bench.bounds import Offer, gib_s_at_least, interpolated, offers_of, tokens_at_most, tokens_within
from kvlease.bench.budget import reused_fixed, reused_lru, reused_ours
from kvlease.bench.keeping import Cost, keep_fixed, keep_predicted
from kvlease.bench.machine import machine
from kvlease.bench.source import add_source, source_of, visits_of
from kvlease.bench.trace import BYTES_PER_TOKEN, Visit
from kvlease.core.errors import InvalidArgument
from kvlease.core.pauses import KeepPolicy

FIXED_S = (30.0, 120.0, 480.0, 1800.0)
CURVE_S = (*FIXED_S, 60.0, 240.0, 360.0, 600.0)
VLLM_KEEPS_S = 480.0
RETURNS_PER_HOUR = (20.0, 10.0, 6.0, 4.0, 3.0, 2.5, 2.0, 1.6, 1.3, 1.15, 1.0, 0.85, 0.7, 0.5, 0.3, 0.15)
BUDGETS_GIB = (62.0, 125.0, 250.0, 500.0, 1000.0)

MOST_OF_FIXED_COST = 0.9
LEAST_OF_LRU_REUSE = 1.4
LRU_GOAL_MAX_GIB = 500.0
"""Goals: at the reuse of the fixed 480 s of vLLM at most so much of its GiB and seconds; within budgets up to 500 GiB
at least so much of what least recently used saves."""


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease bench policy`."""
    add_source(parser)
    parser.add_argument("--budgets", type=float, nargs="+", default=BUDGETS_GIB, metavar="GIB")
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what is printed")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write FILE.png and FILE.svg (needs the extra bench)"
    )


def run(arguments: Namespace) -> int:
    """Measures and prints. The exit status: 0 when every goal was met, 1 when not, 2 for a trace that is none."""
    try:
        visits = visits_of(arguments)
    except (OSError, InvalidArgument) as error:
        sys.stderr.write(f"kvlease bench policy: {error}\n")
        return 2
    report = measure(visits, arguments.budgets)
    document = {
        "what": "prefill tokens that kept conversations save, by policy: for GiB and seconds, and within a budget",
        "command": f"kvlease bench policy {source_of(arguments)}",
        "machine": machine(),
        **report.to_json(),
    }
    text = json.dumps(document, indent=2) if arguments.output == "json" else report.table()
    sys.stdout.write(text + "\n")
    if arguments.plot is not None:
        from kvlease.bench.policy_plot import plot

        plot(report, arguments.plot)
    return 0 if all(report.goals().values()) else 1


@dataclass(frozen=True, slots=True)
class WithinBudget:
    """Prompt tokens saved within a budget, and the most that any policy could."""

    fixed: Mapping[float, int]
    lru: int
    ours: int
    bound: float

    def to_json(self) -> dict[str, object]:
        """The figures, with the shares that count."""
        return {
            "fixed": {f"{seconds:g} s": tokens for seconds, tokens in self.fixed.items()},
            "lru": self.lru,
            "ours": self.ours,
            "bound": round(self.bound),
            "ours_of_lru": round(self.ours / max(1, self.lru), 2),
            "ours_of_bound": round(self.ours / max(1.0, self.bound), 3),
        }


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """The figures of one trace.

    Attributes:
        fixed: by the time for which every turn is kept, with unlimited memory.
        ours: by the returns that an hour of keeping must bring, with unlimited memory.
        budgets: by GiB.
    """

    visits: Sequence[Visit]
    offers: Sequence[Offer]
    fixed: Mapping[float, Cost]
    ours: Mapping[float, Cost]
    budgets: Mapping[float, WithinBudget]

    def cost_of_ours(self, fixed_s: float) -> float | None:
        """Our GiB and seconds at a fixed time's reuse, as a share of its own; None where we do not reach it."""
        fixed = self.fixed[fixed_s]
        curve = [(cost.reused_tokens, cost.held_gib_s) for cost in self.ours.values()]
        gib_s = interpolated(curve, fixed.reused_tokens)
        return None if gib_s is None else gib_s / fixed.held_gib_s

    def goals(self) -> dict[str, bool]:
        """Whether each goal is met."""
        cost = self.cost_of_ours(VLLM_KEEPS_S)
        goal = f"at fixed {VLLM_KEEPS_S:g} s's reuse at most {MOST_OF_FIXED_COST} of its GiB*s"
        met = {goal: cost is not None and cost <= MOST_OF_FIXED_COST}
        for gib, figures in self.budgets.items():
            if gib <= LRU_GOAL_MAX_GIB:
                goal = f"{gib:g} GiB: at least {LEAST_OF_LRU_REUSE} of LRU's reuse"
                met[goal] = figures.ours >= LEAST_OF_LRU_REUSE * figures.lru
        return met

    def to_json(self) -> dict[str, object]:
        """The figures as a document."""
        return {
            "requests": len(self.visits),
            "continuing_requests": sum(visit.parent >= 0 for visit in self.visits),
            "conversations": "a request continues the latest one that has its longest known prefix, "
            "if they share more than one block",
            "bytes_per_token": BYTES_PER_TOKEN,
            "reusable_tokens": sum(offer.tokens for offer in self.offers),
            "unlimited": {
                **{f"fixed {seconds:g} s": self._cost(cost) for seconds, cost in self.fixed.items()},
                **{f"ours, {price:g} returns an hour": self._cost(cost) for price, cost in self.ours.items()},
            },
            "ours_cost_at_reuse_of_fixed": {
                f"{seconds:g} s": None if (cost := self.cost_of_ours(seconds)) is None else round(cost, 3)
                for seconds in self.fixed
            },
            "budgets": {f"{gib:g} GiB": figures.to_json() for gib, figures in self.budgets.items()},
            "goals": self.goals(),
        }

    def _cost(self, cost: Cost) -> dict[str, float]:
        most = tokens_at_most(self.offers, cost.held_gib_s)
        least = gib_s_at_least(self.offers, cost.reused_tokens)
        return {
            "hit_rate": round(cost.hits / max(1, cost.continued), 4),
            "reused_tokens": cost.reused_tokens,
            "held_s_a_request": round(cost.held_s / max(1, cost.requests), 1),
            "held_gib_s": round(cost.held_gib_s),
            "reuse_of_bound": round(cost.reused_tokens / max(1.0, most), 3),
            "bound_gib_s_at_this_reuse": round(least),
        }

    def table(self) -> str:
        """The figures for a terminal."""
        lines = [f"{'unlimited memory':22} {'reused tokens':>14} {'GiB*s':>12} {'of the bound':>13}"]
        rows = {f"fixed {seconds:g} s": cost for seconds, cost in sorted(self.fixed.items())}
        rows |= {f"ours, {price:g} returns/h": cost for price, cost in self.ours.items()}
        for name, cost in rows.items():
            share = cost.reused_tokens / max(1.0, tokens_at_most(self.offers, cost.held_gib_s))
            lines.append(f"{name:22} {cost.reused_tokens:14,} {cost.held_gib_s:12,.0f} {share:13.1%}")
        lines.append("")
        fixed = "".join(f"{f'fixed {seconds:g} s':>14}" for seconds in FIXED_S)
        lines.append(f"{'budget':10}{fixed}{'LRU':>14}{'ours':>14}{'bound':>14}  ours of LRU, of the bound")
        for gib, row in self.budgets.items():
            cells = "".join(f"{tokens:14,}" for tokens in (*row.fixed.values(), row.lru, row.ours))
            shares = f"{row.ours / max(1, row.lru):.2f}, {row.ours / max(1.0, row.bound):.1%}"
            lines.append(f"{f'{gib:g} GiB':10}{cells}{row.bound:14,.0f}  {shares}")
        lines.append("")
        lines += [f"{'met' if met else 'NOT MET':8} {goal}" for goal, met in self.goals().items()]
        return "\n".join(lines)


def measure(visits: Sequence[Visit], budgets_gib: Sequence[float]) -> PolicyReport:
    """Runs every policy over a trace."""
    offers = offers_of(visits)
    policies = [KeepPolicy(price) for price in RETURNS_PER_HOUR]
    return PolicyReport(
        visits=visits,
        offers=offers,
        fixed={seconds: keep_fixed(visits, seconds) for seconds in sorted(CURVE_S)},
        ours=dict(zip(RETURNS_PER_HOUR, keep_predicted(visits, policies), strict=True)),
        budgets={
            gib: WithinBudget(
                fixed={seconds: reused_fixed(visits, gib, seconds) for seconds in FIXED_S},
                lru=reused_lru(visits, gib),
                ours=reused_ours(visits, gib),
                bound=tokens_within(offers, gib),
            )
            for gib in budgets_gib
        },
    )
