"""A collector that is away delays neither requests nor the end of a process."""

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import closing

import grpc.aio
import pytest

from kvlease.v1 import registry_pb2, registry_pb2_grpc
from kvlease.wire.leases import pin_to_wire

from .conftest import make_ask
from .test_processes import serving

EXIT_S = 5.0
SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def blackhole() -> Iterator[str]:
    """An address that takes connections and never answers."""
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("away", ["silent", "refusing"])
async def test_a_process_answers_and_ends_with_its_collector_away(away: str, blackhole: str) -> None:
    endpoint = blackhole if away == "silent" else "http://127.0.0.1:9"
    environment = {
        "KVLEASE_REGISTRY_OTLP_ENDPOINT": endpoint,
        "KVLEASE_REGISTRY_STORE": "memory",
        "OTEL_BSP_SCHEDULE_DELAY": "10",
    }
    options = ("--listen", "127.0.0.1:0", "--store", "memory")
    async with serving("registry", *options, **environment) as (process, lines):
        async with grpc.aio.insecure_channel(lines[-1]["address"]) as channel:
            stub = registry_pb2_grpc.RegistryServiceStub(channel)
            request = registry_pb2.PinLeaseRequest(pin=pin_to_wire(make_ask(1)))
            for _ in range(3):
                answer = await stub.PinLease(request, timeout=20, metadata=(("traceparent", SAMPLED),))
                assert answer.result.miss
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10 * EXIT_S):
            await process.communicate()
        assert process.returncode == 0
