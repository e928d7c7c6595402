"""Registries and a sidecar as processes of their own over one etcd; the connector is in the test."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvlease.core.attachment import EngineFacts
from kvlease.core.digests import ChainRoot, chain
from kvlease.core.holding import Grant, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, MissReason
from kvlease.core.records import KvLayout, KvLocation, LeaseRecord, Pinned, PinOutcome
from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.dev.engine_process import free_ports
from kvlease.runtime.child_process import tied_to_this_process
from kvlease.testing.clock import ManualClock
from kvlease.testing.connector import FakeConnector
from kvlease.v1 import registry_pb2, registry_pb2_grpc
from kvlease.wire.leases import lease_from_wire, outcome_from_wire, pin_to_wire
from stubs.etcd import stop_threads

BOUND_S = 40.0
LEASE = 7
HOLDER = Holder("decode-1", "boot-1", 1)
Result = TypeVar("Result")


class Fleet:
    """Processes that share `etcd`, which is not started yet."""

    def __init__(self, directory: Path, stack: AsyncExitStack) -> None:
        registry, self._sidecar_port, other, etcd = free_ports(4)
        self.registries = (registry, other)
        self.socket = directory / "s" / "sidecar.sock"
        self.etcd = EmbeddedEtcd()
        self.etcd.endpoint = f"127.0.0.1:{etcd}"
        self.logs = directory / "log"
        self._stack = stack

    async def registry(self, number: int) -> asyncio.subprocess.Process:
        return await self._start("registry", "--listen", f"127.0.0.1:{self.registries[number]}")

    async def sidecar(self) -> asyncio.subprocess.Process:
        return await self._start(
            "sidecar",
            *("--listen", f"127.0.0.1:{self._sidecar_port}", "--allow-loopback"),
            *("--socket-dir", str(self.socket.parent), "--engine-ttl-s", "9"),
        )

    async def _start(self, *arguments: str) -> asyncio.subprocess.Process:
        etcd = ("--store", "etcd", "--etcd-endpoints", self.etcd.endpoint, "--etcd-accept-old")
        command = (sys.executable, "-m", "kvlease.cli", *arguments, *etcd)
        with self.logs.open("ab") as log:
            process = await asyncio.create_subprocess_exec(*tied_to_this_process(command), stderr=log)
        self._stack.push_async_callback(killed, process)
        return process

    async def ask(self, number: int) -> registry_pb2_grpc.RegistryServiceStub:
        address = f"127.0.0.1:{self.registries[number]}"
        channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(address))
        return registry_pb2_grpc.RegistryServiceStub(channel)

    async def health(self) -> list[str]:
        """What the first registry and the sidecar tell of their services."""
        return [
            await health_of(self.registries[0], "kvlease.v1.RegistryService"),
            await health_of(self._sidecar_port, "kvlease.v1.SidecarService"),
        ]

    async def connector(self) -> FakeConnector:
        layout = KvLayout(32, "float32", 1, 1, 4096, "layout")
        location = KvLocation("127.0.0.1", 5600)
        connector = FakeConnector(EngineFacts(HOLDER, "tiny", layout, location), ManualClock())
        await self.attach(connector)
        self._stack.push_async_callback(connector.detach)
        return connector

    async def attach(self, connector: FakeConnector) -> None:
        async def attached() -> bool:
            if not self.socket.exists():
                return False
            await connector.attach(self.socket)
            return True

        await until(attached)


async def health_of(port: int, service: str) -> str:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def killed(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


@asynccontextmanager
async def fleet_in(directory: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(directory, stack)
        stack.push_async_callback(fleet.etcd.stop)
        yield fleet


async def until(answer: Callable[[], Awaitable[Result]]) -> Result:
    """The first true answer; what refuses is asked again."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                if result := await answer():
                    return result
            except grpc.aio.AioRpcError:
                pass
            await asyncio.sleep(0.05)


async def serves(fleet: Fleet) -> bool:
    return await fleet.health() == ["SERVING", "SERVING"]


async def knows_no_engine(registry: registry_pb2_grpc.RegistryServiceStub) -> bool:
    return not await engines(registry)


