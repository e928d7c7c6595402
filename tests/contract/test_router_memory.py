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

from stubs.engines import MODEL, Received, StubEngine, delta
from stubs.router import FIRST, Stack

SLOW_CLIENTS = 3
KEPT_EACH_MAX = 64 << 20
"""What one stream may fill: kernels give a connection 6 MB on one side and 4 MB on the other, and there are two."""

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
    host, port = urlsplit(stack.router.url).hostname, urlsplit(stack.router.url).port
    body = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hello"}]}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writers: list[asyncio.StreamWriter] = []
    for _ in range(SLOW_CLIENTS):
        reader, writer = await asyncio.open_connection(host, port, limit=1)
        writer.write(head.encode() + body)
        assert await reader.read(1)
        writers.append(writer)
    async with asyncio.timeout(60):
        assert await settled(flood) < SLOW_CLIENTS * KEPT_EACH_MAX
    for writer in writers:
        writer.close()
    async with asyncio.timeout(20):
        await decode.aborted.wait()


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
