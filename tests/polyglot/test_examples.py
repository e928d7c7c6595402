"""The examples in five languages, built from protos/ and run against processes of a registry and a sidecar."""

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.dev.engine_process import free_ports
from kvlease.runtime.child_process import tied_to_this_process
from kvlease.v1 import lease_pb2, registry_pb2, registry_pb2_grpc
from stubs.forwarding import RefusingRegistry

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
START_S = 120.0
BUILD_S = 900.0
"""With caches that are cold, on two busy cores."""

# An engine that has just been started, on a busy machine, may take long to answer its first question.
SIDECAR_PATIENCE = ("--pin-call-s", "10", "--peer-call-s", "12", "--holder-call-s", "10")
REGISTRY_PATIENCE = ("--sidecar-call-s", "15", "--renew-call-s", "4")

TOOLCHAINS = {
    "python": (sys.executable,),
    "go": ("go",),
    "typescript": ("node", "npm"),
    "java": ("java", "mvn"),
    "rust": ("cargo",),
}
RETRIED = ("PinLease", "UnpinLease", "ReleaseLease", "DrainEngine")

pytestmark = [
    pytest.mark.polyglot,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(BUILD_S + 2 * START_S),
]


@dataclass(frozen=True)
class Fleet:
    registry: str
    socket: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    directory = tmp_path_factory.mktemp("p")
    port, etcd_port = free_ports(2)
    found = Fleet(f"127.0.0.1:{port}", directory / "s" / "sidecar.sock")
    etcd = EmbeddedEtcd()
    etcd.endpoint = f"127.0.0.1:{etcd_port}"
    async with AsyncExitStack() as stack:
        stack.push_async_callback(etcd.stop)
        await etcd.start()
        store = ("--etcd-endpoints", etcd.endpoint, "--etcd-accept-old")
        await _process(stack, directory, "registry", "--listen", found.registry, *REGISTRY_PATIENCE, *store)
        await _process(
            stack,
            directory,
            "sidecar",
            "--allow-loopback",
            "--socket-dir",
            str(found.socket.parent),
            *SIDECAR_PATIENCE,
            *store,
        )
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(found.registry))
        await asyncio.wait_for(channel.channel_ready(), START_S)
        async with asyncio.timeout(START_S):
            while not found.socket.exists():
                await asyncio.sleep(0.05)
        yield found


async def _process(stack: AsyncExitStack, directory: Path, *arguments: str) -> None:
    command = (sys.executable, "-m", "kvlease.cli", *arguments)
    with (directory / "log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(*tied_to_this_process(command), stderr=log)

    async def end() -> None:
        if process.returncode is None:
            process.terminate()
        await process.wait()

    stack.push_async_callback(end)


def require_toolchain(language: str) -> None:
    missing = [tool for tool in TOOLCHAINS[language] if shutil.which(tool) is None]
    if missing:
        message = f"the {language} example is left out: {', '.join(missing)} is not installed"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


async def make(*arguments: str, timeout_s: float) -> str:
    """What a target of examples/Makefile prints; fails with all that it said when it fails."""
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL")}
    process = await asyncio.create_subprocess_exec(
        *tied_to_this_process((str(shutil.which("make")), "--silent", "-C", str(EXAMPLES), *arguments)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{output.decode()}\n{errors.decode()}"
    return output.decode()


async def lives_and_goes(watch: Any) -> lease_pb2.Lease:
    """The lease that a watch tells of, once it tells that it is gone."""
    recorded = lease_pb2.Lease()
    async with asyncio.timeout(START_S):
        while True:
            for change in (await watch.read()).changes:
                if change.gone:
                    assert change.lease.lease_id == recorded.lease_id
                    return recorded
                recorded = change.lease


@pytest.mark.parametrize("language", TOOLCHAINS)
async def test_an_engine_of_another_language_registers_grants_and_is_asked(
    language: str, fleet: Fleet
) -> None:
    require_toolchain(language)
    await make(language, timeout_s=BUILD_S)
    async with grpc.aio.insecure_channel(fleet.registry) as channel:
        registry = registry_pb2_grpc.RegistryServiceStub(channel)
        proxy = RefusingRegistry(fleet.registry)
        await proxy.start()
        try:
            watch = registry.WatchLeases(registry_pb2.WatchLeasesRequest())
            assert (await watch.read()).snapshot  # type: ignore[union-attr]
            place = (f"REGISTRY={proxy.address}", f"SOCKET={fleet.socket}")
            lines = (await make(f"run-{language}", *place, timeout_s=START_S)).splitlines()
            recorded = await lives_and_goes(watch)
            watch.cancel()
        finally:
            await proxy.stop()
    engine_id, lease_id = recorded.holder.engine_id, f"{recorded.lease_id:016x}"
    assert engine_id.startswith(f"{language}-")
    assert recorded.tokens == 32
    assert lines == [
        f"registered {engine_id}",
        f"granted {lease_id}",
        f"renewed {lease_id}",
        "watched HELD",
        "pinned 32 tokens",
        "unpinned",
        "released",
        "watched gone",
        "refused NOT_FOUND kvlease UNKNOWN_ENGINE",
    ]
    assert [proxy.attempts[method] for method in RETRIED] == [2] * len(RETRIED)


@pytest.mark.slow
async def test_grpcurl_needs_no_file_to_ask_a_registry(fleet: Fleet, tmp_path: Path) -> None:
    if shutil.which("go") is None:
        pytest.skip("grpcurl is built with go, which is not installed")
    environment = {**os.environ, "GOBIN": str(tmp_path)}
    install = ("go", "install", "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.4")
    built = await asyncio.create_subprocess_exec(*install, env=environment)
    assert await asyncio.wait_for(built.wait(), BUILD_S) == 0
    asked = await asyncio.create_subprocess_exec(
        *(str(tmp_path / "grpcurl"), "-plaintext", fleet.registry, "kvlease.v1.RegistryService/ListEngines"),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(asked.communicate(), START_S)
    assert (asked.returncode, output.decode().strip()) == (0, "{}")
