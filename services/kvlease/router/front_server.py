"""The server of the front: what cannot be read as HTTP is refused in JSON, as all else that is refused."""

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from aiohttp.web_request import BaseRequest

from kvlease.router.errors import error_body
from kvlease.router.turn import JSON_HEADERS
from kvlease.runtime.http_log import what_is_wrong


class FrontRunner(web.AppRunner):
    """Runs an application over connections that answer in JSON what never reaches it."""

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _FrontServer(made.request_handler, request_factory=made.request_factory, **self._kwargs)


class _FrontServer(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is answered, in the shape of the OpenAI API since no path says otherwise; the connection ends.

        Raises:
            ConnectionError: an answer has begun.
        """
        super().handle_error(request, status, exc, message)
        told, code = "the request ended without an answer", "internal_error"
        if isinstance(exc, BadHttpMessage):
            told, code = what_is_wrong(exc), "invalid_request"
        answer = web.Response(status=status, headers=JSON_HEADERS, body=error_body(status, told, code))
        answer.force_close()
        return answer
