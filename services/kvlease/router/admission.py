"""Lets turns in while there is room at decode engines; the others wait in turn, by the weights of their tenants."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from kvlease.core.clock import Clock
from kvlease.core.fairness import FairQueue
from kvlease.router.engines import EngineTable
from kvlease.router.tenancy import Tenancy

LOOKED_AGAIN_S = 1.0
"""Room that no turn left, that of an engine which joined or warms up, is seen this soon."""

TENANT_SHARE = 0.5
"""A tenant may fill the queue by this share: the rest is for others."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of the queue.

    Attributes:
        queue_max: turns that wait at this router.
        queue_wait_s: how long one waits.
    """

    queue_max: int = 1000
    queue_wait_s: float = 30.0


class Overloaded(Exception):
    """A turn is not let in.

    Attributes:
        status: 429 when it is the tenant's own doing, else 503.
        code: the reason for machines.
        retry_after_s: when it may be tried again.
    """

    def __init__(self, status: int, code: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s


class Admission:
    """Counts turns in flight per pool of engines, and queues those for which there is no room."""

    def __init__(
        self, engines: EngineTable, tenancy: Tenancy, clock: Clock, limits: AdmissionLimits | None = None
    ) -> None:
        self._engines = engines
        self._tenancy = tenancy
        self._clock = clock
        self._limits = limits or AdmissionLimits()
        self._running: Counter[str] = Counter()
        self._running_of_tenant: Counter[str] = Counter()
        self._queues: dict[str, FairQueue[asyncio.Event]] = {}

    @property
    def waiting(self) -> int:
        """Turns that wait."""
        return sum(map(len, self._queues.values()))

    @asynccontextmanager
    async def admitted(self, tenant: str, model: str) -> AsyncGenerator[None]:
        """Waits for room, and keeps it while the context lasts.

        Raises:
            Overloaded: the tenant has its share, the queue is full, or the wait was too long.
        """
        running_max = self._tenancy.allowance(tenant).running_max
        if 0 < running_max <= self._running_of_tenant[tenant]:
            message = f"{running_max} requests of this tenant are in flight, as many as it may have"
            raise Overloaded(429, "tenant_running_max", message, 1)
        pool = self._engines.pool_of(model)
        self._running_of_tenant[tenant] += 1
        try:
            await self._enter(pool, tenant)
            try:
                yield
            finally:
                _uncount(self._running, pool)
                self._dispatch(pool)
        finally:
            _uncount(self._running_of_tenant, tenant)

    # --- inside -------------------------------------------------------------------------------------------

    async def _enter(self, pool: str, tenant: str) -> None:
        queue = self._queues.get(pool)
        if not queue and self._has_room(pool):
            self._running[pool] += 1
            return
        if queue is None:
            queue = self._queues[pool] = FairQueue()
        self._check_queue(queue, tenant)
        entered = asyncio.Event()
        queue.push(tenant, self._tenancy.allowance(tenant).weight, entered)
        try:
            await self._wait(pool, entered)
        except BaseException:
            if not queue.remove(entered):
                # It was let in as it gave up.
                _uncount(self._running, pool)
                self._dispatch(pool)
            raise
        finally:
            if not queue and self._queues.get(pool) is queue:
                del self._queues[pool]

    def _check_queue(self, queue: FairQueue[asyncio.Event], tenant: str) -> None:
        queue_max, retry_after_s = self._limits.queue_max, max(1, round(self._limits.queue_wait_s / 2))
        if queue.waiting(tenant) >= max(1, int(queue_max * TENANT_SHARE)):
            raise Overloaded(429, "tenant_queue_full", "too many requests of this tenant wait", retry_after_s)
        if self.waiting >= queue_max:
            raise Overloaded(503, "queue_full", "too many requests wait", retry_after_s)

    async def _wait(self, pool: str, entered: asyncio.Event) -> None:
        until_s = self._clock.now_s() + self._limits.queue_wait_s
        while not entered.is_set():
            left_s = until_s - self._clock.now_s()
            if left_s <= 0:
                message = f"no engine had room within {self._limits.queue_wait_s:g} s"
                raise Overloaded(503, "queue_timeout", message, 1)
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOKED_AGAIN_S)):
                    await entered.wait()
            self._dispatch(pool)

    def _dispatch(self, pool: str) -> None:
        queue = self._queues.get(pool)
        while queue and self._has_room(pool):
            entered = queue.pop()
            if entered is None:
                return
            self._running[pool] += 1
            entered.set()

    def _has_room(self, pool: str) -> bool:
        room = self._engines.decode_room(pool)
        return room is None or self._running[pool] < room


def _uncount(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
