"""A store in the memory of one process: for `kvlease dev`, and for tests.

Not for several processes: each would have its own. Timers are the running loop's, so that virtual time works.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from kvlease.core.errors import EngineIdReused, InvalidArgument, StoreUnavailable
from kvlease.core.records import Engine, LeaseRecord
from kvlease.store.feed import Feed
from kvlease.store.keys import boot_key, conversation_key
from kvlease.store.port import WATCH_QUEUE_MAX, Batch, Change, Recorded, predecessors_of

BOOTS_MAX = 65_536
"""Engine ids whose boot ids are remembered, the latest ones."""


@dataclass(slots=True)
class _LeaseEntry:
    record: LeaseRecord
    predecessors: tuple[int, ...]
    session: "MemorySession"


@dataclass(slots=True)
class _State:
    """Everything stored. `revision` counts transactions."""

    revision: int = 0
    engines: dict[str, Engine] = field(default_factory=dict[str, Engine])
    owners: dict[str, "MemorySession"] = field(default_factory=dict[str, "MemorySession"])
    boots: OrderedDict[str, str] = field(default_factory=OrderedDict[str, str])
    leases: dict[int, _LeaseEntry] = field(default_factory=dict[int, _LeaseEntry])
    leaves: dict[str, int] = field(default_factory=dict[str, int])


class MemoryStore:
    """A `Store` in memory."""

    def __init__(self, watch_queue_max: int = WATCH_QUEUE_MAX) -> None:
        self._state = _State()
        self._engine_feed = Feed[Engine](lambda: iter(self._state.engines.values()), watch_queue_max)
        self._lease_feed = Feed[LeaseRecord](
            lambda: (entry.record for entry in self._state.leases.values()), watch_queue_max
        )

    async def close(self) -> None:
        """Nothing is open."""

    async def open_session(self, engine: Engine, ttl_s: float) -> "MemorySession":
        """Registers an engine in a session that ends `ttl_s` after its last renewal."""
        state, holder = self._state, engine.holder
        key = boot_key(holder.engine_id)
        if state.boots.setdefault(key, holder.boot_id) != holder.boot_id:
            raise EngineIdReused(
                f"engine id {holder.engine_id} was seen under another boot id: leave `engine_id` out of "
                "kv_transfer_config, so that each start of the engine draws its own"
            )
        state.boots.move_to_end(key)
        if len(state.boots) > BOOTS_MAX:
            state.boots.popitem(last=False)
        session = MemorySession(self, holder.engine_id, ttl_s)
        state.owners[holder.engine_id] = session
        self.commit_engine(engine)
        return session

    async def get_engine(self, engine_id: str) -> Engine | None:
        """The engine that is registered under an id."""
        return self._state.engines.get(engine_id)

    async def list_engines(self) -> tuple[Engine, ...]:
        """Every registered engine."""
        return tuple(self._state.engines.values())

    async def get_lease(self, lease_id: int) -> LeaseRecord | None:
        """The record of a lease."""
        entry = self._state.leases.get(lease_id)
        return None if entry is None else entry.record

    async def list_leases(self, engine_id: str = "", tenant: str = "") -> tuple[LeaseRecord, ...]:
        """Every recorded lease of an engine and of a tenant; empty: of any."""
        return tuple(
            entry.record
            for entry in self._state.leases.values()
            if engine_id in ("", entry.record.holder.engine_id) and tenant in ("", entry.record.tenant)
        )

    @asynccontextmanager
    async def watch_engines(self) -> AsyncGenerator[AsyncIterator[Batch[Engine]], None]:
        """First a snapshot, then every change, until the context is left."""
        with self._engine_feed.watch() as batches:
            yield batches

    @asynccontextmanager
    async def watch_leases(self) -> AsyncGenerator[AsyncIterator[Batch[LeaseRecord]], None]:
        """First a snapshot, then every change, until the context is left."""
        with self._lease_feed.watch() as batches:
            yield batches

    # --- transactions of sessions: no await inside, so each is atomic ---

    def owns(self, session: "MemorySession", engine_id: str) -> bool:
        """Whether the session is the one that registered the engine last."""
        return self._state.owners.get(engine_id) is session

    def commit_engine(self, engine: Engine) -> None:
        """Stores a registration."""
        self._state.revision += 1
        self._state.engines[engine.holder.engine_id] = engine
        self._engine_feed.publish((Change(engine),))

    def commit_lease(self, session: "MemorySession", record: LeaseRecord, supersedes: int) -> Recorded:
        """Stores a lease record as its conversation's only one."""
        state = self._state
        leaf = conversation_key(record.tenant, record.conversation_key) if record.conversation_key else ""
        standing = state.leases.get(state.leaves.get(leaf, 0))
        if standing is not None and record.lease_id in standing.predecessors:
            return Recorded(0)
        state.revision += 1
        known = state.leases.get(record.lease_id)
        record = replace(record, generation=known.record.generation if known else state.revision)
        predecessors = predecessors_of(
            record.lease_id,
            supersedes,
            0 if standing is None else standing.record.lease_id,
            () if standing is None else standing.predecessors,
        )
        state.leases[record.lease_id] = _LeaseEntry(record, predecessors, session)
        changes = [Change(record)]
        superseded = None
        if leaf:
            state.leaves[leaf] = record.lease_id
            if standing is not None and standing.record.lease_id != record.lease_id:
                superseded = standing.record
                del state.leases[superseded.lease_id]
                changes.append(Change(superseded, gone=True))
        self._lease_feed.publish(tuple(changes))
        return Recorded(record.generation, superseded)

    def recorded_by(self, session: "MemorySession") -> frozenset[int]:
        """The leases that a session owns."""
        return frozenset(
            lease_id for lease_id, entry in self._state.leases.items() if entry.session is session
        )

    def drop_leases(self, session: "MemorySession", lease_ids: Sequence[int] | None) -> None:
        """Removes those of the leases, or all, that the session owns."""
        state = self._state
        candidates = tuple(state.leases) if lease_ids is None else lease_ids
        gone: list[Change[LeaseRecord]] = []
        for lease_id in candidates:
            entry = state.leases.get(lease_id)
            if entry is None or entry.session is not session:
                continue
            del state.leases[lease_id]
            leaf = conversation_key(entry.record.tenant, entry.record.conversation_key)
            if state.leaves.get(leaf) == lease_id:
                del state.leaves[leaf]
            gone.append(Change(entry.record, gone=True))
        if gone:
            state.revision += 1
            self._lease_feed.publish(tuple(gone))

    def drop_engine(self, session: "MemorySession", engine_id: str) -> None:
        """Removes the engine's registration if the session still owns it."""
        if self.owns(session, engine_id):
            del self._state.owners[engine_id]
            engine = self._state.engines.pop(engine_id)
            self._state.revision += 1
            self._engine_feed.publish((Change(engine, gone=True),))


