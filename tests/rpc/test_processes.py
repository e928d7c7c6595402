"""The entry points: a process that says where it serves, answers, and ends well on a signal."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_S = 60.0


async def spawn(*arguments: str, **environment: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvlease.cli",
        *arguments,
        stderr=PIPE,
        stdout=PIPE,
        env={**os.environ, **environment},
    )


@asynccontextmanager
async def serving(*arguments: str, **environment: str) -> AsyncIterator[tuple[Process, list[dict[str, Any]]]]:
    """A process that serves, and its log lines up to the one that says so."""
    process = await spawn(*arguments, **environment)
    assert process.stderr is not None
    lines: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(START_S):
            while not (lines and lines[-1]["message"].endswith("serves")):
                line = await process.stderr.readline()
                assert line, f"ended with {await process.wait()}: {lines}"
                lines.append(json.loads(line))
        yield process, lines
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def is_healthy(address: str, service: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        checked = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=20)
        return bool(checked.status == health_pb2.HealthCheckResponse.SERVING)


async def ended(process: Process) -> int:
    await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode is not None
    return process.returncode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_registry_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    async with serving("registry", "--listen", "127.0.0.1:0", "--store", "memory") as (process, lines):
        assert await is_healthy(lines[-1]["address"], "")
        process.send_signal(number)
        assert await ended(process) == 0


async def test_a_sidecar_serves_others_and_the_engines_beside_it(tmp_path: Path) -> None:
    environment = {"KVLEASE_SIDECAR_ALLOW_LOOPBACK": "true", "KVLEASE_SIDECAR_SOCKET_DIR": str(tmp_path)}
    async with serving("sidecar", **environment) as (process, lines):
        assert await is_healthy(lines[-1]["address"], "")
        assert await is_healthy(f"unix:{lines[-1]['socket']}", "kvlease.v1.ConnectorService")
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0


async def test_a_process_on_the_memory_store_says_what_that_means_and_shows_its_settings() -> None:
    flags = ("--listen", "127.0.0.1:0", "--store", "memory")
    async with serving("registry", *flags, KVLEASE_REGISTRY_LEASE_DURATION_S="25") as (_, lines):
        (settings,) = [line["settings"] for line in lines if line["message"] == "configuration"]
        assert settings["lease_duration_s"] == 25.0
        assert any("kvlease dev" in line["message"] for line in lines if line["level"] == "warning")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("registry", "--heartbeat-interval-s", "10"), "heartbeat_interval_s (10)"),
        (("registry", "--store", "paper"), "store is 'paper', but must be one of memory"),
        (("sidecar",), "allow_loopback"),
        (("registry", "--tls-dir", "/nowhere"), "tls_dir: cannot use /nowhere"),
        (("registry", "--listen", "192.0.2.1:1"), "cannot listen on 192.0.2.1:1"),
        (("nonsense",), "kvlease: error: there is no command 'nonsense'"),
        ((), "usage: kvlease COMMAND"),
    ],
)
async def test_what_cannot_begin_says_why_and_exits_with_2(
    arguments: tuple[str, ...], complaint: str
) -> None:
    process = await spawn(*arguments)
    _, errors = await asyncio.wait_for(process.communicate(), START_S)
    assert process.returncode == 2
    assert complaint in errors.decode()
