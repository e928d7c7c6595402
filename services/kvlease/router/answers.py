"""What every answer has in common: JSON, errors in the shape of their API, request ids, and CORS."""

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvlease.core.errors import InvalidArgument, NotOwner
from kvlease.router.dialect import Api, encode_answer
from kvlease.router.errors import error_body
from kvlease.router.headers import request_id_from
from kvlease.router.ports import RandomPort
from kvlease.router.responses import UnknownResponse
from kvlease.router.turn import JSON_HEADERS

ALLOWED_METHODS = "DELETE, GET, HEAD, OPTIONS, POST"
EXPOSED_HEADERS = "Retry-After, X-Conversation-Id, X-Kvlease-Lease, X-Kvlease-Route, X-Request-Id, Request-Id"
PREFLIGHT_S = 86400

BASES = ("/v1", "", "/v1/v1")
"""How paths begin: clients have base URLs that lack /v1, or have it twice."""

log = logging.getLogger(__name__)
_request_id: ContextVar[str] = ContextVar("request_id")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refused(Exception):
    """A request is answered with an error.

    Attributes:
        code: the machine-readable reason.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def json_answer(body: Mapping[str, Any], status: int = 200) -> web.Response:
    """A JSON object as an answer."""
    return web.Response(status=status, headers=JSON_HEADERS, body=encode_answer(body))


def error_answer(
    request: web.Request,
    status: int,
    message: str,
    code: str,
    headers: Mapping[str, str] | None = None,
    param: str | None = None,
) -> web.Response:
    """An error in the shape of the API that the request speaks."""
    body = error_body(status, message, code, api_of(request), param)
    return web.Response(status=status, headers={**(headers or {}), **JSON_HEADERS}, body=body)


def api_of(request: web.Request) -> Api:
    """The API that a request speaks, by its path; Anthropic's clients name a version everywhere."""
    path = request.path.rstrip("/")
    if "/messages" in path or "anthropic-version" in request.headers:
        return Api.MESSAGES
    return Api.RESPONSES if "/responses" in path else Api.CHAT


def request_id_of() -> str:
    """The id that the client gave the request that is handled here, else the one minted for it."""
    return _request_id.get()


class Answers:
    """What goes round every handler.

    Args:
        origins: origins of browsers that may read answers; `*`: all of them.
    """

    def __init__(self, random: RandomPort, origins: tuple[str, ...]) -> None:
        self._random = random
        self._origins = origins

    async def prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Adds to the head of an answer what every answer has."""
        headers = response.headers
        request_id = _request_id.get("")
        if request_id:
            headers.setdefault("X-Request-Id", request_id)
            if api_of(request) is Api.MESSAGES:
                headers.setdefault("Request-Id", request_id)
        headers.update(self._cors(request))

    def _cors(self, request: web.Request) -> dict[str, str]:
        origin = request.headers.get("Origin", "")
        if not origin or not ("*" in self._origins or origin in self._origins):
            return {}
        allowed = {"Access-Control-Allow-Origin": "*"}
        if "*" not in self._origins:
            allowed = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        return {**allowed, "Access-Control-Expose-Headers": EXPOSED_HEADERS}

    def preflight(self, request: web.Request) -> web.Response:
        """What a browser asks before it sends a request."""
        headers = {"Allow": ALLOWED_METHODS}
        if self._cors(request):
            headers["Access-Control-Allow-Methods"] = ALLOWED_METHODS
            headers["Access-Control-Allow-Headers"] = request.headers.get(
                "Access-Control-Request-Headers", "*"
            )
            headers["Access-Control-Max-Age"] = str(PREFLIGHT_S)
        return web.Response(status=204, headers=headers)

    def middleware(self) -> Middleware:
        """Answers preflights, and says whatever is refused in the shape of its API."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            given = request.headers.get("X-Request-Id")
            _request_id.set(request_id_from(given, self._random.text_id()))
            if request.method == "OPTIONS":
                return self.preflight(request)
            try:
                return await handler(request)
            except (Refused, InvalidArgument, NotOwner, UnknownResponse, web.HTTPException) as error:
                return _refusal(request, error)
            except web.RequestPayloadError:
                return error_answer(
                    request, 400, "the body cannot be read as it is encoded", "invalid_request"
                )
            except ConnectionError:
                raise  # the answer has begun: the connection is closed, so that nobody takes it for a whole one
            except Exception:
                log.exception("a request failed", extra={"request_id": request_id_of()})
                return error_answer(request, 500, "the request ended without an answer", "internal_error")

        return answer


def _refusal(request: web.Request, error: Exception) -> web.Response:
    if isinstance(error, Refused):
        return error_answer(request, error.status, str(error), error.code)
    if isinstance(error, NotOwner):
        # Whoever is not known is told nothing else, and before anything of the request was looked at.
        headers = {"WWW-Authenticate": "Bearer"}
        return error_answer(request, 401, str(error), "invalid_api_key", headers)
    if isinstance(error, UnknownResponse):
        message = f"Response with id {error.response_id!r} not found. Send the history instead."
        code = "previous_response_not_found"
        return error_answer(request, 404, message, code, param="previous_response_id")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allow = {"Allow": ", ".join(sorted(error.allowed_methods))}
        message = f"{request.method} is not allowed here"
        return error_answer(request, 405, message, "method_not_allowed", allow)
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return error_answer(request, 413, "the body is too long", "body_too_long")
    if isinstance(error, web.HTTPException):
        return error_answer(request, error.status, error.reason, "invalid_request")
    return error_answer(request, 400, str(error), "invalid_request")
