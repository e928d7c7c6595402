"""What the store in etcd survives: a real etcd that restarts, stops, compacts, revokes and runs out of space."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from kvlease.core.errors import StoreUnavailable
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState
from kvlease.core.records import Engine, LeaseRecord
from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.dev.engine_process import free_ports
from kvlease.runtime.clock import LoopClock
from kvlease.sidecar.recorder import EngineRecorder, RecorderTimes
from kvlease.store.etcd import EtcdStore
from kvlease.store.etcd_client import VERSION_MIN, EtcdClient, EtcdOptions
from kvlease.store.etcd_values import lease_value
from kvlease.store.etcd_watch import WatchTimes
from kvlease.store.keys import LEASES, lease_key
from kvlease.store.port import Batch
from stubs.etcd import etcdctl, options_of, put_many, remove_everything, stop_threads
from stubs.proxy import Proxy
from stubs.records import engine, lease

LONG_S = 600.0
BOUND_S = 30.0
QUICK = WatchTimes(idle_s=0.2, answer_s=0.3, retry_s=0.05)
Result = TypeVar("Result")


@asynccontextmanager
async def running_etcd(*arguments: str, port: int = 0) -> AsyncIterator[EmbeddedEtcd]:
    etcd = EmbeddedEtcd(arguments)
    if port:
        etcd.endpoint = f"127.0.0.1:{port}"
    await etcd.start()
    try:
        yield etcd
    finally:
        await etcd.stop()


@asynccontextmanager
async def store_over(options: EtcdOptions, times: WatchTimes = QUICK) -> AsyncIterator[EtcdStore]:
    store = EtcdStore(options, watch_times=times)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def proxy_to(etcd: EmbeddedEtcd) -> AsyncIterator[Proxy]:
    proxy = Proxy(etcd.endpoint)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()


async def healed(call: Callable[[], Awaitable[Result]]) -> Result:
    """What a call answers once the store is there again."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                return await call()
            except StoreUnavailable:
                await asyncio.sleep(0.05)


class Watcher:
    """What a watch of leases has told so far."""

    def __init__(self, batches: AsyncIterator[Batch[LeaseRecord]]) -> None:
        self._batches = batches
        self.known: set[int] = set()
        self.sizes: list[int] = []

    async def until(self, known: set[int]) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.known != known:
                batch = await anext(self._batches)
                self.sizes.append(len(batch.changes))
                if batch.snapshot:
                    self.known.clear()
                for change in batch.changes:
                    (self.known.discard if change.gone else self.known.add)(change.item.lease_id)


async def test_sessions_records_and_watches_live_through_restarts() -> None:
    async with running_etcd() as etcd, store_over(options_of(etcd)) as store:
        session = await store.open_session(engine(), LONG_S)
        async with store.watch_leases() as batches:
            watcher = Watcher(batches)
            for round_number in range(1, 5):
                await etcd.halt(signal.SIGKILL)
                with pytest.raises(StoreUnavailable):
                    await session.record_lease(lease(round_number, b"%d" % round_number), 0)
                await etcd.start()
                record = lease(round_number, b"%d" % round_number)
                assert (await healed(lambda record=record: session.record_lease(record, 0))).generation > 0
                await watcher.until(set(range(1, round_number + 1)))
        assert await healed(session.renew)
        assert {record.lease_id for record in await store.list_leases()} == {1, 2, 3, 4}


async def test_a_stopped_etcd_costs_calls_their_deadline_and_the_watch_goes_on_after_it() -> None:
    async with running_etcd() as etcd, store_over(options_of(etcd)) as patient:
        session = await patient.open_session(engine(), LONG_S)
        async with store_over(options_of(etcd, call_s=0.5)) as store, store.watch_leases() as batches:
            watcher = Watcher(batches)
            assert await healed(lambda: store.get_engine("engine-1")) == engine()
            await stop_threads(etcd)
            async with asyncio.timeout(40 * 0.5):
                with pytest.raises(StoreUnavailable, match="DEADLINE_EXCEEDED"):
                    await store.get_engine("engine-1")
            os.kill(etcd.pid, signal.SIGCONT)
            await session.record_lease(lease(1), 0)
            await watcher.until({1})
            assert await healed(lambda: store.get_engine("engine-1")) == engine()


