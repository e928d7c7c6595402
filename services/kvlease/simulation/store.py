"""The store as a process of its own: what other processes ask of it travels over the simulated network."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

from kvlease.core.errors import HolderUnreachable, StoreUnavailable
from kvlease.core.records import Engine, LeaseRecord
from kvlease.simulation.network import Connection, SimNetwork, current
from kvlease.store.port import Batch, Item, Recorded, Session, Store

Result = TypeVar("Result")

STORE = "store"
CALL_S = 1.0
RETRY_S = 0.5


class SimStore:
    """A `Store` that lives in the process `STORE`."""

    def __init__(self, network: SimNetwork, store: Store) -> None:
        self._network = network
        self._store = store

    async def open_session(self, engine: Engine, ttl_s: float) -> Session:
        """Registers an engine."""
        session = await self.ask(lambda: self._store.open_session(engine, ttl_s))
        return _SimSession(self, session)

    async def get_engine(self, engine_id: str) -> Engine | None:
        """The engine that is registered under an id."""
        return await self.ask(lambda: self._store.get_engine(engine_id))

    async def list_engines(self) -> tuple[Engine, ...]:
        """Every registered engine."""
        return await self.ask(self._store.list_engines)

    async def get_lease(self, lease_id: int) -> LeaseRecord | None:
        """The record of a lease."""
        return await self.ask(lambda: self._store.get_lease(lease_id))

    async def list_leases(self, engine_id: str = "", tenant: str = "") -> tuple[LeaseRecord, ...]:
        """Every recorded lease of an engine and of a tenant; empty: of any."""
        return await self.ask(lambda: self._store.list_leases(engine_id, tenant))

    def watch_engines(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[Engine]]]:
        """First a snapshot, then every change; waits for the store instead of raising."""
        return _lasting(self._network, self._store.watch_engines)

    def watch_leases(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[LeaseRecord]]]:
        """First a snapshot, then every change; waits for the store instead of raising."""
        return _lasting(self._network, self._store.watch_leases)

    async def ask(self, serve: Callable[[], Awaitable[Result]]) -> Result:
        """Runs something at the store.

        Raises:
            StoreUnavailable: no answer in time.
        """
        try:
            return await self._network.call(STORE, serve, CALL_S)
        except HolderUnreachable as error:
            raise StoreUnavailable(str(error)) from error


class _SimSession:
    """A `Session` of a `SimStore`."""

    def __init__(self, store: SimStore, session: Session) -> None:
        self._store = store
        self._session = session

    async def renew(self) -> bool:
        """Keeps the session for another time to live."""
        return await self._store.ask(self._session.renew)

    async def put_engine(self, engine: Engine) -> None:
        """Replaces the registration."""
        await self._store.ask(lambda: self._session.put_engine(engine))

    async def record_lease(self, record: LeaseRecord, supersedes: int) -> Recorded:
        """Records a confirmed lease."""
        return await self._store.ask(lambda: self._session.record_lease(record, supersedes))

    async def remove_leases(self, lease_ids: Sequence[int]) -> None:
        """Removes records that the session owns."""
        await self._store.ask(lambda: self._session.remove_leases(lease_ids))

    async def list_recorded(self) -> frozenset[int]:
        """Leases whose records the store has in this session."""
        return await self._store.ask(self._session.list_recorded)

    async def end(self) -> None:
        """Removes the registration and every record of the session."""
        await self._store.ask(self._session.end)


Watch = Callable[[], AbstractAsyncContextManager[AsyncIterator[Batch[Item]]]]


class Batches(Generic[Item]):
    """What a watch tells, carried over a connection to the current process: an iterator of batches.

    Raises `HolderUnreachable` when the connection has ended.
    """

    def __init__(
        self, network: SimNetwork, connection: Connection, watch: Callable[[], "Watch[Item]"]
    ) -> None:
        self._connection = connection
        self._here = current()
        self._waiting: deque[Batch[Item]] = deque()
        self._filled = asyncio.Event()
        self._ended = False
        there = connection.other(self._here)
        connection.on_close(self._here, self._end)
        connection.send(self._here, lambda: network.spawn(there, self._pump(watch())))

    def __aiter__(self) -> "Batches[Item]":
        return self

    async def __anext__(self) -> Batch[Item]:
        await self._filled.wait()
        if not self._waiting:
            raise HolderUnreachable("the watch broke")
        batch = self._waiting.popleft()
        if not self._waiting and not self._ended:
            self._filled.clear()
        return batch

    def close(self) -> None:
        """Ends the watch from here."""
        self._connection.close(self._here)

    async def _pump(self, watch: "Watch[Item]") -> None:
        """Runs at the source until the connection ends."""
        there, pumping = current(), asyncio.current_task()
        assert pumping is not None
        self._connection.on_close(there, pumping.cancel)
        async with watch() as batches:
            async for batch in batches:
                self._connection.send(there, partial(self._take, batch))

    def _take(self, batch: Batch[Item]) -> None:
        self._waiting.append(batch)
        self._filled.set()

    def _end(self) -> None:
        self._ended = True
        self._filled.set()


@asynccontextmanager
async def _lasting(
    network: SimNetwork, watch: Watch[Item]
) -> AsyncGenerator[AsyncIterator[Batch[Item]], None]:
    """A watch of the store that begins again whenever its connection breaks."""
    open_now: list[Batches[Item]] = []

    async def batches() -> AsyncGenerator[Batch[Item], None]:
        while True:
            try:
                connection = await network.connect(STORE)
                current_watch = Batches(network, connection, lambda: watch)
                open_now[:] = [current_watch]
                async for batch in current_watch:
                    yield batch
            except HolderUnreachable:
                await asyncio.sleep(RETRY_S)

    telling = batches()
    try:
        yield telling
    finally:
        for one in open_now:
            one.close()
        await telling.aclose()
