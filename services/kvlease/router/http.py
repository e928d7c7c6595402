"""The OpenAI-compatible surface: routes, errors in OpenAI's shape, and the client's side of a turn."""

import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import web

from kvlease.core.errors import InvalidArgument, NotOwner
from kvlease.core.ids import lease_id_to_hex
from kvlease.core.records import EngineRole
from kvlease.router.bodies import Api, TurnRequest, encode, error_body, parse_turn
from kvlease.router.conversations import Conversation, ConversationTable, TurnRecord
from kvlease.router.headers import CLIENTS_CREDENTIALS, EngineCredentials, engine_headers, request_id_from
from kvlease.router.ports import LegError
from kvlease.router.purge import release_tenant
from kvlease.router.runner import TurnRunner
from kvlease.router.turn import JSON_HEADERS, RequestHead, TurnServices

MODELS_TIMEOUT_S = 5.0
ALLOWED_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """What the surface needs to know.

    Attributes:
        body_bytes_max: longest body of a request.
        session_headers: headers that may name the conversation, the first one present counts.
        isolate_tenants: salt the engines' prefix caches with the tenant.
        engine_credentials: what stands for the caller towards engines.
    """

    body_bytes_max: int
    session_headers: tuple[str, ...]
    isolate_tenants: bool
    engine_credentials: EngineCredentials = CLIENTS_CREDENTIALS


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


class Front:
    """The HTTP application of a router."""

    def __init__(self, services: TurnServices, runner: TurnRunner, options: FrontOptions) -> None:
        self._services = services
        self._runner = runner
        self._options = options

    def application(self) -> web.Application:
        """The application, ready for a server that cancels the handlers of clients that left."""
        app = web.Application(client_max_size=self._options.body_bytes_max, middlewares=[_json_errors])
        for api in Api:
            app.router.add_post(api.value, self._turn(api))
            app.router.add_post(api.value + "/", self._turn(api))
        for path in ("/v1/models", "/v1/models/"):
            app.router.add_get(path, self._models)
        app.router.add_get("/health", self._health)
        conversation = "/v1/kvlease/conversations/{conversation_id}"
        app.router.add_get(conversation, self._conversation)
        app.router.add_post(conversation + "/renew", self._renew)
        app.router.add_post(conversation + "/release", self._release)
        app.router.add_delete("/v1/kvlease/tenants/{tenant}/leases", self._release_tenant)
        return app

    def _turn(self, api: Api) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request_id = request_id_from(request.headers.get("X-Request-Id"), self._services.random.text_id())
            tenant = self._tenant(request)
            raw = await request.read()
            try:
                turn = parse_turn(
                    api,
                    raw,
                    tenant,
                    self._header_id(request),
                    isolate=self._options.isolate_tenants,
                )
            except InvalidArgument as error:
                return _error(400, str(error), {"X-Request-Id": request_id})
            # An engine refuses or mixes up two requests under one id, which a client's retry would bring.
            leg_id = f"{request_id}-{self._services.random.text_id()[:8]}"
            head = RequestHead(request_id, self._engine_headers(request, leg_id))
            return await self._run(turn, head, HttpClient(request))

        return handle

    async def _run(self, turn: TurnRequest, head: RequestHead, client: HttpClient) -> web.StreamResponse:
        try:
            await self._runner.run(turn, head, client)
        except ConnectionError:
            log.info("the client left", extra={"request_id": head.request_id})
        except Exception:
            log.exception("a turn failed", extra={"request_id": head.request_id})
            if client.response is not None and client.response.prepared:
                raise  # the connection is closed, so that nobody takes what was sent for a whole answer
            client.response = None
        return client.response or _error(
            500, "the turn ended without an answer", {"X-Request-Id": head.request_id}
        )

    def _tenant(self, request: web.Request) -> str:
        """Whom a request belongs to. Raises `NotOwner` when nobody that is served here."""
        return self._services.tenancy.tenant(request.headers, request.remote or "")

    def _engine_headers(self, request: web.Request, leg_id: str) -> dict[str, str]:
        return engine_headers(request.headers.items(), leg_id, self._options.engine_credentials)

    def _header_id(self, request: web.Request) -> str:
        named = (request.headers.get(name) for name in self._options.session_headers)
        return next((value for value in named if value), "")

    async def _models(self, request: web.Request) -> web.StreamResponse:
        """What a decode engine says of its models (adapters among them), else what the engines registered."""
        self._tenant(request)
        engines = self._services.engines
        headers = self._engine_headers(request, self._services.random.text_id())
        for engine in engines.all(EngineRole.DECODE) or engines.all():
            url = engine.url + "/v1/models"
            try:
                async with self._services.engine_port.call(
                    "GET", url, headers, None, MODELS_TIMEOUT_S
                ) as reply:
                    return web.Response(status=reply.status, headers=JSON_HEADERS, body=await reply.body())
            except LegError:
                engines.suspect(engine.holder.engine_id)
        names = sorted({engine.model for engine in engines.all()})
        data = [{"id": name, "object": "model", "owned_by": "kvlease"} for name in names]
        return _json({"object": "list", "data": data})

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        counts = {role.value: len(self._services.engines.all(role)) for role in EngineRole}
        able = counts[EngineRole.DECODE.value] > 0
        body = {
            "status": "ok" if able else "no decode engine is registered",
            "engines": counts,
            "recorded_leases": self._services.conversations.recorded_leases,
        }
        return _json(body, 200 if able else 503)

    async def _conversation(self, request: web.Request) -> web.StreamResponse:
        conversation = self._find(request)
        return _json(conversation_json(conversation, self._services.conversations))

    async def _renew(self, request: web.Request) -> web.StreamResponse:
        """The client keeps its conversation for `duration_s` seconds more, for as long as may be without it."""
        conversation = self._find(request)
        try:
            duration_s = _duration_s(await request.read(), self._services.policy.gap_cap_s)
        except InvalidArgument as error:
            return _error(400, str(error))
        live = self._services.conversations.keep_live(conversation, duration_s)
        if live:
            self._services.heartbeat.wake()
        return _json({"conversation_id": conversation.conversation_id, "live": live})

    async def _release(self, request: web.Request) -> web.StreamResponse:
        """The client is done with its conversation: its lease ends at the holder at once."""
        conversation = self._find(request)
        lease = self._services.conversations.release(conversation)
        released = lease is not None and (
            await self._services.registry.release(lease.lease_id, lease.holder.engine_id, conversation.tenant)
            is None
        )
        return _json({"conversation_id": conversation.conversation_id, "released": released})

    async def _release_tenant(self, request: web.Request) -> web.StreamResponse:
        """Releases every lease of a tenant: the caller's own, also as `self`, or anybody's for an admin."""
        caller, tenant = self._tenant(request), request.match_info["tenant"]
        tenant = caller if tenant == "self" else tenant
        if tenant != caller and not self._services.tenancy.allowance(caller).admin:
            return _error(403, "only an admin releases the leases of another tenant")
        released = await release_tenant(self._services, tenant)
        return _json({"tenant": tenant, "leases_released": released})

    def _find(self, request: web.Request) -> Conversation:
        """The tenant's conversation that a path names.

        Raises:
            _NoConversation: there is none.
        """
        conversation_id = request.match_info["conversation_id"]
        conversation = self._services.conversations.find(self._tenant(request), conversation_id)
        if conversation is None:
            raise _NoConversation
        return conversation