async def test_whoever_watches_before_etcd_is_there_gets_a_snapshot_when_it_comes() -> None:
    (port,) = free_ports(1)
    absent = EtcdOptions((f"127.0.0.1:{port}",), accept_old=True)
    async with store_over(absent) as store:
        with pytest.raises(StoreUnavailable):
            await store.list_engines()

        async def first() -> Batch[Engine]:
            async with store.watch_engines() as batches:
                return await anext(batches)

        waiting = asyncio.create_task(first())
        async with running_etcd(port=port):
            assert await asyncio.wait_for(waiting, BOUND_S) == Batch((), snapshot=True)


async def test_a_silent_endpoint_is_left_for_the_next_within_one_deadline() -> None:
    async with running_etcd() as etcd, proxy_to(etcd) as proxy:
        endpoints = (proxy.address, etcd.endpoint)
        async with store_over(options_of(etcd, endpoints=endpoints, call_s=2.0)) as store:
            session = await store.open_session(engine(), LONG_S)
            async with store.watch_leases() as batches:
                watcher = Watcher(batches)
                proxy.stall()
                await session.record_lease(lease(1), 0)
                await watcher.until({1})


@pytest.mark.parametrize("broken", ["cut", "stalled"])
async def test_a_watch_learns_by_comparison_what_was_compacted_while_it_was_away(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="kvlease.store")
    async with running_etcd() as etcd, proxy_to(etcd) as proxy, store_over(options_of(etcd)) as direct:
        session = await direct.open_session(engine(), LONG_S)
        for lease_id in (1, 2, 3):
            await session.record_lease(lease(lease_id, b"%d" % lease_id), 0)
        async with (
            store_over(options_of(etcd, endpoints=(proxy.address,), call_s=1.0)) as store,
            store.watch_leases() as batches,
        ):
            watcher = Watcher(batches)
            await watcher.until({1, 2, 3})
            if broken == "cut":
                proxy.cut()
            else:
                proxy.stall()
            await session.remove_leases((1,))
            await session.record_lease(lease(4, b"4"), 0)
            status = await etcdctl(etcd, "endpoint", "status")
            await etcdctl(etcd, "compaction", str(status[0]["Status"]["header"]["revision"]))
            if broken == "stalled":
                proxy.cut()
            proxy.heal()
            await watcher.until({2, 3, 4})
    assert "begins anew" in caplog.text


@pytest.mark.parametrize("loss", ["revoked", "deleted"])
async def test_a_session_that_was_lost_is_opened_again_with_all_records(loss: str) -> None:
    def refuse(error: Exception) -> None:
        raise error

    async def supersede(record: LeaseRecord) -> None:
        raise AssertionError(f"{record.lease_id} was superseded")

    async with running_etcd() as etcd, store_over(options_of(etcd)) as store:
        times = RecorderTimes(ttl_s=6.0, call_s=10.0, retry_s=0.05)
        recorder = EngineRecorder(store, engine(), times, LoopClock(), supersede, refuse)
        await recorder.open()
        recorder.put(lease(1), 0)
        running = asyncio.create_task(recorder.run())
        try:
            before = await recorded(store, after=0)
            if loss == "revoked":
                (attached,) = (await etcdctl(etcd, "get", lease_key(1)))["kvs"]
                await etcdctl(etcd, "lease", "revoke", f"{attached['lease']:x}")
            else:
                await remove_everything(options_of(etcd))
            assert await recorded(store, after=before) > before
            assert await store.get_engine("engine-1") == engine()
        finally:
            running.cancel()
            await asyncio.wait((running,))


