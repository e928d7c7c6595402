"""The store over three members, one of which dies or stops."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.dev.engine_process import free_ports
from kvlease.store.etcd import EtcdStore
from kvlease.store.etcd_client import EtcdOptions
from kvlease.store.etcd_watch import WatchTimes
from stubs.etcd import etcdctl, stop_threads
from stubs.records import engine, lease

BOUND_S = 60.0


@pytest.fixture
async def members() -> AsyncIterator[list[EmbeddedEtcd]]:
    """Three members, the leader first."""
    peers = [f"http://127.0.0.1:{port}" for port in free_ports(3)]
    cluster = ",".join(f"m{number}={peer}" for number, peer in enumerate(peers))
    members = [
        EmbeddedEtcd(
            (
                *("--name", f"m{number}", "--initial-cluster", cluster),
                *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                # Members share the machine with everything else.
                *("--heartbeat-interval", "100", "--election-timeout", "1000"),
            )
        )
        for number, peer in enumerate(peers)
    ]
    async with AsyncExitStack() as stack:
        for member in members:
            stack.push_async_callback(member.stop)
        await asyncio.gather(*(member.start() for member in members))
        statuses = [(await etcdctl(member, "endpoint", "status"))[0]["Status"] for member in members]
        leads = [status["leader"] == status["header"]["member_id"] for status in statuses]
        yield [member for _, member in sorted(zip(leads, members, strict=True), key=lambda pair: not pair[0])]


@pytest.mark.parametrize("loss", ["killed", "stopped"])
async def test_two_members_go_on_without_the_leader(members: list[EmbeddedEtcd], loss: str) -> None:
    endpoints = tuple(member.endpoint for member in members)
    times = WatchTimes(idle_s=0.5, answer_s=1.0, retry_s=0.1)
    store = EtcdStore(EtcdOptions(endpoints, call_s=20.0, accept_old=True), watch_times=times)
    session = await store.open_session(engine(), 600.0)
    await session.record_lease(lease(1, b"1"), 0)
    async with asyncio.timeout(BOUND_S), store.watch_leases() as batches:
        assert [change.item.lease_id for change in (await anext(batches)).changes] == [1]
        if loss == "killed":
            await members[0].halt(signal.SIGKILL)
        else:
            await stop_threads(members[0])
        assert (await session.record_lease(lease(2, b"2"), 0)).generation > 0
        assert await session.renew()
        assert [change.item.lease_id for change in (await anext(batches)).changes] == [2]
        if loss == "stopped":
            os.kill(members[0].pid, signal.SIGCONT)
        assert sorted(record.lease_id for record in await store.list_leases()) == [1, 2]
    await store.close()
