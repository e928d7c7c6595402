"""What the processes ask of a store. Implementations pass one contract suite (`tests/contract`).

A store remembers, it never decides: losing all of it costs reuse, never a right answer. Whatever a sidecar
writes for an engine belongs to one session, so that it vanishes in one event: when the session ends, or when
it was not renewed for its time to live.

Every method may raise `StoreUnavailable`, and answers within the implementation's deadline.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from kvlease.core.records import Engine, LeaseRecord

Item = TypeVar("Item", Engine, LeaseRecord)

PREDECESSORS_MAX = 8
"""Superseded leases that a conversation remembers, so that one that comes late supersedes nothing."""

WATCH_QUEUE_MAX = 1024
"""Batches that wait for one watcher; a slower one gets a fresh snapshot instead."""


class StoreKind(Enum):
    """Which store a process uses."""

    MEMORY = "memory"
    ETCD = "etcd"


@dataclass(frozen=True, slots=True)
class Change(Generic[Item]):
    """An engine or lease as it is, or, when `gone`, as it was last."""

    item: Item
    gone: bool = False


@dataclass(frozen=True, slots=True)
class Batch(Generic[Item]):
    """What one transaction changed. A snapshot replaces all that the watcher knew."""

    changes: tuple[Change[Item], ...]
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class Recorded:
    """What became of a lease that was to be recorded.

    Attributes:
        generation: revision of the transaction that first recorded the lease; 0 when nothing was recorded,
            because a later turn of the conversation, which supersedes this lease, stands already.
        superseded: the conversation's lease that it replaced in the same transaction.
    """

    generation: int
    superseded: LeaseRecord | None = None


class Session(Protocol):
    """One engine's registration and everything recorded with it.

    Calls on a session that ended, or whose engine was registered by another session since, raise
    `StoreUnavailable`; `renew` says so without raising.
    """

    async def renew(self) -> bool:
        """Keeps the session for another time to live. False when it is over: open another one."""
        ...

    async def put_engine(self, engine: Engine) -> None:
        """Replaces the registration, for a new epoch of the same engine process."""
        ...

    async def record_lease(self, record: LeaseRecord, supersedes: int) -> Recorded:
        """Records a confirmed lease and makes it its conversation's only one, in one transaction.

        The last finished turn wins, whatever stood before; `supersedes` (0: none) is the lease that this one
        knows as its predecessor. One of the last `PREDECESSORS_MAX` predecessors of the lease that stands comes
        late, and is not recorded. Recording a lease again keeps its generation.
        """
        ...

    async def remove_leases(self, lease_ids: Sequence[int]) -> None:
        """Removes records that the session owns; what it does not own stays as it is."""
        ...

    async def list_recorded(self) -> frozenset[int]:
        """Leases whose records the store has in this session, whoever wrote or removed some meanwhile.

        `remove_leases` removes any of them.
        """
        ...

    async def end(self) -> None:
        """Removes the registration and every record of the session in one event. Idempotent."""
        ...


class Store(Protocol):
    """Engines and leases, for any number of sidecars and registries."""

    async def open_session(self, engine: Engine, ttl_s: float) -> Session:
        """Registers an engine, and ends what an earlier sidecar opened for the same engine process.

        Raises:
            EngineIdReused: the engine id was seen under another boot id; that memory outlives sessions.
        """
        ...

    async def get_engine(self, engine_id: str) -> Engine | None:
        """The engine that is registered under an id."""
        ...

    async def list_engines(self) -> tuple[Engine, ...]:
        """Every registered engine."""
        ...

    async def get_lease(self, lease_id: int) -> LeaseRecord | None:
        """The record of a lease."""
        ...

    async def list_leases(self, engine_id: str = "", tenant: str = "") -> tuple[LeaseRecord, ...]:
        """Every recorded lease of an engine and of a tenant; empty: of any."""
        ...

    def watch_engines(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[Engine]]]:
        """First a snapshot, then every change, until the context is left."""
        ...

    def watch_leases(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[LeaseRecord]]]:
        """First a snapshot, then every change, until the context is left."""
        ...


def predecessors_of(
    lease_id: int, supersedes: int, standing_id: int, before: tuple[int, ...]
) -> tuple[int, ...]:
    """What a lease comes after, the latest first.

    Args:
        supersedes: the lease that it knows as its predecessor; 0: none.
        standing_id: the lease that stands for its conversation; 0: none.
        before: that one's own predecessors.
    """
    unique = dict.fromkeys((supersedes, standing_id, *before))
    return tuple(earlier for earlier in unique if earlier not in (0, lease_id))[:PREDECESSORS_MAX]
