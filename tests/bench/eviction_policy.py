"""How much prefill a budget of retained KV saves on a trace: our order of eviction against least recently used.

    python -m tests.bench.eviction_policy TRACE --output docs/benchmarks/DATE-eviction-policy.json

The trace and its conversations are read as in `gap_policy`. Every request leaves a lease of all its tokens, which takes
the place of the one that it continues; when the leases outgrow the budget, leases are ended in the policy's order. Both
policies let go of what has been idle for ten minutes. Bytes that conversations share are counted for each of them.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tests.bench.gap_policy import BYTES_PER_TOKEN, GIB, Visit, read_trace

from kvlease.core.policy import LeaseUse, PrefillCost, eviction_order
from kvlease.core.reuse import RETURNS_WITHIN_S, ReuseHistory, ReuseModel

BUDGETS_GIB = (62, 125, 250, 500, 1000)

Order = Callable[[Mapping[int, LeaseUse]], Iterable[int]]
"""Leases from the least to the most worth keeping."""


class Cache:
    """Leases within a budget.

    Args:
        order: the policy.
        history: learns of every turn, whether its lease was kept or not.
    """

    def __init__(
        self, visits: Sequence[Visit], budget_bytes: float, order: Order, history: ReuseHistory
    ) -> None:
        self._visits = visits
        self._budget_bytes = budget_bytes
        self._order = order
        self._history = history
        self._turns: dict[int, int] = {}
        self._bytes = 0
        self.reused_tokens = 0

    def visit(self, index: int) -> None:
        """One request of the trace: it reuses what is there, and leaves its own lease."""
        visit = self._visits[index]
        self._history.advance(visit.at_s)
        while (
            self._turns
            and self._visits[oldest := next(iter(self._turns))].at_s <= visit.at_s - RETURNS_WITHIN_S
        ):
            self._end(oldest)
        if visit.parent in self._turns:
            self.reused_tokens += visit.shared_tokens
            self._end(visit.parent)
        self._turns[index] = self._history.granted(visit.at_s, index + 1, visit.parent + 1)
        self._bytes += visit.tokens * BYTES_PER_TOKEN
        if self._bytes > self._budget_bytes:
            self._shrink(visit.at_s)

    def _shrink(self, now_s: float) -> None:
        for index in self._order({index: self._use(index, now_s) for index in self._turns}):
            if self._bytes <= self._budget_bytes:
                return
            self._end(index)

    def _use(self, index: int, now_s: float) -> LeaseUse:
        visit = self._visits[index]
        size = visit.tokens * BYTES_PER_TOKEN
        return LeaseUse(visit.tokens, size, self._turns[index], now_s - visit.at_s, 20.0, 20.0)

    def _end(self, index: int) -> None:
        del self._turns[index]
        self._bytes -= self._visits[index].tokens * BYTES_PER_TOKEN


def reused_tokens(visits: Sequence[Visit], budget_gib: int, *, ours: bool) -> int:
    """Prompt tokens that a policy saved over the trace."""
    model, cost = ReuseModel(), PrefillCost()
    order: Order = (lambda uses: eviction_order(uses, model, cost)) if ours else iter
    cache = Cache(visits, budget_gib * GIB, order, ReuseHistory(model))
    for index in range(len(visits)):
        cache.visit(index)
    return cache.reused_tokens


def main() -> None:
    """Reads the trace and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("trace", type=Path)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS_GIB, help="GiB")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    with arguments.trace.open() as lines:
        visits = read_trace(lines)
    figures: dict[str, dict[str, float]] = {}
    for budget_gib in arguments.budgets:
        lru, ours = (reused_tokens(visits, budget_gib, ours=own) for own in (False, True))
        figures[f"{budget_gib} GiB"] = {"lru": lru, "ours": ours, "ours_by_lru": round(ours / max(1, lru), 2)}
    report = {
        "what": "prompt tokens saved by retained KV within a budget, by order of eviction",
        "command": f"python -m tests.bench.eviction_policy {arguments.trace.name}",
        "trace": arguments.trace.name,
        "requests": len(visits),
        "bytes_per_token": BYTES_PER_TOKEN,
        "reusable_tokens": sum(visit.shared_tokens for visit in visits),
        "budgets": figures,
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