async def recorded(store: EtcdStore, after: int) -> int:
    """The generation of lease 1, once it is above `after`."""
    async with asyncio.timeout(BOUND_S):
        while True:
            record = await store.get_lease(1)
            if record is not None and record.generation > after:
                return record.generation
            await asyncio.sleep(0.01)


async def test_a_thousand_records_are_purged_within_etcds_limits_of_a_transaction() -> None:
    async with running_etcd() as etcd, store_over(options_of(etcd)) as store:
        session = await store.open_session(engine(), LONG_S)
        for start in range(1, 1001, 50):
            batch = [lease(lease_id, str(lease_id).encode()) for lease_id in range(start, start + 50)]
            await asyncio.gather(*(session.record_lease(record, 0) for record in batch))
        assert len(await store.list_leases()) == 1000
        await session.remove_leases(range(1, 1001))
        assert await store.list_leases() == ()
        assert (await etcdctl(etcd, "get", "--prefix", "/kvlease/v1/conversations/")).get("count", 0) == 0


async def test_a_burst_of_deletions_in_one_revision_is_one_batch() -> None:
    count = 15_000  # more than one page of a snapshot, and a message of 690 kB
    async with running_etcd() as etcd, store_over(options_of(etcd), WatchTimes()) as store:
        client = EtcdClient(options_of(etcd))
        granted = await client.grant(600)
        records = {lease_key(lease_id): lease_value(lease(lease_id)) for lease_id in range(1, count + 1)}
        await put_many(client, records, granted)
        async with store.watch_leases() as batches:
            watcher = Watcher(batches)
            await watcher.until(set(range(1, count + 1)))
            await client.revoke(granted)
            await watcher.until(set())
        await client.close()
    assert watcher.sizes == [count, count]


async def fill(client: EtcdClient, granted: int) -> None:
    """Writes until etcd refuses; it looks at its size only every 100 ms."""
    async with asyncio.timeout(BOUND_S):
        while True:
            await put_many(client, {f"/ballast/{number}": bytes(1_000) for number in range(1000)}, granted)


async def test_an_etcd_without_space_refuses_to_record_says_so_and_recovers() -> None:
    async with (
        running_etcd("--quota-backend-bytes", str(1 << 20)) as etcd,
        store_over(options_of(etcd)) as store,
    ):
        session = await store.open_session(engine(), LONG_S)
        await session.record_lease(lease(1), 0)
        client = EtcdClient(options_of(etcd))
        granted = await client.grant(600)
        with pytest.raises(StoreUnavailable, match="space exceeded"):
            await fill(client, granted)
        async with asyncio.timeout(BOUND_S):  # etcd raises the alarm a moment after its first refusal
            while not (await etcdctl(etcd, "alarm", "list")).get("alarms"):
                pass
        with pytest.raises(StoreUnavailable, match="space exceeded"):
            await session.record_lease(lease(2, b"other"), 0)
        assert [record.lease_id for record in await store.list_leases()] == [1]
        assert await session.renew()
        await client.revoke(granted)
        await client.close()
        status = await etcdctl(etcd, "endpoint", "status")
        await etcdctl(etcd, "compaction", "--physical", str(status[0]["Status"]["header"]["revision"]))
        await etcdctl(etcd, "defrag")
        await etcdctl(etcd, "alarm", "disarm")
        await session.remove_leases((1,))
        assert (await session.record_lease(lease(3), 0)).superseded is None


