"""The store ends up with what an engine holds, whatever the store does in between."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from kvlease.core.errors import EngineIdReused
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState
from kvlease.core.records import Engine, EngineRole, KvLayout, LeaseRecord
from kvlease.runtime.clock import LoopClock
from kvlease.sidecar.recorder import EngineRecorder, RecorderTimes
from kvlease.store.memory import MemorySession, MemoryStore
from kvlease.store.port import Recorded
from kvlease.testing.store import BreakableStore

TIMES = RecorderTimes(ttl_s=1.0, call_s=0.3, retry_s=0.01, reconcile_s=0.05)


def engine(boot_id: str = "boot-1") -> Engine:
    layout = KvLayout(32, "float32", 1, 1, 4096, "layout")
    return Engine(Holder("e", boot_id), EngineRole.DECODE, "m", "http://d", "d:1", layout)


def lease(lease_id: int, conversation: bytes = b"c") -> LeaseRecord:
    kind, state = LeaseKind.CONVERSATION, LeaseState.HELD
    return LeaseRecord(lease_id, kind, state, Holder("e", "boot-1"), "t", conversation, 64)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class Bench:
    memory: MemoryStore = field(default_factory=MemoryStore)
    superseded: list[int] = field(default_factory=list)
    refusals: list[EngineIdReused] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = BreakableStore(self.memory)
        self.leases: dict[int, LeaseRecord] = {}
        self.engines: dict[str, Engine] = {}

    def recorder(self, registered: Engine) -> EngineRecorder:
        return EngineRecorder(
            self.store, registered, TIMES, LoopClock(), self._supersede, self.refusals.append
        )

    async def _supersede(self, record: LeaseRecord) -> None:
        self.superseded.append(record.lease_id)

    async def watch(self) -> None:
        async def leases() -> None:
            async with self.memory.watch_leases() as batches:
                async for batch in batches:
                    for change in batch.changes:
                        self.leases[change.item.lease_id] = change.item
                        if change.gone:
                            del self.leases[change.item.lease_id]

        async def engines() -> None:
            async with self.memory.watch_engines() as batches:
                async for batch in batches:
                    for change in batch.changes:
                        self.engines[change.item.holder.engine_id] = change.item
                        if change.gone:
                            del self.engines[change.item.holder.engine_id]

        async with asyncio.TaskGroup() as group:
            group.create_task(leases())
            group.create_task(engines())


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    watching = asyncio.create_task(bench.watch())
    yield bench
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching


@pytest.fixture
async def running(bench: Bench) -> AsyncIterator[EngineRecorder]:
    recorder = bench.recorder(engine())
    await recorder.open()
    task = asyncio.create_task(recorder.run())
    yield recorder
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_session_that_ran_out_while_the_store_was_down_is_made_whole(
    bench: Bench, running: EngineRecorder
) -> None:
    running.put(lease(1, b"a"), 0)
    running.put(lease(2, b"b"), 0)
    await until(lambda: set(bench.leases) == {1, 2})
    bench.store.broken = True
    await until(lambda: not bench.engines)
    running.remove(2)
    running.put(lease(3, b"c"), 0)
    bench.store.broken = False
    await until(lambda: set(bench.leases) == {1, 3})
    assert set(bench.engines) == {"e"}


async def test_a_session_outlives_many_times_its_time_to_live(bench: Bench, running: EngineRecorder) -> None:
    running.put(lease(1), 0)
    await until(lambda: set(bench.leases) == {1})
    generation = bench.leases[1].generation
    await asyncio.sleep(3 * TIMES.ttl_s)
    assert bench.leases[1].generation == generation


async def test_a_lease_put_and_removed_while_the_store_was_down_is_never_recorded(
    bench: Bench, running: EngineRecorder
) -> None:
    bench.store.broken = True
    running.put(lease(1, b"a"), 0)
    running.remove(1)
    running.put(lease(2, b"b"), 0)
    bench.store.broken = False
    await until(lambda: set(bench.leases) == {2})


async def test_what_a_record_replaced_is_superseded_at_its_holder(
    bench: Bench, running: EngineRecorder
) -> None:
    running.put(lease(1), 0)
    await until(lambda: set(bench.leases) == {1})
    running.put(lease(2), 1)
    await until(lambda: bench.superseded == [1])


async def test_a_lease_that_comes_after_its_successor_is_superseded_itself(
    bench: Bench, running: EngineRecorder
) -> None:
    running.put(lease(2), 1)
    await until(lambda: set(bench.leases) == {2})
    running.put(lease(1), 0)
    await until(lambda: bench.superseded == [1])
    assert set(bench.leases) == {2}


async def test_an_engine_id_found_reused_once_the_store_is_back_is_refused(bench: Bench) -> None:
    first = await bench.memory.open_session(engine("boot-0"), 60.0)
    await first.end()
    recorder = bench.recorder(engine("boot-1"))
    bench.store.broken = True
    await recorder.open()
    task = asyncio.create_task(recorder.run())
    bench.store.broken = False
    await asyncio.wait_for(task, 20)
    assert len(bench.refusals) == 1
    assert not bench.engines


async def test_a_record_that_the_store_cannot_take_keeps_no_other_from_being_written(
    bench: Bench, running: EngineRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    record_lease = MemorySession.record_lease

    async def failing(session: MemorySession, record: LeaseRecord, supersedes: int) -> Recorded:
        if record.lease_id == 1:
            raise RuntimeError("a bug of the store")
        return await record_lease(session, record, supersedes)

    with monkeypatch.context() as patched:
        patched.setattr(MemorySession, "record_lease", failing)
        running.put(lease(1, b"a"), 0)
        running.put(lease(2, b"b"), 0)
        await until(lambda: set(bench.leases) == {2})
    await until(lambda: set(bench.leases) == {1, 2})


async def test_records_that_others_made_or_removed_in_the_session_are_put_right(
    bench: Bench, running: EngineRecorder
) -> None:
    running.put(lease(1, b"a"), 0)
    await until(lambda: set(bench.leases) == {1})
    generation = bench.leases[1].generation
    session = running._session
    assert session is not None
    await session.record_lease(lease(7, b"ghost"), 0)
    await session.remove_leases((1,))
    await until(lambda: set(bench.leases) == {1} and bench.leases[1].generation > generation)
