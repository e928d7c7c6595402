"""How much prefill a budget of retained KV saves on a trace, by what is done when it is full.

Every request leaves a lease of all its tokens, which takes the place of the one that it continues. Fixed times are as
vLLM has them: a lease stays for its time and cannot be evicted, so that what does not fit is not kept. The others end
leases in their order, and let go of what has been idle for ten minutes. Bytes that conversations share are counted for
each of them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvlease.bench.trace import BYTES_PER_TOKEN, GIB, Visit
from kvlease.core.policy import LeaseUse, PrefillCost, eviction_order
from kvlease.core.reuse import RETURNS_WITHIN_S, ReuseHistory, ReuseModel

Order = Callable[[Mapping[int, LeaseUse]], Iterable[int]]
"""Leases from the least to the most worth keeping."""


@dataclass(frozen=True, slots=True)
class BudgetPolicy:
    """What is kept, and what goes when the budget is full.

    Attributes:
        order: of eviction; nothing for leases that cannot be evicted.
        keep_s: a lease ends when it has been idle for so long.
    """

    order: Order | None
    keep_s: float


class LeaseBudget:
    """Leases within a budget.

    Args:
        history: learns of every turn, whether its lease was kept or not.
    """

    def __init__(
        self, visits: Sequence[Visit], budget_gib: float, policy: BudgetPolicy, history: ReuseHistory
    ) -> None:
        self._visits = visits
        self._budget_bytes = budget_gib * GIB
        self._policy = policy
        self._history = history
        self._turns: OrderedDict[int, int] = OrderedDict()
        self._bytes = 0
        self.reused_tokens = 0

    def visit(self, index: int) -> None:
        """One request of the trace: it reuses what is there, and leaves its own lease."""
        visit, size = self._visits[index], self._size(index)
        self._history.advance(visit.at_s)
        self._expire(visit.at_s)
        if visit.parent in self._turns:
            self.reused_tokens += visit.shared_tokens
            self._end(visit.parent)
        turns = self._history.granted(visit.at_s, index + 1, visit.parent + 1)
        if self._policy.order is None and self._bytes + size > self._budget_bytes:
            return
        self._turns[index] = turns
        self._bytes += size
        if self._policy.order is not None and self._bytes > self._budget_bytes:
            self._shrink(visit.at_s, self._policy.order)

    def _expire(self, now_s: float) -> None:
        while self._turns:
            oldest = next(iter(self._turns))
            if now_s < self._visits[oldest].at_s + self._policy.keep_s:
                return
            self._end(oldest)

    def _shrink(self, now_s: float, order: Order) -> None:
        for index in order({index: self._use(index, now_s) for index in self._turns}):
            if self._bytes <= self._budget_bytes:
                return
            self._end(index)

    def _use(self, index: int, now_s: float) -> LeaseUse:
        visit = self._visits[index]
        return LeaseUse(visit.tokens, self._size(index), self._turns[index], now_s - visit.at_s, 20.0, 20.0)

    def _size(self, index: int) -> int:
        return self._visits[index].tokens * BYTES_PER_TOKEN

    def _end(self, index: int) -> None:
        del self._turns[index]
        self._bytes -= self._size(index)


def reused_lru(visits: Sequence[Visit], budget_gib: float) -> int:
    """Prompt tokens saved by evicting what was used least recently."""
    # A mapping of leases is in the order of their last use.
    return _reused(visits, budget_gib, BudgetPolicy(iter, RETURNS_WITHIN_S), ReuseModel())


def reused_ours(visits: Sequence[Visit], budget_gib: float) -> int:
    """Prompt tokens saved by evicting in the order of `core/policy.py`."""
    model, cost = ReuseModel(), PrefillCost()
    policy = BudgetPolicy(lambda uses: eviction_order(uses, model, cost), RETURNS_WITHIN_S)
    return _reused(visits, budget_gib, policy, model)


def reused_fixed(visits: Sequence[Visit], budget_gib: float, keep_s: float) -> int:
    """Prompt tokens saved by keeping what fits for a fixed time."""
    return _reused(visits, budget_gib, BudgetPolicy(None, keep_s), ReuseModel())


def _reused(visits: Sequence[Visit], budget_gib: float, policy: BudgetPolicy, model: ReuseModel) -> int:
    budget = LeaseBudget(visits, budget_gib, policy, ReuseHistory(model))
    for index in range(len(visits)):
        budget.visit(index)
    return budget.reused_tokens
