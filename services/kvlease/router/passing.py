"""Requests that are no turns: passed to an engine that fits, and its answer back, as they are.

What reaches an engine is the client's own without what is the router's. Paths that operate an engine, that load
adapters, or that carry prompts past the tenant's salt are served to nobody.
"""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass

from aiohttp import web

from kvlease.core.errors import InvalidArgument
from kvlease.core.records import Engine
from kvlease.core.signals import EngineSignal
from kvlease.router.answers import Refused
from kvlease.router.bodies import make_neutral, parse_object
from kvlease.router.client import BodyBounds, HttpClient, read_body
from kvlease.router.dialect import encode, text_of
from kvlease.router.engines import EngineTable
from kvlease.router.headers import answer_headers
from kvlease.router.ports import ClientStalled, EnginePort, EngineReply, LegError
from kvlease.router.reserved import RESERVED_FIELDS

KNOWN_PATHS = frozenset(
    {
        "/tokenize",
        "/detokenize",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/v2/embed",
        "/pooling",
        "/classify",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
    }
)
"""Paths of vLLM's front that compute something for a client, and keep nothing."""

BLOCKED_PATHS = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/chat/completions/batch",  # a list of requests, none of which would have the tenant's salt
    "/v1/kvlease",
    "/v1/realtime",
)
PLAIN_PATH = re.compile(r"(/[A-Za-z0-9_~:@.-]+)+")
"""A path that every server behind reads as it is read here: nothing in it is left to decode or to collapse."""

EXTENDED_NAME = re.compile(rb"[;\s]name\s*\*", re.IGNORECASE)
"""A field's name in the extended notation of RFC 2231, which may be split and escaped."""

FORM_MODEL = re.compile(
    rb'[;\s]name="?model"?[ \t]*\r\n(?:[^\r\n]{1,256}\r\n){0,4}\r\n([^\r\n]{1,256})\r\n', re.IGNORECASE
)
"""The field of a form that names the model, in a group. Bounded: a form may be long and begin such a field in every
line of it."""

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
TRIES = 2


@dataclass(frozen=True, slots=True)
class PassedRequest:
    """What an engine gets."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes | None
    model: str


class PassThrough:
    """Passes requests on.

    Args:
        unknown: also pass paths under /v1 that the router does not know.
    """

    def __init__(self, engines: EngineTable, port: EnginePort, timeout_s: float, *, unknown: bool) -> None:
        self._engines = engines
        self._port = port
        self._timeout_s = timeout_s
        self._unknown = unknown

    def spelled(self, path: str) -> str:
        """A path as engines know it: clients have base URLs that lack /v1, or have it twice or where it is not."""
        bare = path.removeprefix("/v1")
        return next((one for one in (path, "/v1" + path, bare) if one in KNOWN_PATHS), path)

    def takes(self, method: str, path: str) -> bool:
        """Whether requests for a path are passed on."""
        if method not in METHODS or any(path == one or path.startswith(one + "/") for one in BLOCKED_PATHS):
            return False
        if not PLAIN_PATH.fullmatch(path) or "/.." in path or "/./" in path:
            return False
        return path in KNOWN_PATHS or (self._unknown and path.startswith("/v1/"))

    async def run(self, passed: PassedRequest, client: HttpClient) -> None:
        """Answers the client. A request that no engine got is sent to another one, once.

        Raises:
            Refused: no engine answers.
            ClientStalled: the client takes nothing more of an answer that has begun.
        """
        tried: set[str] = set()
        for _ in range(TRIES):
            engine = self._choose(passed.model, tried)
            if engine is None:
                break
            tried.add(engine.holder.engine_id)
            try:
                await self._try(passed, engine, client)
                return
            except LegError as failed:
                self._engines.suspect(engine.holder.engine_id)
                if client.response is not None and client.response.prepared:
                    raise ConnectionError("the engine broke off its answer") from failed
                if failed.sent:
                    raise Refused(502, "the engine gave no answer", "engine_failed") from failed
        raise Refused(503, "no engine serves this", "unavailable")

    def _choose(self, model: str, tried: set[str]) -> Engine | None:
        signals = [one for one in self._engines.signals(model) if one.engine_id not in tried]
        return self._engines.get(min(signals, key=_load).engine_id) if signals else None

    async def _try(self, passed: PassedRequest, engine: Engine, client: HttpClient) -> None:
        headers = {**passed.headers, **self._engines.headers(engine)}
        url = engine.url + passed.path
        with self._engines.running(engine.holder.engine_id):
            async with self._port.call(passed.method, url, headers, passed.body, self._timeout_s) as reply:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await _relay(reply, client)
                except TimeoutError as error:
                    raise ClientStalled from error


async def _relay(reply: EngineReply, client: HttpClient) -> None:
    headers = answer_headers(reply.headers)
    kind = reply.headers.get("Content-Type", "")
    if reply.status >= 400 and not kind.startswith("application/json"):
        await reply.body()
        raise Refused(reply.status, f"the engine answered {reply.status}", "engine_error")
    if kind.startswith("text/event-stream"):
        await client.start(reply.status, headers)
        async for chunk in reply.chunks():
            await client.write(chunk)
        await client.end()
        return
    await client.answer(reply.status, headers, await reply.body())


async def passed_request(
    request: web.Request,
    path: str,
    headers: Mapping[str, str],
    tenant: str,
    bounds: BodyBounds,
    *,
    isolate: bool,
) -> PassedRequest:
    """A client's request as an engine gets it.

    Raises:
        InvalidArgument: its body is neither JSON nor a form, or a form that names what is the router's.
    """
    raw = await read_body(request, bounds)
    # As it came: decoded, it might end the line that it stands in.
    query = f"?{request.rel_url.raw_query_string}" if request.rel_url.raw_query_string else ""
    if not raw:
        return PassedRequest(request.method, path + query, headers, None, "")
    if request.content_type.startswith("multipart/"):
        model = _model_of_form(raw)
        headers = {**headers, "Content-Type": request.headers["Content-Type"]}
        return PassedRequest(request.method, path + query, headers, raw, model)
    body = parse_object(raw)
    try:
        make_neutral(body, tenant, isolate=isolate)
        data = encode(body)
    except UnicodeEncodeError as error:
        raise InvalidArgument("the body holds text that is no valid Unicode") from error
    return PassedRequest(request.method, path + query, headers, data, text_of(body.get("model")))


def _model_of_form(raw: bytes) -> str:
    """The model that a form names, empty without one.

    Raises:
        InvalidArgument: a field is the router's, or may be: a name that has to be decoded is no plain one.
    """
    if any(name.encode() in raw for name in RESERVED_FIELDS):
        raise InvalidArgument("the form has a field that is the router's")
    if EXTENDED_NAME.search(raw):
        raise InvalidArgument("the form has a field with an encoded name")
    named = FORM_MODEL.search(raw)
    return named.group(1).decode(errors="replace") if named else ""


def _load(engine: EngineSignal) -> tuple[bool, bool, bool, int]:
    return (engine.suspect, not engine.registered, engine.draining, engine.running)