async def test_a_token_that_etcd_no_longer_knows_is_replaced(tmp_path: Path) -> None:
    async with running_etcd() as etcd:
        password = tmp_path / "password"
        password.write_text("secret\n")
        await etcdctl(etcd, "role", "add", "kvlease")
        await etcdctl(
            etcd, "role", "grant-permission", "kvlease", "--prefix=true", "readwrite", "/kvlease/v1/"
        )
        for user, role in (("root", "root"), ("kvlease", "kvlease")):
            await etcdctl(etcd, "user", "add", f"{user}:secret")
            await etcdctl(etcd, "user", "grant-role", user, role)
        await etcdctl(etcd, "auth", "enable")
        async with store_over(options_of(etcd)) as stranger:
            with pytest.raises(StoreUnavailable, match="user name is empty"):
                await stranger.list_engines()
        options = options_of(etcd, user="kvlease", password_file=str(password))
        async with store_over(options) as store, store.watch_leases() as batches:
            session = await store.open_session(engine(), LONG_S)
            await etcd.halt(signal.SIGTERM)
            await etcd.start()
            assert await healed(session.renew)
            assert (await healed(lambda: session.record_lease(lease(1), 0))).generation > 0
            await Watcher(batches).until({1})
            await session.remove_leases((1,))
            await session.end()
            assert await store.list_engines() == ()


async def test_a_lease_that_ended_is_told_by_its_renewal() -> None:
    async with running_etcd() as etcd, store_over(options_of(etcd)) as store:
        session = await store.open_session(engine(), LONG_S)
        assert await session.renew()
        leases = await etcdctl(etcd, "lease", "list")
        for one in leases["leases"]:
            await etcdctl(etcd, "lease", "revoke", f"{one['id']:x}")
        assert not await session.renew()
        with pytest.raises(StoreUnavailable, match="is over"):
            await session.record_lease(lease(1), 0)


async def test_two_hundred_watches_that_come_and_go_leave_no_descriptor_behind() -> None:
    async with running_etcd() as etcd, store_over(options_of(etcd)) as store:

        async def watch_once() -> None:
            async with store.watch_engines() as batches:
                await anext(batches)

        await watch_once()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(200):
            await watch_once()
        assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_server_in_which_renewals_can_lie_is_refused_unless_accepted() -> None:
    async with running_etcd() as etcd, store_over(options_of(etcd, accept_old=False)) as store:
        status = await etcdctl(etcd, "endpoint", "status")
        version = tuple(int(part) for part in status[0]["Status"]["version"].split("."))
        if version >= VERSION_MIN:
            assert await store.list_engines() == ()
        else:
            with pytest.raises(StoreUnavailable, match="older than"):
                await store.list_engines()


def test_the_record_of_a_long_conversation_stays_under_500_bytes() -> None:
    record = LeaseRecord(
        lease_id=(1 << 64) - 1,
        kind=LeaseKind.CONVERSATION,
        state=LeaseState.HELD,
        holder=Holder("0f8fad5b-d9cb-469f-a165-70867728950e", "7c9e6679-7425-40de-944b-e07fc1f90ae7", 9),
        tenant="f" * 32,
        conversation_key=bytes(range(16)),
        tokens=131_072,
        generation=1 << 40,
        exclusive_bytes=131_072 * 256 * 1024,
        model="organisation/model-of-a-long-name-70B-Instruct-FP8",
        lora="adapter-of-a-long-name",
        layout_hash="f" * 32,
        chain_keys=tuple((1 << 64) - 1 - number for number in range(16)),
    )
    assert len(lease_value(record)) < 500


async def test_records_that_somebody_deleted_come_back() -> None:
    async with running_etcd() as etcd, store_over(options_of(etcd)) as store:

        async def superseded(record: LeaseRecord) -> None:
            raise AssertionError(record)

        times = RecorderTimes(ttl_s=10.0, call_s=10.0, retry_s=0.05, reconcile_s=0.2)
        recorder = EngineRecorder(store, engine(), times, LoopClock(), superseded, lambda error: None)
        await recorder.open()
        running = asyncio.create_task(recorder.run())
        try:
            async with store.watch_leases() as batches:
                watcher = Watcher(batches)
                for lease_id in (1, 2):
                    recorder.put(lease(lease_id, b"%d" % lease_id), 0)
                await watcher.until({1, 2})
                await etcdctl(etcd, "del", "--prefix", LEASES)
                await watcher.until(set())
                await watcher.until({1, 2})
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
