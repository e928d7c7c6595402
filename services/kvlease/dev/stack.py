"""The whole system on one machine: services in this process, engines as child processes."""

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import aiohttp

from kvlease.core.records import EngineRole
from kvlease.dev.embedded_etcd import EmbeddedEtcd, EmbeddedEtcdError
from kvlease.dev.engine_process import free_ports
from kvlease.registry.config import RegistryConfig
from kvlease.registry.server import RegistryServer
from kvlease.router.config import RouterConfig
from kvlease.router.server import RouterServer
from kvlease.runtime.clock import LoopClock
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.server import SidecarServer
from kvlease.store.etcd import EtcdStore
from kvlease.store.etcd_client import EtcdOptions
from kvlease.store.memory import MemoryStore
from kvlease.store.port import StoreKind
from kvlease.store.settings import OwnedStore

REGISTERED_TIMEOUT_S = 60.0
STILL_STARTING_S = 15.0
"""How often a person who waits for engines is told that they are still starting."""

PIN_CALL_S = 5.0
"""Engines of the CPU build spin on every core: an answer that takes a millisecond elsewhere may take long."""

STORE_CALL_S = 3.0
"""For the same reason."""

ENGINE_TTL_S = 30.0
"""For the same reason: a sidecar that does not run for seconds is not gone."""


class StackError(RuntimeError):
    """The system did not come up; the message says which part and why."""


class Engine(Protocol):
    """A child process that serves the OpenAI API and attaches to a sidecar."""

    @property
    def base_url(self) -> str:
        """The engine's HTTP address, without a trailing slash."""
        ...

    async def start(self) -> None:
        """Starts the process and returns at once."""
        ...

    async def wait_ready(self) -> float:
        """Waits until it serves. The seconds waited."""
        ...

    async def stop(self) -> None:
        """Ends the process; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class EngineSeat:
    """Where an engine goes: its role, ports, and the directory of its sidecar's socket."""

    role: EngineRole
    number: int
    port: int
    side_channel_port: int
    socket_dir: Path
    log_file: Path


MakeEngine = Callable[[EngineSeat], Engine]


@dataclass(frozen=True, slots=True)
class StackPlan:
    """What to start.

    Attributes:
        router_port: port of the OpenAI API; 0 takes a free one.
        router: the router's settings; listen addresses are set by the stack.
        store: where leases are remembered; etcd is a child process, too.
        pin_call_s: bound of a pin's way to a connector; what contains it may take twice as long.
        log_directory: where engines write their logs, which stay there; None: nowhere that lasts.
        otlp_endpoint: of the collector that gets the services' traces; engines have their own setting.
    """

    prefill: int
    decode: int
    make_engine: MakeEngine
    router_port: int = 0
    router: RouterConfig = field(default_factory=RouterConfig)
    store: StoreKind = StoreKind.MEMORY
    log_directory: Path | None = None
    otlp_endpoint: str = ""
    pin_call_s: float = PIN_CALL_S


