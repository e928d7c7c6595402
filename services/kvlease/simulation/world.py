"""One simulated fleet: the production registries, sidecars and routers, with simulated engines, on one virtual loop."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from kvlease.core.ids import Holder
from kvlease.core.records import EngineRole, KvLocation
from kvlease.core.renewal import RenewalTable
from kvlease.registry.config import RegistryConfig
from kvlease.registry.registry import Registry
from kvlease.router.assembly import lasting_tasks, make_services
from kvlease.router.config import RouterConfig
from kvlease.router.runner import TurnRunner
from kvlease.router.turn import TurnServices
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.sidecar import Sidecar
from kvlease.sim.engine import EngineSettings
from kvlease.sim.reader import ReaderLimits
from kvlease.simulation.attachment import stay_attached
from kvlease.simulation.http import SimEngines
from kvlease.simulation.loop import Process, VirtualLoop
from kvlease.simulation.network import NetworkSettings, SimNetwork
from kvlease.simulation.promises import Promises
from kvlease.simulation.store import STORE, SimStore
from kvlease.simulation.transports import SeededRandom, SimPins, SimRegistryPort, SimSidecars, SimTransfers
from kvlease.simulation.watched import WatchedEngine, WatchedRenewals, WatchedStore

MODEL = "sim"

PIN_WAIT_S = 2.0
"""A reader waits this long for its pin, as the connector does."""

TICK_S = 0.5
"""Engines look at their deadlines this often while nobody asks."""

ROUTER = RouterConfig(
    append_tokens_max=150,
    heartbeat_interval_s=1.5,
    lease_duration_s=6.0,
    reservation_s=6.0,
    provisional_s=2.0,
    gap_floor_s=8.0,
    gap_cap_s=12.0,
    tool_call_max_s=12.0,
    prefill_timeout_s=20.0,
    turn_timeout_s=60.0,
    suspect_s=1.0,
)
"""Durations of a third of the defaults, in the same relations: more happens in the same virtual time."""

REGISTRY = RegistryConfig(heartbeat_interval_s=1.5, lease_duration_s=6.0, renew_call_s=1.2)
SIDECAR = SidecarConfig(engine_ttl_s=4.0, allow_loopback=True)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the fleet is made of; tests plant bugs in it."""

    engine: type[WatchedEngine] = WatchedEngine
    sidecar: type[Sidecar] = Sidecar
    registry: type[Registry] = Registry
    renewals: type[WatchedRenewals] = WatchedRenewals
    transfers: type[SimTransfers] = SimTransfers
    store: type[WatchedStore] = WatchedStore


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """One run.

    Attributes:
        duration_s: virtual seconds during which clients talk and faults happen.
        fault_every_s: mean time between two faults.
        fault_kinds: names of the faults that happen; empty: all of `Faults`.
        edits: share of the turns before which the client changes the history.
        branches: share of the turns beside which another one goes on from the same turn.
        read_s: what a READ takes usually, and at worst.
    """

    seed: int
    duration_s: float = 10.0
    prefill: int = 1
    decode: int = 2
    clients: int = 3
    routers: int = 2
    registries: int = 2
    faults: bool = True
    fault_every_s: float = 0.7
    fault_kinds: frozenset[str] = frozenset()
    edits: float = 0.1
    branches: float = 0.2
    total_blocks: int = 120
    read_s: tuple[float, float] = (0.5, 5.0)
    read_part_s: float = 3.0
    network: NetworkSettings = field(default_factory=NetworkSettings)
    router: RouterConfig = ROUTER
    parts: Parts = field(default_factory=Parts)

    def engine(self) -> EngineSettings:
        """The settings of every engine."""
        return EngineSettings(
            model=MODEL,
            block_size=16,
            total_blocks=self.total_blocks,
            prefill_token_s=2e-4,
            decode_step_s=0.02,
            reading_cap=0.5,
            lifetime_max_s=30.0,
            reader=ReaderLimits(read_part_s=self.read_part_s, threshold_tokens=64),
        )


