"""The HTTP client towards engines, against a server that sends any bytes."""

import asyncio
import gc
import socket
import struct
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from kvlease.router import engine_client
from kvlease.router.engine_client import UNREAD_BYTES_MAX, HttpEngines
from kvlease.router.ports import LegError
from stubs.waiting import eventually

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: text/plain\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nTrailer: t\r\n\r\n"
)


class Site:
    """A server of raw bytes and a client of it."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.engines = HttpEngines()
        self.connections = 0
        self.closed = 0
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.closed += 1
            writer.close()

    async def ask(
        self, body: bytes | None = b"{}", timeout_s: float = 20.0, **headers: str
    ) -> tuple[int, bytes]:
        async with self.engines.call("POST", self.url + "/v1/x?y=z", headers, body, timeout_s) as reply:
            return reply.status, await reply.body()


@asynccontextmanager
async def site(serve: Serve) -> AsyncIterator[Site]:
    built = Site(serve)
    server = await asyncio.start_server(built.handle, "127.0.0.1", 0, limit=1 << 24)
    built.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with built.engines:
        yield built
    server.close()


async def request_of(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    _, named, rest = head.lower().partition(b"content-length:")
    return head + await reader.readexactly(int(rest.partition(b"\r\n")[0]) if named else 0)


def answering(*pieces: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)

    return serve


async def test_a_request_says_what_it_was_given_and_its_length() -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await request_of(reader))
        writer.write(WHOLE)
        await reader.read()

    async with site(serve) as one:
        assert await one.ask(b'{"a":1}', Accept="x") == (200, b"hello")
    host = one.url.removeprefix("http://").encode()
    head = b"POST /v1/x?y=z HTTP/1.1\r\nHost: " + host + b"\r\nAccept: x\r\nContent-Length: 7\r\n\r\n"
    assert asked == [head + b'{"a":1}']


@pytest.mark.parametrize("whole", [WHOLE, CHUNKED])
async def test_an_answer_split_anywhere_is_the_same(whole: bytes) -> None:
    expected = b"hello" if whole is WHOLE else b"hello world"
    for cut in range(1, len(whole)):
        async with site(answering(whole[:cut], whole[cut:])) as one:
            assert await one.ask() == (200, expected)


async def test_a_connection_is_used_again_when_its_answer_was_read_and_closed_when_not() -> None:
    async with site(answering(CHUNKED)) as one:
        for _ in range(3):
            assert (await one.ask())[0] == 200
        assert one.connections == 1
        async with one.engines.call("POST", one.url, {}, b"", 20.0) as reply:
            assert reply.status == 200
        assert (await one.ask())[0] == 200
        await eventually(lambda: one.closed == one.connections - 1)


async def test_a_connection_that_nobody_comes_back_for_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "IDLE_CONNECTION_S", 0.02)
    async with site(answering(WHOLE)) as one:
        assert await one.ask() == (200, b"hello")
        await eventually(lambda: one.closed == 1)
        assert await one.ask() == (200, b"hello")
        await eventually(lambda: one.closed == 2)
        assert one.engines._idle == {}


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        WHOLE[:20],
        WHOLE[:-1],
        CHUNKED[:-8],
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    ],
)
async def test_an_answer_that_breaks_off_or_is_none_is_an_error(sent: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(sent)

    async with site(serve) as one:
        with pytest.raises(LegError) as failed:
            await one.ask()
        assert failed.value.sent


@pytest.mark.parametrize("more", [b"", b"Connection: Upgrade\r\nUpgrade: h2c\r\n"])
async def test_an_engine_that_changes_the_protocol_is_an_error_and_no_fault_of_the_loop(more: bytes) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    async with site(answering(b"HTTP/1.1 101 Switching Protocols\r\n" + more + b"\r\n")) as one:
        with pytest.raises(LegError, match="changes to a protocol") as failed:
            await one.ask()
        await eventually(lambda: one.closed == 1)
    assert failed.value.sent
    assert faults == []


async def test_what_came_before_the_break_is_delivered_first() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(CHUNKED[:-12])

    async with site(serve) as one, one.engines.call("POST", one.url, {}, b"", 20.0) as reply:
        got: list[bytes] = []
        with suppress(LegError):
            async for chunk in reply.chunks():
                got.append(chunk)
            pytest.fail("the break was not told")
        assert b"".join(got).startswith(b"hello")


async def test_an_answer_may_end_with_its_connection_and_follow_an_interim_one() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nX: y\r\n\r\nto the end")

    async with site(serve) as one, one.engines.call("POST", one.url, {}, b"", 20.0) as reply:
        assert (reply.status, dict(reply.headers)) == (200, {"X": "y"})
        assert await reply.body() == b"to the end"


async def test_bytes_that_nobody_asked_for_cost_their_connection_only() -> None:
    async with site(answering(WHOLE + WHOLE)) as one:
        for _ in range(3):
            assert await one.ask() == (200, b"hello")
        assert one.connections >= 2


async def test_an_engine_that_is_silent_is_given_up_in_time_and_one_that_is_not_there_was_sent_nothing() -> (
    None
):
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with site(silent) as one:
        with pytest.raises(LegError) as late:
            await one.ask(timeout_s=1.0)
        assert late.value.sent
        await eventually(lambda: one.closed == one.connections)
        with pytest.raises(LegError) as absent:
            async with one.engines.call("POST", "http://127.0.0.1:1/", {}, b"", 20.0):
                pass
        assert not absent.value.sent


@pytest.mark.parametrize("host", ["decode-0..svc", f"{'x' * 64}.svc"])
async def test_a_host_that_is_no_name_is_an_engine_that_is_not_there(host: str) -> None:
    async with HttpEngines() as engines:
        with pytest.raises(LegError) as absent:
            async with engines.call("POST", f"http://{host}:8000/", {}, b"", 20.0):
                pass
    assert not absent.value.sent


async def test_a_long_body_goes_out_in_full_and_an_early_refusal_ends_it() -> None:
    body = b"x" * (8 << 20)
    taken: list[int] = []

    async def whole(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        taken.append(len((await request_of(reader)).partition(b"\r\n\r\n")[2]))
        writer.write(WHOLE)
        await reader.read()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.read(1 << 16)

    async with site(whole) as one:
        assert await one.ask(body) == (200, b"hello")
        assert taken == [len(body)]
    async with site(refuse) as one:
        assert await one.ask(body) == (413, b"")
        await eventually(lambda: one.closed == 1)


async def test_an_early_refusal_is_not_waited_for_until_the_body_is_read() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await answered.wait()

    answered = asyncio.Event()
    async with site(refuse) as one:
        async with asyncio.timeout(20):
            assert await one.ask(b"x" * (32 << 20), timeout_s=600) == (413, b"")
        answered.set()


async def test_an_answer_that_nobody_reads_stops_coming() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await request_of(reader)
        piece = b"x" * (1 << 16)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
        while True:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)

    async def still() -> bool:
        before = sent
        await asyncio.sleep(0.05)
        return sent > UNREAD_BYTES_MAX and sent == before

    async with site(flood) as one, one.engines.call("POST", one.url, {}, b"", 20.0) as reply:
        async with asyncio.timeout(20):
            while not await still():
                pass
        stopped = sent
        chunks = reply.chunks()
        async for chunk in chunks:
            assert len(chunk) < 4 * UNREAD_BYTES_MAX
            if sent > stopped:
                break


@pytest.mark.parametrize("value", ["a\r\nX: y", "a\nb", "a\0b"])
async def test_a_header_cannot_smuggle_another(value: str) -> None:
    async with site(answering(WHOLE)) as one:
        with pytest.raises(LegError) as refused:
            await one.ask(Evil=value)
        assert not refused.value.sent
        assert one.connections == 0


async def test_a_request_that_is_given_up_closes_its_connection() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with site(silent) as one:
        task = asyncio.create_task(one.ask())
        await eventually(lambda: one.connections)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await eventually(lambda: one.closed)


async def test_an_answer_that_came_in_full_and_was_not_read_is_no_part_of_the_next_one() -> None:
    answers = [b"HTTP/1.1 503 Unavailable\r\nContent-Length: 4\r\n\r\nleft", WHOLE]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request_of(reader)
            writer.write(answers.pop(0))
            await writer.drain()

    async with site(serve) as built:
        async with built.engines.call("POST", built.url, {}, b"{}", 20.0) as reply:
            assert reply.status == 503
        assert await built.ask() == (200, b"hello")
        assert built.connections == 2


async def test_an_answer_without_a_length_whose_connection_is_reset_is_not_whole() -> None:
    begun = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nto the")
        await begun.wait()
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async with site(serve) as built, built.engines.call("POST", built.url, {}, b"", 20.0) as reply:
        begun.set()
        with pytest.raises(LegError):
            await reply.body()


@pytest.mark.parametrize("sent", [b"", b"no HTTP\r\n\r\n", WHOLE[:-1]])
async def test_an_error_lets_go_of_its_request_without_a_collection_of_garbage(sent: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(sent)
        await writer.drain()

    async def failed(engine: Site) -> weakref.ref[LegError]:
        try:
            await engine.ask()
        except LegError as error:
            return weakref.ref(error)
        raise AssertionError

    gc.disable()
    try:
        async with site(serve) as engine:
            assert (await failed(engine))() is None
    finally:
        gc.enable()
