"""The client's side of one turn over aiohttp."""

import asyncio
from collections.abc import Mapping

from aiohttp import StreamReader, web

from kvlease.core.values import value


@value
class BodyBounds:
    """How long a body may take to come: it is held in full, so that a client which never ends it is given up.

    Attributes:
        idle_s: at most this long without a byte of it.
        whole_s: and this long from its head to its end, also for one that trickles in.
    """

    idle_s: float
    whole_s: float


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

    def leave(self) -> None:
        """Closes the connection behind what was sent, so that nobody takes that for a whole answer."""
        self._request.protocol.force_close()

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Keeps a whole answer for the server to send."""
        self.response = web.Response(status=status, headers=headers, body=body)


async def read_body(request: web.Request, bounds: BodyBounds) -> bytes:
    """The whole body, which is nobody's but the caller's: aiohttp's own `read` keeps it with the connection.

    Raises:
        web.HTTPRequestEntityTooLarge: it is longer than the application takes.
        web.HTTPRequestTimeout: it did not come within its bounds.
    """
    parts: list[bytes] = []
    size, size_max = 0, request.client_max_size
    if (request.content_length or 0) > size_max:  # it says so itself: nobody waits for it to come
        raise web.HTTPRequestEntityTooLarge(max_size=size_max, actual_size=request.content_length or 0)
    content = request.content
    end_s = asyncio.get_running_loop().time() + bounds.whole_s
    while not content.at_eof():
        part = await content.readany() if content.is_eof() else await _next_part(content, bounds, end_s)
        size += len(part)
        if size > size_max:
            raise web.HTTPRequestEntityTooLarge(max_size=size_max, actual_size=size)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def _next_part(content: StreamReader, bounds: BodyBounds, end_s: float) -> bytes:
    idle_end_s = asyncio.get_running_loop().time() + bounds.idle_s
    try:
        async with asyncio.timeout_at(min(idle_end_s, end_s)):
            return await content.readany()
    except TimeoutError as error:
        why = (
            f"nothing of the body came for {bounds.idle_s:g} s"
            if idle_end_s < end_s
            else f"the body did not come in full within {bounds.whole_s:g} s"
        )
        raise web.HTTPRequestTimeout(reason=why) from error
