"""A store that a test can break."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager

from kvlease.core.errors import StoreUnavailable
from kvlease.core.records import Engine, LeaseRecord
from kvlease.store.port import Batch, Recorded, Session, Store


class BreakableStore:
    """Passes everything on to another store, and refuses it all while `broken`. Watches go on."""

    def __init__(self, store: Store) -> None:
        self.broken = False
        self._store = store

    def check(self) -> None:
        """Raises `StoreUnavailable` while broken."""
        if self.broken:
            raise StoreUnavailable("broken by the test")

    async def open_session(self, engine: Engine, ttl_s: float) -> Session:
        """Registers an engine."""
        self.check()
        return _BreakableSession(self, await self._store.open_session(engine, ttl_s))

    async def get_engine(self, engine_id: str) -> Engine | None:
        """The engine that is registered under an id."""
        self.check()
        return await self._store.get_engine(engine_id)

    async def list_engines(self) -> tuple[Engine, ...]:
        """Every registered engine."""
        self.check()
        return await self._store.list_engines()

    async def get_lease(self, lease_id: int) -> LeaseRecord | None:
        """The record of a lease."""
        self.check()
        return await self._store.get_lease(lease_id)

    async def list_leases(self, engine_id: str = "", tenant: str = "") -> tuple[LeaseRecord, ...]:
        """Every recorded lease of an engine and of a tenant; empty: of any."""
        self.check()
        return await self._store.list_leases(engine_id, tenant)

    def watch_engines(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[Engine]]]:
        """First a snapshot, then every change."""
        return self._store.watch_engines()

    def watch_leases(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[LeaseRecord]]]:
        """First a snapshot, then every change."""
        return self._store.watch_leases()


class _BreakableSession:
    def __init__(self, store: BreakableStore, session: Session) -> None:
        self._store = store
        self._session = session

    async def renew(self) -> bool:
        self._store.check()
        return await self._session.renew()

    async def put_engine(self, engine: Engine) -> None:
        self._store.check()
        await self._session.put_engine(engine)

    async def record_lease(self, record: LeaseRecord, supersedes: int) -> Recorded:
        self._store.check()
        return await self._session.record_lease(record, supersedes)

    async def remove_leases(self, lease_ids: Sequence[int]) -> None:
        self._store.check()
        await self._session.remove_leases(lease_ids)

    async def list_recorded(self) -> frozenset[int]:
        self._store.check()
        return await self._session.list_recorded()

    async def end(self) -> None:
        self._store.check()
        await self._session.end()