def conversation_json(conversation: Conversation, table: ConversationTable) -> dict[str, Any]:
    """What operators, and `kvlease dev --check`, read of a conversation."""
    lease = conversation.lease
    return {
        "conversation_id": conversation.conversation_id,
        "lease": {
            "lease_id": lease_id_to_hex(lease.lease_id) if lease else None,
            "state": table.belief(conversation),
            "engine_id": lease.holder.engine_id if lease else None,
        },
        "turns": [_turn_json(record) for record in conversation.turns],
    }


def _turn_json(record: TurnRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "path": record.path.value,
        "reason": record.reason.value,
        "ended": record.ended,
        "lease_id": lease_id_to_hex(record.lease_id) if record.lease_id else None,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "reused_tokens": record.reused_tokens,
        "read_tokens": record.read_tokens,
        "local_tokens": record.local_tokens,
        "verified_tokens": record.verified_tokens,
        "outcome": record.outcome,
        "ttft_ms": None if record.ttft_s is None else round(record.ttft_s * 1e3, 3),
        "prefill_engine_id": record.prefill_engine_id or None,
        "decode_engine_id": record.decode_engine_id or None,
    }


class _NoConversation(Exception):
    """A path names a conversation that the tenant does not have."""


def _duration_s(raw: bytes, cap_s: float) -> float:
    """The `duration_s` of a body, at most the cap; the cap without one.

    Raises:
        InvalidArgument: it is not a number of seconds.
    """
    if not raw:
        return cap_s
    try:
        body: object = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("the body is JSON, or empty") from error
    if not isinstance(body, dict):
        raise InvalidArgument("the body is an object, or empty")
    value = cast("dict[str, Any]", body).get("duration_s", cap_s)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InvalidArgument("duration_s is a number of seconds above 0")
    return float(min(value, cap_s))


def _json(body: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(status=status, headers=JSON_HEADERS, body=encode(body))


def _error(
    status: int, message: str, headers: Mapping[str, str] | None = None, code: str = ""
) -> web.Response:
    body = error_body(status, message, code)
    return web.Response(status=status, headers={**(headers or {}), **JSON_HEADERS}, body=body)


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers in OpenAI's shape whatever the server itself refuses."""
    if request.method == "OPTIONS":
        return web.Response(status=204, headers={"Allow": ALLOWED_METHODS})
    try:
        return await handler(request)
    except NotOwner as error:
        # Whoever is not known is told nothing else, and before anything of the request was looked at.
        headers = {"WWW-Authenticate": "Bearer"}
        return _error(401, str(error), headers, code="invalid_api_key")
    except _NoConversation:
        return _error(404, "no such conversation")
    except web.HTTPNotFound:
        return _error(404, f"{request.method} {request.path} is not served here")
    except web.HTTPMethodNotAllowed as error:
        allow = ", ".join(sorted(error.allowed_methods))
        return _error(405, f"{request.method} is not allowed here", {"Allow": allow})
    except web.HTTPRequestEntityTooLarge:
        return _error(413, "the body is too long")
    except web.HTTPException as error:
        return _error(error.status, error.reason)
