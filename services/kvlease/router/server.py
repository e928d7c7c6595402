"""A router with everything that runs in it, started and stopped as a whole."""

import asyncio
import logging
import math
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web

from kvlease.core.clock import Clock
from kvlease.core.errors import InvalidArgument
from kvlease.router.assembly import lasting_tasks, make_services
from kvlease.router.client import BodyBounds
from kvlease.router.config import RouterConfig
from kvlease.router.engine_client import HttpEngines
from kvlease.router.front_server import FrontRunner
from kvlease.router.http import Front, FrontOptions
from kvlease.router.measured import MeasuredRegistry, count_answers
from kvlease.router.ports import RandomPort, RegistryPort
from kvlease.router.randomness import SystemRandom
from kvlease.router.registry_client import GrpcRegistry
from kvlease.router.reload import Reloader, make_reuse_rules, make_tenancy
from kvlease.router.routing_service import RoutingServicer
from kvlease.router.runner import TurnRunner
from kvlease.router.tracing import TracedRegistry, TurnTracing
from kvlease.router.turn import TurnServices
from kvlease.runtime.admin import AdminServer
from kvlease.runtime.grpc_client import Channels
from kvlease.runtime.grpc_server import GrpcServer
from kvlease.runtime.http_log import server_logger
from kvlease.runtime.identity import Identity
from kvlease.runtime.metrics import Metrics
from kvlease.runtime.telemetry import NO_TELEMETRY, Telemetry, make_telemetry
from kvlease.runtime.tls import Tls, make_tls
from kvlease.v1 import routing_pb2, routing_pb2_grpc

CLOSE_S = 0.5
"""aiohttp waits so long for handlers to end, and as long again for those that it cancelled: what was in flight had
its time before."""

log = logging.getLogger(__name__)