class MemorySession:
    """A `Session` of a `MemoryStore`."""

    def __init__(self, store: MemoryStore, engine_id: str, ttl_s: float) -> None:
        self._store = store
        self._engine_id = engine_id
        self._ttl_s = ttl_s
        self._ended = False
        self._timer = asyncio.get_running_loop().call_later(ttl_s, self.revoke)

    async def renew(self) -> bool:
        """Keeps the session for another time to live. False when it is over."""
        if not self._lives():
            return False
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(self._ttl_s, self.revoke)
        return True

    async def put_engine(self, engine: Engine) -> None:
        """Replaces the registration, for a new epoch of the same engine process."""
        if engine.holder.engine_id != self._engine_id:
            raise InvalidArgument("a session registers one engine")
        self._check()
        self._store.commit_engine(engine)

    async def record_lease(self, record: LeaseRecord, supersedes: int) -> Recorded:
        """Records a confirmed lease and makes it its conversation's only one."""
        self._check()
        return self._store.commit_lease(self, record, supersedes)

    async def remove_leases(self, lease_ids: Sequence[int]) -> None:
        """Removes records that the session owns."""
        self._check()
        self._store.drop_leases(self, lease_ids)

    async def list_recorded(self) -> frozenset[int]:
        """Leases whose records the store has in this session."""
        self._check()
        return self._store.recorded_by(self)

    async def end(self) -> None:
        """Removes the registration and every record of the session in one event."""
        self.revoke()

    def _lives(self) -> bool:
        return not self._ended and self._store.owns(self, self._engine_id)

    def _check(self) -> None:
        if not self._lives():
            raise StoreUnavailable(f"the session of engine {self._engine_id} is over")

    def revoke(self) -> None:
        """Ends the session from the store's side, in one event. Idempotent."""
        if not self._ended:
            self._ended = True
            self._timer.cancel()
            self._store.drop_leases(self, None)
            self._store.drop_engine(self, self._engine_id)
