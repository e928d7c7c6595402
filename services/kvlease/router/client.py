"""The client's side of one turn over aiohttp."""

import asyncio
from collections.abc import Mapping

from aiohttp import StreamReader, web

BODY_IDLE_S = 60.0
"""A client that stops in the middle of its body for so long is given up: it would hold what has come for ever."""


class HttpClient:
    """The `ClientPort` of one request."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response: web.StreamResponse | None = None

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends the head of a streamed answer."""
        self.response = web.StreamResponse(status=status, headers=headers)
        await self.response.prepare(self._request)

    async def write(self, data: bytes) -> None:
        """Sends a part; waits while the client is slow."""
        if self.response is not None:
            await self.response.write(data)

    async def end(self) -> None:
        """Ends a streamed answer."""
        if self.response is not None:
            await self.response.write_eof()

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Keeps a whole answer for the server to send."""
        self.response = web.Response(status=status, headers=headers, body=body)


async def read_body(request: web.Request) -> bytes:
    """The whole body, which is nobody's but the caller's: aiohttp's own `read` keeps it with the connection.

    Raises:
        web.HTTPRequestEntityTooLarge: it is longer than the application takes.
        web.HTTPRequestTimeout: nothing more of it came for `BODY_IDLE_S`.
    """
    parts: list[bytes] = []
    size, size_max = 0, request.client_max_size
    if (request.content_length or 0) > size_max:  # it says so itself: nobody waits for it to come
        raise web.HTTPRequestEntityTooLarge(max_size=size_max, actual_size=request.content_length or 0)
    content = request.content
    while not content.at_eof():
        part = await content.readany() if content.is_eof() else await _next_part(content)
        size += len(part)
        if size > size_max:
            raise web.HTTPRequestEntityTooLarge(max_size=size_max, actual_size=size)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _next_part(content: StreamReader) -> bytes:
    try:
        async with asyncio.timeout(BODY_IDLE_S):
            return await content.readany()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(reason="the body did not come in time") from error
