"""What every store promises. The one in etcd runs over a real etcd."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from kvlease.core.errors import EngineIdReused, StoreUnavailable
from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.store.etcd import EtcdStore
from kvlease.store.memory import MemoryStore
from kvlease.store.port import Batch, Change, Store
from stubs.etcd import options_of, remove_everything
from stubs.records import engine, lease

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG_S = 600.0
SHORT_S = 4.0
"""Two leases are recorded within it."""
QUEUE_MAX = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def etcd() -> AsyncIterator[EmbeddedEtcd]:
    etcd = EmbeddedEtcd()
    await etcd.start()
    yield etcd
    await etcd.stop()


@pytest_asyncio.fixture(params=("memory", "etcd"), loop_scope="module")
async def store(request: pytest.FixtureRequest, etcd: EmbeddedEtcd) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore(QUEUE_MAX)
        return
    options = options_of(etcd)
    await remove_everything(options)
    store = EtcdStore(options, QUEUE_MAX)
    yield store
    await store.close()


async def next_batch(batches: AsyncIterator[Batch]) -> Batch:  # type: ignore[type-arg]
    return await asyncio.wait_for(anext(batches), 30)


async def test_a_registered_engine_is_found_and_its_end_removes_it(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    assert await store.get_engine("engine-1") == engine()
    assert await store.list_engines() == (engine(),)
    await session.end()
    await session.end()
    assert await store.get_engine("engine-1") is None
    assert await store.list_engines() == ()


async def test_an_engine_id_under_another_boot_id_is_refused_even_after_its_session_ended(
    store: Store,
) -> None:
    session = await store.open_session(engine(), LONG_S)
    with pytest.raises(EngineIdReused):
        await store.open_session(engine(boot_id="boot-2"), LONG_S)
    await session.end()
    with pytest.raises(EngineIdReused, match="leave `engine_id` out"):
        await store.open_session(engine(boot_id="boot-2"), LONG_S)


async def test_a_session_that_is_not_renewed_vanishes_with_everything_in_it(store: Store) -> None:
    session = await store.open_session(engine(), SHORT_S)
    await session.record_lease(lease(1, b"a"), 0)
    await session.record_lease(lease(2, b"b"), 0)
    async with store.watch_leases() as batches:
        assert len((await next_batch(batches)).changes) == 2
        gone = await next_batch(batches)
    assert {change.item.lease_id for change in gone.changes if change.gone} == {1, 2}
    assert await store.get_engine("engine-1") is None
    assert not await session.renew()
    with pytest.raises(StoreUnavailable):
        await session.record_lease(lease(3), 0)


async def test_a_renewed_session_stays(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    assert await session.renew()
    assert await store.get_engine("engine-1") == engine()


async def test_a_later_session_of_the_same_engine_takes_over(store: Store) -> None:
    first = await store.open_session(engine(), LONG_S)
    await first.record_lease(lease(1, b"a"), 0)
    await first.record_lease(lease(2, b"b"), 0)
    second = await store.open_session(engine(), LONG_S)
    await second.record_lease(lease(1, b"a"), 0)
    assert not await first.renew()
    with pytest.raises(StoreUnavailable):
        await first.remove_leases((1,))
    await first.end()
    assert await store.get_engine("engine-1") == engine()
    assert [record.lease_id for record in await store.list_leases()] == [1]


async def test_the_next_epoch_replaces_the_registration(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    await session.put_engine(engine(epoch=1))
    assert await store.list_engines() == (engine(epoch=1),)


async def test_generations_only_grow_and_recording_again_keeps_them(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    first = await session.record_lease(lease(1, b"a"), 0)
    second = await session.record_lease(lease(2, b"b"), 0)
    again = await session.record_lease(replace(lease(1, b"a"), tokens=96), 0)
    assert 0 < first.generation < second.generation
    assert again.generation == first.generation
    stored = await store.get_lease(1)
    assert stored is not None
    assert (stored.tokens, stored.generation) == (96, first.generation)


async def test_a_generation_survives_neither_the_lease_nor_goes_back(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    before = await session.record_lease(lease(1), 0)
    await session.end()
    session = await store.open_session(engine(), LONG_S)
    after = await session.record_lease(lease(1), 0)
    assert after.generation > before.generation


async def test_the_last_finished_turn_supersedes_whatever_stood(store: Store) -> None:
    decode = await store.open_session(engine(), LONG_S)
    other = await store.open_session(engine("engine-2"), LONG_S)
    await decode.record_lease(lease(1), 0)
    recorded = await other.record_lease(lease(2, engine_id="engine-2"), 0)
    assert recorded.superseded is not None
    assert recorded.superseded.lease_id == 1
    assert [record.lease_id for record in await store.list_leases()] == [2]


async def test_a_late_record_of_a_superseded_turn_changes_nothing(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    await session.record_lease(lease(2), 1)
    late = await session.record_lease(lease(1), 0)
    assert late.generation == 0
    assert [record.lease_id for record in await store.list_leases()] == [2]


async def test_a_turn_that_comes_late_by_several_supersedes_nothing(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    for lease_id in (1, 2, 3, 4):
        await session.record_lease(lease(lease_id), lease_id - 1)
    assert (await session.record_lease(lease(2), 1)).generation == 0
    again = await session.record_lease(lease(4), 3)
    assert (again.generation > 0, again.superseded) == (True, None)
    assert [record.lease_id for record in await store.list_leases()] == [4]


async def test_conversations_of_two_tenants_never_meet(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    await session.record_lease(lease(1, b"c", tenant="a"), 0)
    recorded = await session.record_lease(lease(2, b"c", tenant="b"), 0)
    assert recorded.superseded is None
    assert [record.lease_id for record in await store.list_leases(tenant="a")] == [1]
    assert [record.lease_id for record in await store.list_leases(engine_id="engine-1", tenant="b")] == [2]
    assert await store.list_leases(engine_id="engine-2") == ()


async def test_leases_without_a_conversation_do_not_supersede_each_other(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    await session.record_lease(lease(1, b""), 0)
    assert (await session.record_lease(lease(2, b""), 0)).superseded is None
    assert len(await store.list_leases()) == 2


async def test_a_removed_lease_frees_its_conversation(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    await session.record_lease(lease(1), 0)
    await session.remove_leases((1, 7))
    await session.remove_leases((1,))
    assert await store.get_lease(1) is None
    assert (await session.record_lease(lease(2), 0)).superseded is None


async def test_a_watcher_sees_a_snapshot_and_then_each_change(store: Store) -> None:
    first = await store.open_session(engine(), LONG_S)
    async with store.watch_engines() as batches:
        assert await next_batch(batches) == Batch((Change(engine()),), snapshot=True)
        await store.open_session(engine("engine-2"), LONG_S)
        await first.end()
        assert await next_batch(batches) == Batch((Change(engine("engine-2")),))
        assert await next_batch(batches) == Batch((Change(engine(), gone=True),))


async def test_a_supersede_is_one_change_for_watchers(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    await session.record_lease(lease(1), 0)
    async with store.watch_leases() as batches:
        assert (await next_batch(batches)).snapshot
        await session.record_lease(lease(2), 1)
        changes = (await next_batch(batches)).changes
    assert {(change.item.lease_id, change.gone) for change in changes} == {(2, False), (1, True)}


async def test_an_empty_store_begins_with_an_empty_snapshot(store: Store) -> None:
    async with store.watch_leases() as batches:
        assert await next_batch(batches) == Batch((), snapshot=True)


async def test_a_slow_watcher_gets_a_fresh_snapshot(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    async with store.watch_leases() as batches:
        assert (await next_batch(batches)).snapshot
        last = 100
        for lease_id in range(1, last + 1):
            await session.record_lease(lease(lease_id), lease_id - 1)
        known: set[int] = set()
        snapshots = 0
        while not snapshots or known != {last}:
            batch = await next_batch(batches)
            snapshots += batch.snapshot
            known = set() if batch.snapshot else known
            known |= {change.item.lease_id for change in batch.changes if not change.gone}
            known -= {change.item.lease_id for change in batch.changes if change.gone}


async def test_turns_that_finish_at_once_on_several_engines_leave_one_lease(store: Store) -> None:
    engines = [f"engine-{number}" for number in range(8)]
    sessions = [await store.open_session(engine(engine_id), LONG_S) for engine_id in engines]
    recorded = await asyncio.gather(
        *(
            session.record_lease(lease(number + 1, engine_id=engine_id), 0)
            for number, (session, engine_id) in enumerate(zip(sessions, engines, strict=True))
        )
    )
    superseded = {one.superseded.lease_id for one in recorded if one.superseded is not None}
    (left,) = await store.list_leases()
    assert superseded | {left.lease_id} == set(range(1, 9))
    assert left.lease_id not in superseded


async def test_removing_many_leases_leaves_the_others(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    for lease_id in range(1, 131):
        await session.record_lease(lease(lease_id, str(lease_id).encode()), 0)
    await session.remove_leases(range(1, 130))
    assert [record.lease_id for record in await store.list_leases()] == [130]
    assert (await session.record_lease(lease(200, b"7"), 0)).superseded is None
    assert (await session.record_lease(lease(201, b"130"), 0)).superseded is not None


async def test_a_session_lists_what_is_recorded_in_it_and_removes_any_of_it(store: Store) -> None:
    session = await store.open_session(engine(), LONG_S)
    other = await store.open_session(engine("engine-2"), LONG_S)
    for lease_id in (1, 2, 3):
        await session.record_lease(lease(lease_id, b"%d" % lease_id), 0)
    await other.record_lease(lease(4, b"4"), 0)
    await session.remove_leases((2,))
    assert await session.list_recorded() == {1, 3}
    await session.remove_leases((1, 3))
    assert await session.list_recorded() == frozenset()
    assert await other.list_recorded() == {4}
    await session.end()
    with pytest.raises(StoreUnavailable):
        await session.list_recorded()
