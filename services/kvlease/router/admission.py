"""Lets turns in while there is room at decode engines; the others wait in turn, by the weights of their tenants."""

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from types import TracebackType

from kvlease.core.clock import Clock
from kvlease.core.fairness import FairQueue
from kvlease.router.counted import uncount
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

    def admitted(self, tenant: str, model: str) -> AbstractAsyncContextManager[None]:
        """Waits for room, and keeps it while the context lasts.

        Entering raises `Overloaded`: the tenant has its share, the queue is full, or the wait was too long.
        """
        return _Admitted(self, tenant, model)

    async def enter(self, tenant: str, model: str) -> str:
        """Waits for room in a pool of engines; the name of the pool, with which `leave` gives it back.

        Raises:
            Overloaded: see `admitted`.
        """
        running_max = self._tenancy.allowance(tenant).running_max
        if 0 < running_max <= self._running_of_tenant[tenant]:
            message = f"{running_max} requests of this tenant are in flight, as many as it may have"
            raise Overloaded(429, "tenant_running_max", message, 1)
        pool = self._engines.pool_of(model)
        self._running_of_tenant[tenant] += 1
        try:
            await self._enter(pool, tenant)
        except BaseException:
            uncount(self._running_of_tenant, tenant)
            raise
        return pool

    def leave(self, tenant: str, pool: str) -> None:
        """A turn that was let in is over."""
        uncount(self._running, pool)
        self._dispatch(pool)
        uncount(self._running_of_tenant, tenant)

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
                uncount(self._running, pool)
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


class _Admitted(AbstractAsyncContextManager[None]):
    """One turn's place. A class, not a generator: every turn has one."""

    __slots__ = ("_admission", "_model", "_pool", "_tenant")

    def __init__(self, admission: Admission, tenant: str, model: str) -> None:
        self._admission = admission
        self._tenant = tenant
        self._model = model
        self._pool = ""

    async def __aenter__(self) -> None:
        self._pool = await self._admission.enter(self._tenant, self._model)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._admission.leave(self._tenant, self._pool)
