"""A sidecar with its two servers: a unix socket for connectors, TCP for registries and other sidecars."""

import asyncio
import logging
from contextlib import suppress

from kvlease.core.clock import Clock
from kvlease.core.errors import StoreUnavailable
from kvlease.runtime.admin import AdminServer
from kvlease.runtime.grpc_server import GrpcServer
from kvlease.runtime.measured_sidecars import MeasuredSidecars
from kvlease.runtime.metric_catalogue import CONNECTOR_CALL_SECONDS
from kvlease.runtime.metrics import CallTimer, Metrics
from kvlease.runtime.sidecars import GrpcSidecars
from kvlease.runtime.telemetry import make_telemetry
from kvlease.runtime.tls import make_tls
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.connector_server import ConnectorServicer
from kvlease.sidecar.connector_socket import ConnectorSocket
from kvlease.sidecar.metrics import EngineGauges, HandshakeTimes, LeaseEndings
from kvlease.sidecar.service import SidecarServicer
from kvlease.sidecar.sidecar import Sidecar
from kvlease.sidecar.warming import Warming
from kvlease.store.measured import MeasuredStore
from kvlease.store.port import Store
from kvlease.v1 import connector_pb2, connector_pb2_grpc, sidecar_pb2, sidecar_pb2_grpc

RETRY_S = 0.5
"""Pause before a store that did not answer is asked again."""

_log = logging.getLogger(__name__)


class SidecarServer:
    """One sidecar, started and stopped as a whole.

    After `start`, `address` is where others reach it, `socket_path` where connectors attach, and `admin_url`
    the base of its metrics.
    """

    def __init__(self, config: SidecarConfig, store: Store, clock: Clock) -> None:
        self._config = config
        self._store = store
        self._clock = clock
        self._telemetry = make_telemetry("kvlease-sidecar", config)
        self._tls = make_tls(config)
        self._metrics = Metrics("sidecar")
        self._admin = AdminServer(config, self._metrics, self._tls)
        self._peers = MeasuredSidecars(GrpcSidecars(self._telemetry, self._tls), self._metrics)
        self._sidecar: Sidecar | None = None
        self._warming: Warming | None = None
        self._servers: list[GrpcServer] = []
        self._readiness: asyncio.Task[None] | None = None
        self.address = ""
        self._socket = ConnectorSocket(config.socket_dir)
        self.socket_path = self._socket.path

    @property
    def admin_url(self) -> str:
        """Base of the metrics."""
        return self._admin.url

    async def start(self) -> None:
        """Serves others first, then lets connectors attach; its health tells so once the store has answered.

        Raises:
            InvalidArgument: an address cannot be bound.
        """
        await self._admin.start()
        public = GrpcServer(
            self._config.listen,
            [sidecar_pb2.DESCRIPTOR.services_by_name["SidecarService"].full_name],
            self._telemetry,
            self._tls,
            self._metrics,
        )
        port = public.bind()
        self.address = self._advertised(port)
        store, ended = MeasuredStore(self._store, self._metrics), LeaseEndings(self._metrics)
        sidecar = Sidecar(self._config, self.address, store, self._peers, self._clock, ended)
        self._sidecar = sidecar
        if self._config.warm_handshakes:
            observe = HandshakeTimes(self._metrics)
            self._warming = Warming(store, self._config.handshake_s, self._config.hello_s, observe)
        self._metrics.on_scrape_later(EngineGauges(sidecar))
        sidecar_pb2_grpc.add_SidecarServiceServicer_to_server(SidecarServicer(sidecar), public.server)
        self._socket.prepare()
        local = GrpcServer(
            f"unix:{self._socket.bound_path}",
            [connector_pb2.DESCRIPTOR.services_by_name["ConnectorService"].full_name],
        )
        connector_pb2_grpc.add_ConnectorServiceServicer_to_server(
            ConnectorServicer(
                self._config,
                sidecar,
                self._telemetry.tracer,
                CallTimer(self._metrics, CONNECTOR_CALL_SECONDS),
                self._warming,
            ),
            local.server,
        )
        local.bind()
        self._servers = [public, local]
        await public.start(ready=False)
        await local.start()
        self._socket.publish()
        self._readiness = asyncio.create_task(_tell_ready(public, store))
        _log.info(
            "sidecar serves",
            extra={"address": self.address, "socket": str(self.socket_path), "admin": self.admin_url},
        )

    async def stop(self) -> None:
        """Detaches the connectors, which ends their engines' sessions, then refuses others. Idempotent."""
        if self._warming is not None:
            self._warming.close()
        if self._sidecar is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._config.stop_grace_s):
                    await self._sidecar.close()
        self._socket.withdraw()
        if self._readiness is not None:
            self._readiness.cancel()
            await asyncio.wait((self._readiness,))
        servers, self._servers = self._servers, []
        for server in reversed(servers):
            await server.stop(self._config.stop_grace_s)
        await self._peers.close()
        await self._telemetry.close()
        await self._admin.stop()

    def _advertised(self, port: int) -> str:
        if not self._config.advertise:
            return f"{self._config.listen.rpartition(':')[0]}:{port}"
        host, _, advertised_port = self._config.advertise.rpartition(":")
        if advertised_port == "0":
            return f"{host}:{port}"
        return self._config.advertise


async def _tell_ready(server: GrpcServer, store: Store) -> None:
    """Tells it once the store has answered: before that, no engine that attaches is found by anybody."""
    while True:
        try:
            await store.list_engines()
        except StoreUnavailable as error:
            _log.warning("the store does not answer", extra={"reason": str(error)})
            await asyncio.sleep(RETRY_S)
        else:
            await server.tell_ready()
            return