async def engines(registry: registry_pb2_grpc.RegistryServiceStub) -> list[str]:
    listed = await registry.ListEngines(registry_pb2.ListEnginesRequest(), timeout=5)
    return [engine.holder.engine_id for engine in listed.engines]


async def leases(registry: registry_pb2_grpc.RegistryServiceStub) -> list[LeaseRecord]:
    listed = await registry.ListLeases(registry_pb2.ListLeasesRequest(), timeout=5)
    return [lease_from_wire(lease) for lease in listed.leases]


async def pin(registry: registry_pb2_grpc.RegistryServiceStub, pin_id: str) -> PinOutcome:
    spec = pin_to_wire(PinAsk(LEASE, pin_id, HOLDER, "tenant", reservation_s=30.0))
    answer = await registry.PinLease(registry_pb2.PinLeaseRequest(pin=spec), timeout=5)
    return outcome_from_wire(answer.result)


async def pinned(registry: registry_pb2_grpc.RegistryServiceStub, pin_id: str) -> bool:
    return isinstance(await pin(registry, pin_id), Pinned)


def grant() -> Grant:
    digests = chain(ChainRoot("tenant", "tiny"), list(range(64)), 32).digests
    return Grant(
        lease_id=LEASE,
        kind=LeaseKind.CONVERSATION,
        block_ids=(3, 5),
        digests=digests,
        tokens=64,
        block_size=32,
        tenant="tenant",
        conversation_key=b"c",
        model="tiny",
    )


async def test_processes_wait_for_etcd_share_it_and_outlive_each_other(tmp_path: Path) -> None:
    async with fleet_in(tmp_path) as fleet:
        first, sidecar = await fleet.registry(0), await fleet.sidecar()
        connector = await fleet.connector()
        connector.grant(grant())
        one, two = await fleet.ask(0), await fleet.ask(1)

        assert await until(fleet.health) == ["NOT_SERVING", "NOT_SERVING"]
        await fleet.etcd.start()
        assert await until(lambda: engines(one)) == ["decode-1"]
        assert await until(lambda: serves(fleet))
        assert await until(lambda: pinned(one, "a"))
        (record,) = await until(lambda: leases(one))
        assert (record.lease_id, record.generation > 0) == (LEASE, True)

        first.kill()
        await fleet.registry(1)
        assert await until(lambda: leases(two)) == [record]
        assert await until(lambda: pinned(two, "b"))

        sidecar.kill()
        await sidecar.wait()
        await connector.detach()
        assert await until(lambda: knows_no_engine(two))
        assert await leases(two) == []
        assert await pin(two, "c") is MissReason.UNREACHABLE

        fleet.socket.unlink()
        await fleet.sidecar()
        await fleet.attach(connector)
        (again,) = await until(lambda: leases(two))
        assert (again.lease_id, again.generation > record.generation) == (LEASE, True)
        assert await until(lambda: pinned(two, "d"))


async def test_etcd_may_be_away_and_come_back_and_no_process_exits(tmp_path: Path) -> None:
    async with fleet_in(tmp_path) as fleet:
        await fleet.etcd.start()
        processes = [await fleet.registry(0), await fleet.sidecar()]
        connector = await fleet.connector()
        connector.grant(grant())
        registry = await fleet.ask(0)
        assert await until(lambda: pinned(registry, "a"))
        (record,) = await until(lambda: leases(registry))
        for number in (signal.SIGTERM, signal.SIGKILL):
            await fleet.etcd.halt(number)
            assert await until(lambda number=number: pinned(registry, f"without-{number}"))
            await fleet.etcd.start()
            assert await until(lambda: leases(registry)) == [record]
            assert await until(lambda number=number: pinned(registry, f"after-{number}"))
        await stop_threads(fleet.etcd)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await registry.ListLeases(registry_pb2.ListLeasesRequest(), timeout=20)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await until(lambda: pinned(registry, "meanwhile"))
        os.kill(fleet.etcd.pid, signal.SIGCONT)
        assert [one.lease_id for one in await until(lambda: leases(registry))] == [LEASE]
        assert await until(lambda: pinned(registry, "last"))
        assert [process.returncode for process in processes] == [None, None]
