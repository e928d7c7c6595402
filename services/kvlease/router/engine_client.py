"""HTTP/1.1 to engines: a protocol over httptools' parser, and a pool of idle connections for each engine.

A general client costs more than everything else in a turn; this one does what an engine needs. A connection carries
one request at a time and goes back to the pool only when its answer was read to the end, so that leaving early
closes it, which aborts the request at the engine.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import httptools
from multidict import CIMultiDict

from kvlease.router.ports import EngineReply, LegError
from kvlease.runtime.tls import Tls

CONNECT_TIMEOUT_S = 2.0
IDLE_CONNECTION_S = 3.0
"""Shorter than an engine's own (uvicorn closes after 5 s).

A request never meets a connection that is being closed.
"""
IDLE_CONNECTIONS_MAX = 1024
JOINED_BYTES_MAX = 1 << 14
WRITE_BYTES = 1 << 17
UNREAD_BYTES_MAX = 1 << 18
"""An answer that is not read stops coming: a slow client holds this much of it, and no more."""
SWITCHING_PROTOCOLS = 101

Origin = tuple[bool, str, int]
"""Whether by TLS, host, and port."""

NOWHERE: Origin = False, "", 0


class _Connection(asyncio.Protocol):
    """One connection and the answer that it carries."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._drained: asyncio.Future[None] | None = None
        self._failed: LegError | None = None
        self._bodiless = False
        self._sent_all = True
        self._paused = False
        self._unread = 0
        self._parts: deque[bytes] = deque()
        self.idle_since_s = 0.0
        self.reusable = False
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.ended = False

    # --- asyncio.Protocol ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends an answer that lasts until its connection does; breaks off any other one."""
        self._transport = None
        self.reusable = False
        framed = "Content-Length" in self.headers or "Transfer-Encoding" in self.headers
        if self.status and not framed and exc is None:
            self.ended = True
        if not self.ended:
            told = "broke off" if self.status else "never began"
            self.fail(LegError(f"the answer {told}: {type(exc).__name__ if exc else 'closed'}", sent=True))
        self._wake()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parses what came. Bytes that no request asked for end the connection."""
        if self._parser is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(LegError(f"no HTTP: {type(error).__name__}", sent=True))
            self.close()

    def pause_writing(self) -> None:
        """The engine takes the body more slowly than it is written."""
        self._drained = self.loop.create_future()

    def resume_writing(self) -> None:
        """It has taken it."""
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None

    # --- httptools ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins. Behind the one that was asked for none may come."""
        if self.ended:
            self.reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if self.ended:
            return
        self.headers.add(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        """The head is complete; that of an interim answer is forgotten."""
        if self._parser is None:
            return
        status = self._parser.get_status_code()
        if status == SWITCHING_PROTOCOLS:
            self.fail(LegError("the engine changes to a protocol that nobody asked for", sent=True))
        if status < 200:
            self.headers.clear()
            return
        self.status = status
        if self._bodiless:
            self.ended = True
        self._wake()
        self.resume_writing()  # no more of the body is written, whether or not the engine goes on reading it

    def on_body(self, part: bytes) -> None:
        """A part of the body."""
        if self.ended:
            return
        self._parts.append(part)
        self._unread += len(part)
        if self._unread > UNREAD_BYTES_MAX and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._waiter is not None:
            self._wake()

    def on_message_complete(self) -> None:
        """The answer is complete."""
        if self._parser is None or not self.status:
            return
        self.reusable = bool(self._parser.should_keep_alive()) and self._sent_all and not self._bodiless
        self.ended = True
        self._parser = None
        self._wake()

    # --- one request --------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def was_read(self) -> bool:
        """Whether nothing of an answer is left that the next request would take for its own."""
        return not self._parts

    async def ask(self, head: bytes, body: bytes, *, bodiless: bool) -> None:
        """Sends a request and waits for the head of its answer.

        Raises:
            LegError: it never came.
        """
        self._parser = httptools.HttpResponseParser(self)
        self.headers, self.status, self.ended = CIMultiDict(), 0, False
        self.reusable, self._bodiless, self._failed = False, bodiless, None
        self._sent_all = len(body) <= WRITE_BYTES
        if self._transport is None:
            raise LegError("the connection is closed", sent=False)
        if len(body) <= JOINED_BYTES_MAX:
            self._transport.write(head + body)
        elif len(body) <= WRITE_BYTES:
            self._transport.writelines((head, body))
        else:
            await self._write(head, body)
        while not self.status:
            await self._came()

    async def read(self) -> bytes:
        """What came of the body since the last call; waits for it. Empty at the end.

        Raises:
            LegError: the answer broke off.
        """
        while not self._parts:
            if self.ended:
                return b""
            await self._came()
        data = self._parts.popleft() if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._unread = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def time_out(self) -> None:
        """The answer takes too long."""
        self.fail(LegError("no answer in time", sent=True))

    def fail(self, error: LegError) -> None:
        """Whoever waits for the answer gets this error."""
        self._failed = self._failed or error
        self._wake()
        self.resume_writing()

    def forget_failure(self) -> None:
        """Nobody waits for the answer any more. An error that was raised holds on to the request, and to us."""
        self._failed = None

    def close(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    async def _write(self, head: bytes, body: bytes) -> None:
        """In pieces, each when the one before has been taken."""
        view = memoryview(body)
        for start in range(0, len(body), WRITE_BYTES):
            if self._transport is None or self._failed is not None or self.status:
                return  # an engine may refuse a request before it has read all of it
            piece = view[start : start + WRITE_BYTES]
            self._transport.writelines((head, piece) if start == 0 else (piece,))
            if self._drained is not None:
                await self._drained
        self._sent_all = True

    def _came(self) -> asyncio.Future[None]:
        """Done when something came. Raises `LegError` when nothing will."""
        if self._failed is not None:
            raise self._failed
        self._waiter = self.loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)


class _Reply:
    """An answer whose body is read on demand."""

    __slots__ = ("_connection", "headers", "status")

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self.status = connection.status
        self.headers: Mapping[str, str] = connection.headers

    async def body(self) -> bytes:
        """The whole body."""
        parts: list[bytes] = []
        while part := await self._connection.read():
            parts.append(part)
            if self._connection.ended and self._connection.was_read:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        return _Chunks(self._connection)


class _Chunks(AsyncIterator[bytes]):
    """What comes of a body. A class, not a generator: a loop keeps account of those."""

    __slots__ = ("_connection",)

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    async def __anext__(self) -> bytes:
        if part := await self._connection.read():
            return part
        raise StopAsyncIteration


class _Call(AbstractAsyncContextManager[EngineReply]):
    """One request, from its connection to the end of its answer, or to where it is left."""

    __slots__ = (
        "_body",
        "_connection",
        "_headers",
        "_method",
        "_origin",
        "_pool",
        "_timeout_s",
        "_timer",
        "_url",
    )

    def __init__(
        self,
        pool: "HttpEngines",
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> None:
        self._pool = pool
        self._method = method
        self._url = url
        self._headers = headers
        self._body = body
        self._timeout_s = timeout_s
        self._origin: Origin = NOWHERE
        self._connection: _Connection | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> EngineReply:
        self._origin, host, target = _parts(self._url)
        head = _head(self._method, target, host, self._headers, self._body)
        loop = asyncio.get_running_loop()
        connection = self._pool.idle(self._origin, loop)
        if connection is None:
            connection = await self._pool.connect(self._origin, loop)
        self._connection = connection
        self._timer = loop.call_later(self._timeout_s, connection.time_out)
        try:
            await connection.ask(head, self._body or b"", bodiless=self._method == "HEAD")
        except BaseException:
            self._leave()
            raise
        return _Reply(connection)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._pool.give_back(self._origin, self._connection)


class HttpEngines:
    """An `EnginePort` with one pool of connections for all engines; a context that closes it.

    Args:
        tls: what https engines are checked against, by the host of their URL, and shown.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._idle: dict[Origin, deque[_Connection]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._open = False

    async def __aenter__(self) -> "HttpEngines":
        self._open = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open = False
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    def call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> AbstractAsyncContextManager[EngineReply]:
        """A request. Entering sends it and raises `LegError`; leaving early closes the connection."""
        return _Call(self, method, url, headers, body, timeout_s)

    def idle(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> _Connection | None:
        """A connection to the engine that nobody uses, None when there is none."""
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if connection.is_open and loop.time() - connection.idle_since_s < IDLE_CONNECTION_S:
                return connection
            connection.close()
        return None

    async def connect(self, origin: Origin, loop: asyncio.AbstractEventLoop) -> _Connection:
        """Another connection to the engine.

        Raises:
            LegError: there is none to be had.
        """
        if not self._open:
            raise LegError("the client is closed", sent=False)
        secure, host, port = origin
        context: ssl.SSLContext | bool | None = None
        if secure:
            context = True if self._tls is None else self._tls.client_context()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(loop), host, port, ssl=context
                )
        except (OSError, TimeoutError, ValueError) as error:  # a host that no name service can be asked for
            raise LegError(f"no connection: {type(error).__name__}", sent=False) from error
        return connection

    def give_back(self, origin: Origin, connection: _Connection) -> None:
        """Keeps a connection whose answer was read to the end, and closes any other one."""
        connection.forget_failure()
        idle = self._idle.get(origin, ())
        kept = self._open and connection.reusable and connection.was_read and connection.is_open
        if not kept or len(idle) >= IDLE_CONNECTIONS_MAX:
            connection.close()
            return
        loop = connection.loop
        connection.idle_since_s = loop.time()
        self._idle.setdefault(origin, deque()).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(IDLE_CONNECTION_S, self._close_unused, loop)

    def _close_unused(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes what nobody came back for, as those to engines that are gone."""
        now_s = loop.time()
        for origin, idle in list(self._idle.items()):
            while idle and now_s - idle[0].idle_since_s >= IDLE_CONNECTION_S:
                idle.popleft().close()
            if not idle:
                del self._idle[origin]
        self._sweep = loop.call_later(IDLE_CONNECTION_S, self._close_unused, loop) if self._idle else None


@lru_cache(maxsize=1024)
def _parts(url: str) -> tuple[Origin, str, str]:
    """The origin of a URL, its host and port as a header tells them, and what to ask for."""
    try:
        parts = urlsplit(url)
        secure, host = parts.scheme == "https", parts.hostname or ""
        port = parts.port or (443 if secure else 80)
    except ValueError as error:
        raise LegError("no URL", sent=False) from error
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return (secure, host, port), parts.netloc.rpartition("@")[2], target


def _head(method: str, target: str, host: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    """The head of a request.

    Raises:
        LegError: a header would end it early.
    """
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    head = "\r\n".join(lines)
    if head.count("\n") != len(lines) - 1 or head.count("\r") != len(lines) - 1 or "\0" in head:
        raise LegError("a header holds what no header may", sent=False)
    return head.encode("utf-8", "surrogateescape") + b"\r\n\r\n"
