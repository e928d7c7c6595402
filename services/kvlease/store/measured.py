"""Times the calls to a store, whichever it is."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from kvlease.core.records import Engine, LeaseRecord
from kvlease.runtime.metric_catalogue import STORE_CALL_SECONDS
from kvlease.runtime.metrics import CallTimer, Metrics
from kvlease.store.port import Batch, Recorded, Session, Store


class MeasuredStore:
    """A `Store` whose calls are timed by outcome; watches live as long as their process and are not."""

    def __init__(self, inner: Store, metrics: Metrics) -> None:
        self._inner = inner
        self._timer = CallTimer(metrics, STORE_CALL_SECONDS)

    async def open_session(self, engine: Engine, ttl_s: float) -> Session:
        """Registers an engine; the calls of its session are timed, too."""
        session = await self._timer.timed("open_session", self._inner.open_session(engine, ttl_s))
        return _MeasuredSession(session, self._timer)

    async def get_engine(self, engine_id: str) -> Engine | None:
        """The engine that is registered under an id."""
        return await self._timer.timed("get_engine", self._inner.get_engine(engine_id))

    async def list_engines(self) -> tuple[Engine, ...]:
        """Every registered engine."""
        return await self._timer.timed("list_engines", self._inner.list_engines())

    async def get_lease(self, lease_id: int) -> LeaseRecord | None:
        """The record of a lease."""
        return await self._timer.timed("get_lease", self._inner.get_lease(lease_id))

    async def list_leases(self, engine_id: str = "", tenant: str = "") -> tuple[LeaseRecord, ...]:
        """Every recorded lease of an engine and of a tenant; empty: of any."""
        return await self._timer.timed("list_leases", self._inner.list_leases(engine_id, tenant))

    def watch_engines(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[Engine]]]:
        """First a snapshot, then every change."""
        return self._inner.watch_engines()

    def watch_leases(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[LeaseRecord]]]:
        """First a snapshot, then every change."""
        return self._inner.watch_leases()


class _MeasuredSession:
    def __init__(self, inner: Session, timer: CallTimer) -> None:
        self._inner = inner
        self._timer = timer

    async def renew(self) -> bool:
        """Keeps the session for another time to live."""
        return await self._timer.timed("renew_session", self._inner.renew())

    async def put_engine(self, engine: Engine) -> None:
        """Replaces the registration."""
        await self._timer.timed("put_engine", self._inner.put_engine(engine))

    async def record_lease(self, record: LeaseRecord, supersedes: int) -> Recorded:
        """Records a confirmed lease."""
        return await self._timer.timed("record_lease", self._inner.record_lease(record, supersedes))

    async def remove_leases(self, lease_ids: Sequence[int]) -> None:
        """Removes records."""
        await self._timer.timed("remove_leases", self._inner.remove_leases(lease_ids))

    async def list_recorded(self) -> frozenset[int]:
        """Leases whose records the store has."""
        return await self._timer.timed("list_recorded", self._inner.list_recorded())

    async def end(self) -> None:
        """Removes the registration and every record of the session."""
        await self._timer.timed("end_session", self._inner.end())
