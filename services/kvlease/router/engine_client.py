"""HTTP to engines over aiohttp."""

import io
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType

import aiohttp

from kvlease.router.ports import EngineReply, LegError
from kvlease.runtime.tls import Tls

CONNECT_TIMEOUT_S = 2.0
IDLE_CONNECTION_S = 3.0
"""Shorter than an engine's own (uvicorn closes after 5 s).

A request never meets a connection that is being closed.
"""
READ_BYTES_MAX = 1 << 16


class _Reply:
    """An answer whose body is read on demand."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.headers: Mapping[str, str] = response.headers

    async def body(self) -> bytes:
        """The whole body."""
        try:
            return await self._response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise LegError(f"the answer broke off: {type(error).__name__}", sent=True) from error

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        try:
            async for chunk in self._response.content.iter_any():
                yield chunk
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise LegError(f"the answer broke off: {type(error).__name__}", sent=True) from error


class HttpEngines:
    """An `EnginePort` with one connection pool for all engines; a context that closes it.

    Args:
        tls: what https engines are checked against, by the host of their URL, and shown.
    """

    def __init__(self, tls: Tls | None = None) -> None:
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "HttpEngines":
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=READ_BYTES_MAX,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> AsyncGenerator[EngineReply, None]:
        """Sends a request. Entering raises `LegError`; leaving early closes the connection."""
        if self._session is None:
            raise LegError("the client is closed", sent=False)
        data = None if body is None else io.BytesIO(body)  # written in pieces: a body has up to 32 MB
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        try:
            response = await self._session.request(
                method,
                url,
                headers=headers,
                data=data,
                timeout=timeout,
                allow_redirects=False,
                ssl=True if self._tls is None else self._tls.client_context(),
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise LegError(f"no connection: {type(error).__name__}", sent=False) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise LegError(f"no answer: {type(error).__name__}", sent=True) from error
        try:
            yield _Reply(response)
        finally:
            response.close() if not response.content.at_eof() else response.release()
