"""A registry with its gRPC server."""

import asyncio
import logging

from kvlease.core.clock import Clock
from kvlease.registry.config import RegistryConfig
from kvlease.registry.metrics import EngineCounts
from kvlease.registry.registry import Registry
from kvlease.registry.service import RegistryServicer
from kvlease.runtime.admin import AdminServer
from kvlease.runtime.grpc_server import GrpcServer
from kvlease.runtime.measured_sidecars import MeasuredSidecars
from kvlease.runtime.metrics import Metrics
from kvlease.runtime.sidecars import GrpcSidecars
from kvlease.runtime.telemetry import make_telemetry
from kvlease.runtime.tls import make_tls
from kvlease.store.measured import MeasuredStore
from kvlease.store.port import Store
from kvlease.v1 import registry_pb2, registry_pb2_grpc

_log = logging.getLogger(__name__)


class RegistryServer:
    """One registry, started and stopped as a whole.

    After `start`, `address` is where it listens and `admin_url` the base of its metrics.
    """

    def __init__(self, config: RegistryConfig, store: Store, clock: Clock) -> None:
        self._config = config
        self._telemetry = make_telemetry("kvlease-registry", config)
        self._tls = make_tls(config)
        self._metrics = Metrics("registry")
        self._admin = AdminServer(config, self._metrics, self._tls)
        self._sidecars = MeasuredSidecars(GrpcSidecars(self._telemetry, self._tls), self._metrics)
        self._registry = Registry(config, MeasuredStore(store, self._metrics), self._sidecars, clock)
        self._metrics.on_scrape(EngineCounts(self._registry))
        self._servicer = RegistryServicer(self._registry)
        self._server: GrpcServer | None = None
        self._follower: asyncio.Task[None] | None = None
        self.address = ""

    @property
    def admin_url(self) -> str:
        """Base of the metrics."""
        return self._admin.url

    async def start(self) -> None:
        """Begins to serve; its health tells so once the store has answered, and through outages of the store.

        Raises:
            InvalidArgument: the address cannot be bound.
        """
        await self._admin.start()
        service = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name
        server = GrpcServer(self._config.listen, [service], self._telemetry, self._tls, self._metrics)
        registry_pb2_grpc.add_RegistryServiceServicer_to_server(self._servicer, server.server)
        server.bind()
        await server.start(ready=False)
        self._server, self.address = server, server.address
        self._follower = asyncio.create_task(self._follow(server))
        _log.info("registry serves", extra={"address": self.address, "admin": self.admin_url})

    async def stop(self) -> None:
        """Refuses calls, gives those in flight their grace, then ends. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            self._servicer.end_streams()
            await server.stop(self._config.stop_grace_s)
        if self._follower is not None:
            self._follower.cancel()
            await asyncio.wait((self._follower,))
        await self._registry.close()
        await self._sidecars.close()
        await self._telemetry.close()
        await self._admin.stop()

    async def _follow(self, server: GrpcServer) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._registry.follow_engines())
            await self._registry.engines_told()
            await server.tell_ready()