class Stack:
    """A running system; `start` brings up all of it or none."""

    def __init__(self, plan: StackPlan, progress: Callable[[str], None]) -> None:
        self._plan = plan
        self._progress = progress
        self.store: OwnedStore = MemoryStore()
        self._etcd = EmbeddedEtcd()
        # The path of a unix socket has at most 107 bytes: the directory must be short.
        self.directory = Path(tempfile.mkdtemp(prefix="kvlease-"))
        self.seats: list[EngineSeat] = []
        self.engines: list[Engine] = []
        self.sidecars: list[SidecarServer] = []
        self.registry: RegistryServer | None = None
        self.router: RouterServer | None = None

    @property
    def router_url(self) -> str:
        """Base URL of the OpenAI API."""
        return self.router.url if self.router is not None else ""

    @property
    def etcd_endpoint(self) -> str:
        """`host:port` of the etcd that it started; empty when it has none."""
        return self._etcd.endpoint

    def admin_urls(self) -> dict[str, str]:
        """Where each part's metrics are."""
        pairs = zip(self.seats, self.sidecars, strict=True)
        urls = {f"{seat.role.value} sidecar {seat.number}": sidecar.admin_url for seat, sidecar in pairs}
        if self.registry is not None:
            urls["registry"] = self.registry.admin_url
        if self.router is not None:
            urls["router"] = self.router.admin_url
        return urls

    def engine_urls(self, role: EngineRole | None = None) -> list[str]:
        """Base URLs of the engines, of one role or all."""
        pairs = zip(self.seats, self.engines, strict=True)
        return [engine.base_url for seat, engine in pairs if role in (None, seat.role)]

    async def start(self) -> None:
        """Starts everything and waits until every engine is registered.

        Raises:
            StackError: a part did not come up; everything was stopped again.
        """
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stops every process and server that was started; idempotent."""
        router, self.router = self.router, None
        if router is not None:
            await router.stop()
        await asyncio.gather(*(engine.stop() for engine in self.engines))
        for sidecar in self.sidecars:
            await sidecar.stop()
        if self.registry is not None:
            await self.registry.stop()
        await self.store.close()
        await self._etcd.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    def sidecar_config(self, seat: EngineSeat) -> SidecarConfig:
        """The settings of the sidecar of a seat."""
        return SidecarConfig(
            listen="127.0.0.1:0",
            allow_loopback=True,
            socket_dir=str(seat.socket_dir),
            role=seat.role,
            engine_url=f"http://127.0.0.1:{seat.port}",
            engine_ttl_s=ENGINE_TTL_S,
            pin_call_s=self._plan.pin_call_s,
            peer_call_s=2 * self._plan.pin_call_s,
            holder_call_s=2 * self._plan.pin_call_s,
            store_call_s=STORE_CALL_S,
            otlp_endpoint=self._plan.otlp_endpoint,
        )

    async def start_sidecar(self, seat: EngineSeat) -> SidecarServer:
        """Starts the sidecar of a seat."""
        config = self.sidecar_config(seat)
        config.validate()
        sidecar = SidecarServer(config, self.store, LoopClock())
        await sidecar.start()
        return sidecar

    async def start_router(self, settings: RouterConfig, port: int = 0) -> RouterServer:
        """Starts a router at a port, 0 for a free one, that knows every engine; the caller stops it.

        Raises:
            StackError: there is no registry yet, or the engines did not become known.
        """
        if self.registry is None:
            raise StackError("a router needs the registry")
        config = self._router_config(settings, port, self.registry.address)
        router = RouterServer.connected(config, LoopClock())
        await router.start()
        try:
            await self._await_known(router)
        except BaseException:
            await router.stop()
            raise
        return router

    async def _start(self) -> None:
        clock = LoopClock()
        if self._plan.store is StoreKind.ETCD:
            await self._start_etcd()
        registry_config = RegistryConfig(
            listen="127.0.0.1:0",
            sidecar_call_s=2 * self._plan.pin_call_s,
            store_call_s=STORE_CALL_S,
            otlp_endpoint=self._plan.otlp_endpoint,
        )
        registry_config.validate()
        self.registry = RegistryServer(registry_config, self.store, clock)
        await self.registry.start()
        self.seats = self._seats()
        for seat in self.seats:
            self.sidecars.append(await self.start_sidecar(seat))
        self._progress(f"registry at {self.registry.address}, {len(self.sidecars)} sidecars")
        self.engines = [self._plan.make_engine(seat) for seat in self.seats]
        await self._start_engines()
        self.router = await self.start_router(self._plan.router, self._plan.router_port)
        self._progress(f"router at {self.router.url}")

    async def _start_etcd(self) -> None:
        try:
            await self._etcd.start()
        except EmbeddedEtcdError as error:
            raise StackError(str(error)) from error
        options = EtcdOptions((self._etcd.endpoint,), call_s=STORE_CALL_S, accept_old=True)
        self.store = EtcdStore(options)
        self._progress(f"etcd at {self._etcd.endpoint}")

    def _seats(self) -> list[EngineSeat]:
        roles = [EngineRole.PREFILL] * self._plan.prefill + [EngineRole.DECODE] * self._plan.decode
        ports = free_ports(2 * len(roles))
        logs = self._plan.log_directory or self.directory
        return [
            EngineSeat(
                role,
                number,
                ports[2 * number],
                ports[2 * number + 1],
                self.directory / f"e{number}",
                logs / f"{role.value}-{number}.log",
            )
            for number, role in enumerate(roles)
        ]

    async def _start_engines(self) -> None:
        self._progress(f"starting {self._plan.prefill} prefill and {self._plan.decode} decode engines")
        for engine in self.engines:
            await engine.start()
        self._progress(f"engines serve after {await self._await_ready():.0f} s")
        await self._await_registered()

    async def _await_ready(self) -> float:
        """Waits until every engine serves, and says from time to time that it does. The seconds waited."""
        telling = asyncio.create_task(self._tell_of_waiting())
        try:
            return max(await asyncio.gather(*(engine.wait_ready() for engine in self.engines)))
        finally:
            telling.cancel()

    async def _tell_of_waiting(self) -> None:
        logs = self._plan.log_directory
        while True:
            await asyncio.sleep(STILL_STARTING_S)
            self._progress("engines are still starting" + (f"; their logs are in {logs}" if logs else ""))

    async def _await_registered(self) -> None:
        deadline_s = LoopClock().now_s() + REGISTERED_TIMEOUT_S
        while len(registered := await self.store.list_engines()) < len(self.engines):
            if LoopClock().now_s() > deadline_s:
                raise StackError(
                    f"only {len(registered)} of {len(self.engines)} engines were registered "
                    f"within {REGISTERED_TIMEOUT_S:.0f} s"
                )
            await asyncio.sleep(0.05)

    async def _await_known(self, router: RouterServer) -> None:
        """Waits until the router's watch has told it of the engines."""
        known = 0
        deadline_s = LoopClock().now_s() + REGISTERED_TIMEOUT_S
        async with aiohttp.ClientSession() as session:
            while known < len(self.engines):
                if LoopClock().now_s() > deadline_s:
                    raise StackError(f"the router knows only {known} of {len(self.engines)} engines")
                async with session.get(f"{router.url}/health") as response:
                    known = sum((await response.json())["engines"].values())
                await asyncio.sleep(0.01)

    def _router_config(self, settings: RouterConfig, port: int, registry: str) -> RouterConfig:
        config = replace(
            settings,
            registry=registry,
            otlp_endpoint=settings.otlp_endpoint or self._plan.otlp_endpoint,
            listen=f"127.0.0.1:{port}",
            grpc_listen="127.0.0.1:0",
            registry_call_s=2 * self._plan.pin_call_s,
        )
        config.validate()
        return config
