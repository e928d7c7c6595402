"""A gRPC server with health, reflection, domain errors as statuses and a graceful stop."""

import ipaddress
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvlease.core.errors import InvalidArgument, KvleaseError
from kvlease.runtime.authorization import AuthorizationInterceptor
from kvlease.runtime.grpc_handlers import Behaviour, wrapped_handler
from kvlease.runtime.metrics import Metrics
from kvlease.runtime.rpc_metrics import MetricsServerInterceptor
from kvlease.runtime.telemetry import NO_TELEMETRY, Telemetry
from kvlease.runtime.tls import Tls
from kvlease.runtime.trace_interceptors import TracingServerInterceptor
from kvlease.wire.errors import abort_with

_log = logging.getLogger(__name__)

MESSAGE_BYTES_MAX = 64 << 20
"""A pin of a 128k token lease answers with 300 kB; the snapshot of a watch carries many records."""

SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a second process on the same port must fail, not share it
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    # Clients commonly ping every 10 s, also without calls; the default policy drops them after two pings.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Answers a handler's domain error with its status. Handlers stream by `context.write`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        return handler and (wrapped_handler(handler, _answering_errors) or handler)


def _answering_errors(behaviour: Behaviour) -> Behaviour:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except KvleaseError as error:
            await abort_with(context, error)

    return call


class GrpcServer:
    """One listening server.

    Args:
        listen: `host:port` (port 0: any free one) or `unix:/path`.
        services: fully qualified names of the services, for health and reflection.
        telemetry: continues the traces of callers.
        tls: callers need a certificate, whose identity decides what they may call; None on a port that only
            trusted processes reach, and on unix sockets.
        metrics: counts and times what is answered.
    """

    def __init__(
        self,
        listen: str,
        services: Sequence[str],
        telemetry: Telemetry = NO_TELEMETRY,
        tls: Tls | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._listen = listen
        self._tls = tls
        self._services = tuple(services)
        self._health = cast(Any, health).aio.HealthServicer()
        tracing = (TracingServerInterceptor(telemetry.tracer),) if telemetry.enabled else ()
        measuring = (MetricsServerInterceptor(metrics),) if metrics is not None else ()
        unix = listen.startswith("unix:")
        guards = () if unix else (AuthorizationInterceptor(checked=tls is not None),)
        self.server = grpc.aio.server(
            interceptors=(*measuring, *tracing, ErrorInterceptor(), *guards), options=SERVER_OPTIONS
        )
        self.address = listen

    def bind(self) -> int:
        """Binds the address; returns the port (0 for a unix socket). Services are added before `start`.

        Raises:
            InvalidArgument: the address cannot be bound.
        """
        if self._tls is None and not is_local(self._listen):
            _log.warning(
                "serves other machines without TLS: whoever reaches the port may call everything (tls_dir)",
                extra={"address": self._listen},
            )
        try:
            if self._tls is None:
                port = self.server.add_insecure_port(self._listen)
            else:
                port = self.server.add_secure_port(self._listen, self._tls.server_credentials())
        except RuntimeError as error:
            raise InvalidArgument(f"cannot listen on {self._listen}: {error}") from error
        if self._listen.startswith("unix:"):
            return 0
        self.address = f"{self._listen.rpartition(':')[0]}:{port}"
        return port

    async def start(self, *, ready: bool = True) -> None:
        """Begins to serve. Not `ready`: the process is healthy, its services only from `tell_ready` on."""
        cast(Any, health_pb2_grpc).add_HealthServicer_to_server(self._health, self.server)
        cast(Any, reflection).enable_server_reflection(
            (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server
        )
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._tell(ready=ready)
        await self.server.start()

    async def tell_ready(self) -> None:
        """Tells whoever asks for the services' health that they can do their work, until `stop`."""
        await self._tell(ready=True)

    async def stop(self, grace_s: float) -> None:
        """Refuses calls from here on, and gives those in flight `grace_s` to end."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)

    async def _tell(self, *, ready: bool) -> None:
        statuses = health_pb2.HealthCheckResponse
        for service in self._services:
            await self._health.set(service, statuses.SERVING if ready else statuses.NOT_SERVING)


def is_local(address: str) -> bool:
    """Whether only this machine reaches a `unix:` or `host:port` address."""
    host = address.rpartition(":")[0].strip("[]")
    if address.startswith("unix:") or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
