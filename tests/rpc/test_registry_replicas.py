"""A router over several registries: any of them answers, and one that fails is left for the next."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import Pinned
from kvlease.core.renewal import Belief, RenewalPolicy, RenewalTable
from kvlease.registry.config import RegistryConfig
from kvlease.registry.server import RegistryServer
from kvlease.router.heartbeat import Heartbeat
from kvlease.router.registry_client import GrpcRegistry, Replicas
from kvlease.router.watch import follow
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.grpc_client import Channels
from kvlease.runtime.identity import Identity
from kvlease.store.port import Batch
from stubs.waiting import eventually

from .conftest import Fleet, make_ask, make_grant

POLICY = RenewalPolicy(interval_s=0.05, duration_s=20.0)


async def replica(fleet: Fleet) -> RegistryServer:
    config = RegistryConfig(listen="127.0.0.1:0", stop_grace_s=0.0, renewal_spacing_s=0.0, sidecar_call_s=5.0)
    server = RegistryServer(config, fleet.store, LoopClock())
    await server.start()
    fleet.stack.push_async_callback(server.stop)
    return server


@asynccontextmanager
async def client(*addresses: str, call_s: float = 5.0) -> AsyncIterator[GrpcRegistry]:
    channels = Channels(Identity.REGISTRY)
    try:
        yield GrpcRegistry(channels, addresses, "session", POLICY, call_s)
    finally:
        await channels.close()


@asynccontextmanager
async def running(*tasks: asyncio.Task[None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_heartbeats_pins_and_watches_go_on_at_another_replica_and_no_lease_is_lost(
    fleet: Fleet,
) -> None:
    first, second = await replica(fleet), await replica(fleet)
    connector = await fleet.connector(await fleet.sidecar())
    connector.grant(make_grant(7))
    table, clock, seen = RenewalTable(POLICY), LoopClock(), list[Batch[object]]()
    async with client(first.address, second.address) as registry:
        heartbeat = Heartbeat(table, registry, clock, POLICY.interval_s)
        table.expect(clock.now_s(), 7, "decode-1")
        watch = follow("leases", registry.watch_leases, seen.append)
        async with running(asyncio.create_task(heartbeat.run()), asyncio.create_task(watch)):
            await eventually(lambda: table.belief(clock.now_s(), 7) is Belief.HELD)
            await eventually(lambda: any(batch.changes for batch in seen))
            assert isinstance(await registry.pin(make_ask(7, "a"), 0.0), Pinned)

            seen.clear()
            await first.stop()
            renewals = connector.renewals
            assert isinstance(await registry.pin(make_ask(7, "b"), 0.0), Pinned)
            await eventually(lambda: connector.renewals > renewals + 1)
            await eventually(lambda: any(batch.snapshot and batch.changes for batch in seen))
            assert table.belief(clock.now_s(), 7) is Belief.HELD
            assert await registry.release(7, "decode-1", "tenant-digest") is None


async def test_a_replica_that_takes_calls_and_is_silent_costs_one_miss(fleet: Fleet) -> None:
    connector = await fleet.connector(await fleet.sidecar())
    connector.grant(make_grant(7))
    healthy = await replica(fleet)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        async with client(address, healthy.address, call_s=1.0) as registry:
            assert await registry.pin(make_ask(7, "a"), 0.0) is MissReason.UNREACHABLE

            async def pinned() -> bool:
                return isinstance(await registry.pin(make_ask(7, "b"), 0.0), Pinned)

            async with asyncio.timeout(20):
                while not await pinned():
                    pass


async def test_what_a_replica_answers_is_not_asked_again_elsewhere(fleet: Fleet) -> None:
    first, second = await replica(fleet), await replica(fleet)
    async with client(first.address, second.address) as registry:
        unknown = Holder("nobody", "boot-1", 1)
        await registry.unpin(unknown, 7, "pin")
        assert await registry.release(7, "nobody", "") is MissReason.UNKNOWN
        assert registry._replicas.current == first.address  # pyright: ignore[reportPrivateUsage]


def test_calls_that_fail_together_leave_a_replica_once() -> None:
    replicas = Replicas(["a", "b", "c"])
    assert [replicas.leave("a"), replicas.leave("a")] == [True, True]
    assert replicas.current == "b"


@pytest.mark.parametrize("failures", [1, 2])
def test_the_only_replica_is_never_left(failures: int) -> None:
    replicas = Replicas(["a"])
    assert [replicas.leave("a") for _ in range(failures)] == [False] * failures
    assert replicas.current == "a"
