"""In which order turns that wait are let in, so that tenants share by weight. Pure.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): a turn's tag is when it would begin if each tenant
had its weighted share for itself; the least tag goes first. A tenant that was away gains nothing by it, and one that
sends much delays itself.
"""

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(order=True, slots=True)
class _Waiting(Generic[Item]):
    tag: float
    number: int
    tenant: str = ""
    item: Item | None = None


class FairQueue(Generic[Item]):
    """Items of tenants, each of which costs one."""

    def __init__(self) -> None:
        self._heap: list[_Waiting[Item]] = []
        self._finish: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._now = 0.0
        self._number = 0

    def __len__(self) -> int:
        return self._waiting.total()

    def waiting(self, tenant: str) -> int:
        """Items of a tenant that wait."""
        return self._waiting[tenant]

    def push(self, tenant: str, weight: float, item: Item) -> None:
        """An item waits; `weight` above 0 is its tenant's."""
        tag = max(self._now, self._finish.get(tenant, 0.0))
        self._finish[tenant] = tag + 1.0 / weight
        self._number += 1
        self._waiting[tenant] += 1
        heappush(self._heap, _Waiting(tag, self._number, tenant, item))

    def pop(self) -> Item | None:
        """The item whose turn it is, None when none waits."""
        while self._heap:
            first = heappop(self._heap)
            if first.item is None:
                continue
            self._now = max(self._now, first.tag)
            self._left(first.tenant)
            return first.item
        return None

    def remove(self, item: Item) -> bool:
        """An item waits no longer. False when it did not wait."""
        for waiting in self._heap:
            if waiting.item is item:
                waiting.item = None
                self._left(waiting.tenant)
                return True
        return False

    def _left(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if self._waiting[tenant] <= 0:
            del self._waiting[tenant]
        if not self._waiting:
            self._heap.clear()
            self._finish.clear()
            self._now = 0.0