class World:
    """Starts, kills and finds the processes. `Programs` of the transports."""

    def __init__(self, settings: WorldSettings, loop: VirtualLoop) -> None:
        self.settings = settings
        self.loop = loop
        self.random = Random(settings.seed)
        self.promises = Promises()
        self.network = SimNetwork(loop, Random(self.random.random()), settings.network)
        self.store = settings.parts.store()
        self.store.promises = self.promises
        self.roles: dict[str, EngineRole] = {}
        self._engines: dict[Process, WatchedEngine] = {}
        self._sidecars: dict[Process, Sidecar] = {}
        self._registries: dict[Process, Registry] = {}
        self._routers: dict[Process, TurnRunner] = {}
        self._services: dict[Process, TurnServices] = {}

    # --- who there is -------------------------------------------------------------------------------------

    @property
    def routers(self) -> list[str]:
        """Names of the routers' processes."""
        return [f"router-{number}" for number in range(self.settings.routers)]

    @property
    def registries(self) -> list[str]:
        """Names of the registries' processes."""
        return [f"registry-{number}" for number in range(self.settings.registries)]

    @property
    def engines(self) -> list[str]:
        """Names of the engines' processes."""
        return list(self.roles)

    @property
    def sidecars(self) -> list[str]:
        """Names of the sidecars' processes."""
        return [sidecar_of(name) for name in self.roles]

    def engine(self, process: Process) -> WatchedEngine:
        """The engine that runs in a process."""
        return self._engines[process]

    def sidecar(self, process: Process) -> Sidecar:
        """The sidecar that runs in a process."""
        return self._sidecars[process]

    def registry(self, process: Process) -> Registry:
        """The registry that runs in a process."""
        return self._registries[process]

    def runner(self, process: Process) -> TurnRunner:
        """The router that runs in a process."""
        return self._routers[process]

    def services(self, process: Process) -> TurnServices:
        """The parts of the router that runs in a process."""
        return self._services[process]

    # --- life ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts everything."""
        settings = self.settings
        self.network.start(STORE)
        for name in self.registries:
            self.start_registry(name)
        for number in range(settings.prefill + settings.decode):
            role = EngineRole.PREFILL if number < settings.prefill else EngineRole.DECODE
            name = f"{role.value}-{number}"
            self.roles[name] = role
            self.start_sidecar(name)
            self.start_engine(name)
        for name in self.routers:
            self.start_router(name)

    def start_registry(self, name: str) -> None:
        """Starts a registry."""

        def make(process: Process) -> None:
            sidecars = SimSidecars(self.network, self)
            registry = self.settings.parts.registry(REGISTRY, self._store_port(), sidecars, process)
            self._registries[process] = registry
            self.network.spawn(process, registry.follow_engines())

        self._start(name, make)

    def start_sidecar(self, engine_name: str) -> None:
        """Starts the sidecar of an engine."""
        name = sidecar_of(engine_name)

        def make(process: Process) -> None:
            config = SidecarConfig(
                role=self.roles[engine_name],
                engine_url=f"http://{engine_name}",
                engine_ttl_s=SIDECAR.engine_ttl_s,
                allow_loopback=SIDECAR.allow_loopback,
            )
            peers = SimSidecars(self.network, self)
            self._sidecars[process] = self.settings.parts.sidecar(
                config, name, self._store_port(), peers, process
            )

        self._start(name, make)

    def start_engine(self, name: str, engine_id: str = "") -> None:
        """Starts an engine process, with ids of its own unless `engine_id` is configured."""
        ids = SeededRandom(self.random)
        holder = Holder(engine_id or ids.text_id(), ids.text_id(), 1)
        transfers = self.settings.parts.transfers(
            self.network, self, Random(self.random.random()), self.settings.read_s
        )

        def make(process: Process) -> None:
            pins = SimPins(self.network, self, sidecar_of(name), PIN_WAIT_S)
            engine = self.settings.parts.engine(
                self.settings.engine(), holder, KvLocation(name, 1), process, pins, transfers
            )
            engine.begin_watch(self.promises, self.loop, process)
            self._engines[process] = engine
            self.network.spawn(process, stay_attached(self.network, engine, sidecar_of(name), self.sidecar))
            self.network.spawn(process, _tick(engine))

        self._start(name, make)

    def start_router(self, name: str) -> None:
        """Starts a router with empty tables."""
        config, random = self.settings.router, SeededRandom(Random(self.random.random()))
        replicas = self.random.sample(self.registries, len(self.registries))

        def make(process: Process) -> None:
            policy = config.renewal_policy()
            registry = SimRegistryPort(self.network, self, replicas, random.text_id(), policy)
            renewals: RenewalTable = self.settings.parts.renewals(policy, self.promises, process)
            engine_port = SimEngines(self.network, self)
            services = make_services(config, process, registry, engine_port, random, renewals=renewals)
            self._services[process] = services
            self._routers[process] = TurnRunner(services)
            for work in lasting_tasks(services):
                self.network.spawn(process, work)

        self._start(name, make)

    # --- inside -------------------------------------------------------------------------------------------

    def _start(self, name: str, make: Callable[[Process], None]) -> None:
        process = self.network.start(name)
        process.run(lambda: make(process))

    def _store_port(self) -> SimStore:
        return SimStore(self.network, self.store)


def sidecar_of(engine_name: str) -> str:
    """The name of the process of an engine's sidecar."""
    return f"sidecar-{engine_name}"


async def _tick(engine: WatchedEngine) -> None:
    """Lets deadlines pass also while nobody asks."""
    while True:
        await asyncio.sleep(TICK_S)
        engine.holder.give_back()
