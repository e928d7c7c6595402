"""The HTTP surface: which path is served how, and the client's side of a turn."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web

from kvlease.core.records import EngineRole
from kvlease.router.answers import (
    BASES,
    Answers,
    Handler,
    Refused,
    error_answer,
    json_answer,
    request_id_of,
)
from kvlease.router.bodies import Reading, TurnRequest, parse_turn
from kvlease.router.client import BodyBounds, HttpClient, read_body
from kvlease.router.conversation_api import ConversationApi
from kvlease.router.dialect import Api, text_of
from kvlease.router.headers import CLIENTS_CREDENTIALS, EngineCredentials, engine_headers
from kvlease.router.identity import SESSION_HEADERS, header_id
from kvlease.router.models import Models
from kvlease.router.passing import PassThrough, passed_request
from kvlease.router.ports import ClientStalled
from kvlease.router.response_api import ResponseApi
from kvlease.router.runner import TurnRunner
from kvlease.router.turn import RequestHead, TurnServices
from kvlease.router.unserved import unserved
from kvlease.runtime.identity import Identity

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """What the surface needs to know.

    Attributes:
        body_bytes_max: longest body of a request.
        body_bounds: how long it may take to come.
        session_headers: headers that may name the conversation, the first one present counts.
        isolate_tenants: salt the engines' prefix caches with the tenant.
        engine_credentials: what stands for the caller towards engines.
        strip_prompt_nonces: take nonces out of the head of a prompt.
        pass_unknown_paths: pass paths under /v1 that are not known here to an engine.
        pass_priority: the priority that a client names reaches engines.
        cors_origins: origins of browsers that may read answers; `*`: all.
        passed_timeout_s: bound of a request that is no turn.
    """

    body_bytes_max: int
    body_bounds: BodyBounds
    session_headers: tuple[str, ...] = SESSION_HEADERS
    isolate_tenants: bool = True
    engine_credentials: EngineCredentials = CLIENTS_CREDENTIALS
    strip_prompt_nonces: bool = False
    pass_unknown_paths: bool = True
    pass_priority: bool = False
    cors_origins: tuple[str, ...] = ("*",)
    passed_timeout_s: float = 600.0


class Front:
    """The HTTP application of a router."""

    def __init__(self, services: TurnServices, runner: TurnRunner, options: FrontOptions) -> None:
        self._services = services
        self._runner = runner
        self._options = options
        self._reading = Reading(
            options.isolate_tenants, options.strip_prompt_nonces, services.responses, options.pass_priority
        )
        self._models = Models(services.engines, services.engine_port)
        self._passing = PassThrough(
            services.engines,
            services.engine_port,
            options.passed_timeout_s,
            unknown=options.pass_unknown_paths,
        )

    def application(self) -> web.Application:
        """The application, ready for a server that cancels the handlers of clients that left."""
        answers = Answers(self._services.random, self._options.cors_origins)
        app = web.Application(
            client_max_size=self._options.body_bytes_max, middlewares=[answers.middleware()]
        )
        app.on_response_prepare.append(answers.prepare)
        routes = [web.post(path, self._turn(api)) for api in Api for path in _spellings(api.value)]
        routes += [web.get(path, self._list_models) for path in _spellings("/v1/models")]
        routes += [
            *(web.get(base + "/models/{model:.+}", self._model) for base in BASES),
            web.get("/", self._root),
            web.get("/live", self._live),
            web.get("/health", self._health),
            web.get("/ready", self._health),
            *ConversationApi(self._services, self._tenant, self._options.body_bounds).routes(),
            *ResponseApi(self._services.responses, self._tenant).routes(),
        ]
        app.add_routes(routes)
        app.router.add_route("*", "/{path:.*}", self._other(_methods(routes)))
        return app

    def _turn(self, api: Api) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            tenant = self._tenant(request)
            with self._services.in_flight.request():
                raw = await read_body(request, self._options.body_bounds)
                from_header = header_id(request.headers, self._options.session_headers)
                turn = parse_turn(api, raw, tenant, from_header, self._reading)
                head = RequestHead(request_id_of(), self._engine_headers(request), api)
                return await self._run(turn, head, request)

        return handle

    async def _run(self, turn: TurnRequest, head: RequestHead, request: web.Request) -> web.StreamResponse:
        client = HttpClient(request)
        try:
            await self._runner.run(turn, head, client)
        except ConnectionError:
            log.info("the client left", extra={"request_id": head.request_id})
        except ClientStalled:
            log.info("the client takes no more of its answer", extra={"request_id": head.request_id})
            client.leave()
        except Exception as error:
            log.exception("a turn failed", extra={"request_id": head.request_id})
            if client.response is not None and client.response.prepared:
                raise ConnectionError("the answer broke off") from error
            client.response = None
        return client.response or error_answer(
            request, 500, "the turn ended without an answer", "internal_error"
        )

    def _tenant(self, request: web.Request) -> str:
        """Whom a request belongs to. Raises `NotOwner` when nobody that is served here."""
        return self._services.tenancy.tenant(request.headers, request.remote or "")

    def _engine_headers(self, request: web.Request) -> dict[str, str]:
        """The headers of a leg.

        An engine refuses or mixes up two requests under one id, which a client's retry would bring.
        """
        leg_id = f"{request_id_of()}-{self._services.random.text_id()[:8]}"
        return engine_headers(request.headers.items(), leg_id, self._options.engine_credentials)

    def _other(self, methods: dict[str, set[str]]) -> Handler:
        """Whatever has no route of its own: passed to an engine, or said not to be served."""

        async def handle(request: web.Request) -> web.StreamResponse:
            tenant = self._tenant(request)
            path = request.path.rstrip("/") or "/"
            if path in methods:
                raise web.HTTPMethodNotAllowed(request.method, methods[path])
            path = self._passing.spelled(path)
            if not self._passing.takes(request.method, path):
                raise Refused(404, f"{request.method} {request.path} is not served here", "not_found")
            headers = self._engine_headers(request)
            bounds, isolate = self._options.body_bounds, self._options.isolate_tenants
            client = HttpClient(request)
            with self._services.in_flight.request():
                passed = await passed_request(request, path, headers, tenant, bounds, isolate=isolate)
                try:
                    await self._passing.run(passed, client)
                except ClientStalled:
                    log.info("the client takes no more of its answer", extra={"request_id": request_id_of()})
                    client.leave()
            return client.response or error_answer(request, 502, "the engine gave no answer", "engine_failed")

        return handle

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        self._tenant(request)
        models = await self._models.merged(self._engine_headers(request))
        return json_answer({"object": "list", "data": models})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        self._tenant(request)
        name = request.match_info["model"].rstrip("/")
        models = await self._models.merged(self._engine_headers(request))
        found = next((model for model in models if text_of(model.get("id")) == name), None)
        if found is None:
            raise Refused(404, f"no engine serves the model {name!r}", "model_not_found")
        return json_answer(found)

    async def _root(self, _request: web.Request) -> web.StreamResponse:
        """Agents ask it to see whether anybody is there."""
        return json_answer({"service": Identity.ROUTER.value})

    async def _live(self, _request: web.Request) -> web.StreamResponse:
        """The process serves; restarting it helps nobody."""
        return json_answer({"status": "ok"})

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        """Whether turns can be served: 503 until a decode engine takes them."""
        engines = self._services.engines
        counts = {role.value: len(engines.all(role)) for role in EngineRole}
        why = unserved(engine.draining for engine in engines.all(EngineRole.DECODE))
        body = {
            "service": Identity.ROUTER.value,
            "status": "ok" if why is None else why.message,
            "engines": counts,
            "recorded_leases": self._services.conversations.recorded_leases,
        }
        return json_answer(body, 200 if why is None else 503)


def _spellings(path: str) -> tuple[str, ...]:
    """A path as clients write it: with a base URL that lacks /v1 or has it twice, with a slash at the end."""
    bare = path.removeprefix("/v1")
    return tuple(base + bare + slash for base in BASES for slash in ("", "/"))


def _methods(routes: Iterable[web.RouteDef]) -> dict[str, set[str]]:
    """The methods that a plain path has."""
    methods: dict[str, set[str]] = {}
    for route in routes:
        if "{" not in route.path:
            methods.setdefault(route.path.rstrip("/") or "/", set()).add(route.method)
    return methods
