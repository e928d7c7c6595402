"""A client that is no bottleneck: so many connections, each with one request at a time, byte by byte checked."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True)
class Load:
    """What came of a load. Times are seconds.

    Attributes:
        first_byte_s: from the request to the first byte of each answer.
        answer_s: to the last byte.
        failed: answers that were not 200, or broke off.
        elapsed_s: how long the load ran.
    """

    first_byte_s: list[float] = field(default_factory=list[float])
    answer_s: list[float] = field(default_factory=list[float])
    failed: int = 0
    elapsed_s: float = 0.0


class _Connection(asyncio.Protocol):
    """One keep-alive connection; `answer` is done when the answer in flight has ended."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answer: asyncio.Future[bool] | None = None
        self.first_byte_s = 0.0
        self._buffer = bytearray()
        self._head_end = -1
        self._size = -1

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """An answer in flight has failed."""
        self._end(well=False)

    def data_received(self, data: bytes) -> None:
        """Looks for the end of the answer."""
        if not self._buffer:
            self.first_byte_s = perf_counter()
        self._buffer += data
        if self._head_end < 0 and not self._read_head():
            return
        sized = self._size >= 0
        if len(self._buffer) >= self._size if sized else self._buffer.endswith(LAST_CHUNK):
            self._end(well=self._buffer.startswith(b"HTTP/1.1 200"))

    def _read_head(self) -> bool:
        self._head_end = self._buffer.find(HEAD_END)
        if self._head_end < 0:
            return False
        _, named, rest = bytes(self._buffer[: self._head_end]).lower().partition(b"content-length:")
        if named:
            self._size = self._head_end + len(HEAD_END) + int(rest.partition(b"\r\n")[0])
        return True

    def _end(self, *, well: bool) -> None:
        self._buffer.clear()
        self._head_end = self._size = -1
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(well)

    async def ask(self, request: bytes) -> bool:
        """Sends a request and waits for the end of its answer; whether that was a whole 200."""
        if self.transport is None or self.transport.is_closing():
            return False
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return await self.answer


def request_bytes(url: str, body: bytes) -> bytes:
    """A chat request with a body of JSON."""
    host = urlsplit(url).netloc
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Accept: */*\r\nAuthorization: Bearer sk-bench\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def drive(
    legs: list[str],
    make_body: Callable[[int], bytes],
    concurrency: int,
    duration_s: float,
    count_max: int = 0,
) -> Load:
    """Sends requests for a while, each to every URL in turn: two for a prefill and a decode engine, one for a router.

    However short the while is, each connection sends one.

    Args:
        make_body: the body of the n-th request.
        count_max: ends after so many requests; 0: by the duration only.
    """
    load, numbers = Load(), iter(range(1 << 62))
    started_s = perf_counter()
    ends_s = started_s + duration_s

    async def one() -> None:
        connections = [await _connect(url) for url in legs]
        while True:
            number = next(numbers)
            if count_max and number >= count_max:
                break
            body = make_body(number)
            asked_s, well = perf_counter(), True
            for place, url in enumerate(legs):
                if not (well := await connections[place].ask(request_bytes(url, body))):
                    connections[place] = await _connect(url)
                    break
            if well:
                load.first_byte_s.append(connections[-1].first_byte_s - asked_s)
                load.answer_s.append(perf_counter() - asked_s)
            else:
                load.failed += 1
            if perf_counter() >= ends_s:
                break
        for connection in connections:
            if connection.transport is not None:
                connection.transport.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(one())
    load.elapsed_s = perf_counter() - started_s
    return load


async def _connect(url: str) -> _Connection:
    address = urlsplit(url)
    _, connection = await asyncio.get_running_loop().create_connection(
        _Connection, address.hostname or "", address.port or 80
    )
    return connection
