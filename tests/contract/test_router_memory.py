"""What a router keeps in memory while clients are slow, and after long bodies."""

import asyncio
import gc
import io
import json
import tracemalloc
from collections.abc import Iterator
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from kvlease.router.client import HttpClient
from stubs.engines import MODEL, Received, StubEngine, delta
from stubs.router import FIRST, Stack, router_config
from stubs.waiting import eventually

SLOW_CLIENTS = 3
KEPT_EACH_MAX = 64 << 20
"""What one stream may fill: kernels give a connection 6 MB on one side and 4 MB on the other, and there are two."""

SHORT = {"turn_timeout_s": 2.0}
ONE_AT_A_TIME = {"decode_inflight_max": 1, "queue_wait_s": 60.0}

BODY_BYTES = 8 << 20
LEFT_MAX = 4 << 20


class Flood:
    """An engine that streams as fast as it is read, for ever."""

    def __init__(self, engine: StubEngine) -> None:
        self.sent = 0
        engine.script = self._script

    async def _script(self, request: web.Request, received: Received) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        piece = delta("x" * 1000) * 64
        while True:
            await response.write(piece)
            self.sent += len(piece)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


class SlowClient:
    """Asks for a stream, reads the first byte, and no more until it is told to."""

    async def ask(self, stack: Stack, path: str = "/v1/chat/completions") -> None:
        url = urlsplit(stack.router.url)
        body = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hello"}]}'
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        self._reader, self._writer = await asyncio.open_connection(url.hostname, url.port, limit=1)
        self._writer.write(head.encode() + body)
        assert await self._reader.read(1)

    async def rest(self) -> bytes:
        """All that comes until the router closes the connection."""
        parts: list[bytes] = []
        while part := await self._reader.read(1 << 20):
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        self._writer.close()


async def settled(flood: Flood) -> int:
    """What has been sent once no more is taken."""
    while True:
        before = flood.sent
        await asyncio.sleep(0.1)
        if before and flood.sent == before:
            return before


async def test_an_engine_is_read_no_faster_than_its_slow_clients_read(
    stack: Stack, decode: StubEngine
) -> None:
    flood = Flood(decode)
    clients = [SlowClient() for _ in range(SLOW_CLIENTS)]
    for client in clients:
        await client.ask(stack)
    async with asyncio.timeout(60):
        assert await settled(flood) < SLOW_CLIENTS * KEPT_EACH_MAX
    for client in clients:
        client.close()
    async with asyncio.timeout(20):
        await decode.aborted.wait()


@pytest.mark.parametrize("router_settings", [{**SHORT, **ONE_AT_A_TIME}], ids=["one at a time"])
async def test_a_client_that_reads_nothing_more_keeps_its_place_no_longer_than_a_turn_may_take(
    stack: Stack, decode: StubEngine
) -> None:
    Flood(decode)
    client = SlowClient()
    await client.ask(stack)
    decode.script = None
    stack.router.reload(router_config(**ONE_AT_A_TIME))
    assert (await stack.chat(FIRST)).status == 200
    async with asyncio.timeout(60):
        assert b'"turn_timeout"' in (await client.rest())[-200:]
    client.close()


@pytest.mark.parametrize("router_settings", [{**SHORT, **ONE_AT_A_TIME}], ids=["one at a time"])
async def test_nor_does_one_that_takes_not_even_the_end_of_its_turn(
    stack: Stack, decode: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for_the_client(_client: HttpClient) -> None:
        await asyncio.Event().wait()

    Flood(decode)
    client = SlowClient()
    with monkeypatch.context() as patched:
        patched.setattr(HttpClient, "end", wait_for_the_client)
        await client.ask(stack)
        decode.script = None
        stack.router.reload(router_config(**ONE_AT_A_TIME))
        assert (await stack.chat(FIRST)).status == 200
    async with asyncio.timeout(60):
        assert not (await client.rest()).endswith(b"0\r\n\r\n")
    client.close()


@pytest.mark.parametrize("router_settings", [SHORT], ids=["short"])
async def test_a_request_that_is_passed_ends_in_its_time_though_its_client_reads_nothing_more(
    stack: Stack, decode: StubEngine
) -> None:
    for engine in stack.engines:
        Flood(engine)
    client = SlowClient()
    await client.ask(stack, "/v1/other")
    await eventually(lambda: any(engine.aborted.is_set() for engine in stack.engines))
    async with asyncio.timeout(60):
        assert not (await client.rest()).endswith(b"0\r\n\r\n")
    client.close()


async def test_nothing_of_long_bodies_is_left(stack: Stack, decode: StubEngine, traced: None) -> None:
    async def left() -> int:
        body = io.BytesIO(json.dumps({"model": MODEL, "messages": messages}).encode())
        assert (await stack.send("POST", "/v1/chat/completions", data=body)).status == 200
        del body
        # The engine's server keeps the last body of a connection, and the test all bodies: they are not the router's.
        # The connection that brought the long ones to the router stays as it is.
        async with aiohttp.ClientSession() as session:
            other = Stack(stack.registry, stack.router, session)
            assert (await other.chat(FIRST)).status == 200
        for engine in stack.engines:
            engine.received.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    messages = FIRST
    before = await left()
    messages = [*FIRST, {"role": "user", "content": "word " * (BODY_BYTES // 5)}]
    said = len(messages[1]["content"])
    assert await left() - before - said < LEFT_MAX