class RouterServer:
    """One router.

    After `start`, `url` is the base of the OpenAI API, `grpc_address` the RoutingService's, and `admin_url` the
    base of its metrics.
    """

    def __init__(
        self,
        config: RouterConfig,
        clock: Clock,
        registry: RegistryPort,
        random: RandomPort | None = None,
        telemetry: Telemetry = NO_TELEMETRY,
        tls: Tls | None = None,
    ) -> None:
        self._config = config
        self._tls = tls
        self._clock = clock
        self._telemetry = telemetry
        self._metrics = Metrics("router")
        measured = MeasuredRegistry(registry, self._metrics, clock)
        self._registry = TracedRegistry(measured, telemetry.tracer) if telemetry.enabled else measured
        self._random = random or SystemRandom()
        self._exit = AsyncExitStack()
        self._reloader: Reloader | None = None
        self._stop_by_s = math.inf
        self.url = ""
        self.grpc_address = ""
        self.admin_url = ""

    @classmethod
    def connected(cls, config: RouterConfig, clock: Clock) -> "RouterServer":
        """A router whose registries are those at `config.registry`."""
        telemetry = make_telemetry("kvlease-router", config)
        tls = make_tls(config)
        channels = Channels(Identity.REGISTRY, telemetry, tls)
        session = SystemRandom().text_id()
        registry = GrpcRegistry(
            channels, config.registries(), session, config.renewal_policy(), config.registry_call_s
        )
        server = cls(config, clock, registry, telemetry=telemetry, tls=tls)
        server._exit.push_async_callback(telemetry.close)
        server._exit.push_async_callback(channels.close)
        return server

    async def start(self) -> None:
        """Serves once this returns; engines become known as the registry's watch tells them.

        Raises:
            InvalidArgument: an address cannot be bound, or the keys file makes no sense.
        """
        try:
            await self._start_admin()
            engine_port = await self._exit.enter_async_context(HttpEngines(self._tls))
            tracing = TurnTracing(self._telemetry.tracer)
            tenancy = make_tenancy(self._config)
            reuse = make_reuse_rules(self._config)
            services = make_services(
                self._config,
                self._clock,
                self._registry,
                engine_port,
                self._random,
                tracing,
                tenancy=tenancy,
                reuse=reuse,
                metrics=self._metrics,
            )
            self._reloader = Reloader(self._config, services.limits, tenancy, reuse)
            self._exit.push_async_callback(services.background.close)
            self._exit.callback(services.decisions.close)
            self._start_tasks([*lasting_tasks(services), self._reloader.watch_files()])
            await self._start_grpc(services)
            await self._start_http(services)
        except BaseException:
            await self.stop()
            raise
        log.info("router serves", extra={"url": self.url, "grpc": self.grpc_address, "admin": self.admin_url})

    async def stop(self) -> None:
        """Refuses requests, lets turns in flight end within the grace, then stops everything. Idempotent.

        Turns that have not ended by then end with an error.
        """
        self._stop_by_s = min(self._stop_by_s, self._clock.now_s() + self._config.stop_grace_s)
        await self._exit.aclose()

    def reload(self, config: RouterConfig) -> None:
        """Takes limits and keys anew; what makes no sense changes nothing. Turns in flight go on."""
        if self._reloader is not None:
            self._reloader.reload(config)

    def _grace_left_s(self) -> float:
        return max(0.0, self._stop_by_s - self._clock.now_s())

    def _start_tasks(self, lasting: list[Coroutine[Any, Any, None]]) -> None:
        """The tasks that last as long as the router; one that fails is a bug, and says so in the log."""
        tasks = [asyncio.create_task(work) for work in lasting]
        for task in tasks:
            task.add_done_callback(_log_failure)

        async def stop_tasks() -> None:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._exit.push_async_callback(stop_tasks)

    async def _start_admin(self) -> None:
        admin = AdminServer(self._config, self._metrics, self._tls)
        await admin.start()
        self._exit.push_async_callback(admin.stop)
        self.admin_url = admin.url

    async def _start_grpc(self, services: TurnServices) -> None:
        name = routing_pb2.DESCRIPTOR.services_by_name["RoutingService"].full_name
        server = GrpcServer(self._config.grpc_listen, [name], self._telemetry, self._tls, self._metrics)
        servicer = RoutingServicer(services)
        routing_pb2_grpc.add_RoutingServiceServicer_to_server(servicer, server.server)
        server.bind()

        async def stop_server() -> None:
            await server.stop(self._grace_left_s())

        self._exit.push_async_callback(stop_server)
        await server.start()
        self.grpc_address = server.address

    async def _start_http(self, services: TurnServices) -> None:
        config = self._config
        options = FrontOptions(
            body_bytes_max=config.body_bytes_max,
            body_bounds=BodyBounds(config.body_idle_s, config.body_timeout_s),
            session_headers=_listed(config.session_headers),
            isolate_tenants=config.isolate_tenants,
            engine_credentials=config.engine_credentials(),
            strip_prompt_nonces=config.strip_prompt_nonces,
            pass_unknown_paths=config.pass_unknown_paths,
            pass_priority=config.pass_priority,
            cors_origins=_listed(config.cors_origins),
            passed_timeout_s=config.turn_timeout_s,
        )
        app = Front(services, TurnRunner(services), options).application()
        app.on_response_prepare.append(count_answers(self._metrics))

        async def end_requests(_app: web.Application) -> None:
            await services.in_flight.end(self._grace_left_s())

        app.on_shutdown.append(end_requests)  # nobody can connect any more
        runner = FrontRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=CLOSE_S,
            logger=server_logger,
        )
        await runner.setup()
        self._exit.push_async_callback(runner.cleanup)
        host, _, port = config.listen.rpartition(":")
        # Clients show a key of the API, no certificate: they are no part of the fleet.
        ssl_context = None if self._tls is None else self._tls.server_context(clients_have_certificates=False)
        site = web.TCPSite(
            runner, host, int(port), ssl_context=ssl_context, reuse_port=config.share_listen or None
        )
        try:
            await site.start()
        except OSError as error:
            raise InvalidArgument(f"cannot listen on {config.listen}: {error}") from error
        bound_host, bound_port = runner.addresses[0][:2]
        scheme = "http" if ssl_context is None else "https"
        self.url = f"{scheme}://{f'[{bound_host}]' if ':' in bound_host else bound_host}:{bound_port}"


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a task of the router ended", exc_info=task.exception())


def _listed(value: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in value.split(",") if item.strip())
