"""One simulated fleet: the production registry, sidecars and routers, with simulated engines, on one virtual loop."""

import asyncio
from dataclasses import dataclass, field
from random import Random

from kvlease.core.ids import Holder
from kvlease.core.records import EngineRole, KvLocation
from kvlease.core.renewal import RenewalTable
from kvlease.registry.config import RegistryConfig
from kvlease.registry.registry import Registry
from kvlease.router.background import Background
from kvlease.router.config import RouterConfig
from kvlease.router.conversations import ConversationTable
from kvlease.router.engines import EngineTable
from kvlease.router.heartbeat import Heartbeat
from kvlease.router.metrics import TurnMetrics
from kvlease.router.runner import TurnRunner
from kvlease.router.turn import TurnServices
from kvlease.router.watch import follow
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.sidecar import Sidecar
from kvlease.sim.engine import EngineSettings, SimEngine
from kvlease.sim.reader import ReaderLimits
from kvlease.simulation.attachment import Attachment
from kvlease.simulation.engines import TICK_S, Observed, WatchedEngine
from kvlease.simulation.loop import DriftingClock
from kvlease.simulation.network import NetworkSettings, SimNetwork
from kvlease.simulation.transports import (
    SeededRandom,
    SimEngines,
    SimPins,
    SimRegistryPort,
    SimSidecars,
    SimTransfers,
)
from kvlease.store.memory import MemoryStore

MODEL = "sim"
STARTED_S = 2.0
"""Every engine is attached and known to the router after this."""


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """One run.

    Attributes:
        duration_s: virtual seconds during which clients talk and faults happen.
        read_s: what a READ takes usually, and at worst.
        engine_class: the engine; tests plant bugs in it.
    """

    seed: int
    duration_s: float = 120.0
    prefill: int = 1
    decode: int = 2
    clients: int = 4
    routers: int = 2
    faults: bool = True
    total_blocks: int = 220
    read_s: tuple[float, float] = (0.5, 6.0)
    engine_class: type[WatchedEngine] = WatchedEngine
    network: NetworkSettings = field(default_factory=NetworkSettings)
    router: RouterConfig = field(default_factory=RouterConfig)

    def engine(self) -> EngineSettings:
        """The settings of every engine."""
        return EngineSettings(
            model=MODEL,
            block_size=16,
            total_blocks=self.total_blocks,
            prefill_token_s=2e-4,
            decode_step_s=0.02,
            reading_cap=0.5,
            lifetime_max_s=60.0,
            reader=ReaderLimits(read_part_s=4.0, threshold_tokens=64),
        )


@dataclass
class EngineNode:
    """An engine's place in the fleet; the process in it changes."""

    name: str
    sidecar_name: str
    role: EngineRole
    engine: WatchedEngine | None = None
    sidecar: Sidecar | None = None
    attachment: Attachment | None = None
    died: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list["asyncio.Task[None]"])


class World:
    """Starts, breaks and repairs the parts. `Nodes` of the transports."""

    def __init__(self, settings: WorldSettings) -> None:
        self.settings = settings
        self.random = Random(settings.seed)
        self.network = SimNetwork(Random(self.random.random()), settings.network)
        self.observed = Observed()
        self.store = MemoryStore()
        self.nodes: dict[str, EngineNode] = {}
        self.routers: list[TurnServices] = []
        self.runners: list[TurnRunner] = []
        self._registry: Registry | None = None

    # --- Nodes --------------------------------------------------------------------------------------------

    def sidecar(self, name: str) -> Sidecar | None:
        """The sidecar process of a node."""
        found = [node.sidecar for node in self.nodes.values() if node.sidecar_name == name]
        return found[0] if found else None

    def engine(self, name: str) -> SimEngine | None:
        """The engine process of a node."""
        node = self.nodes.get(name)
        return node.engine if node else None

    def registry(self) -> Registry | None:
        """The registry process."""
        return self._registry

    async def gone(self, name: str) -> None:
        """Returns when the process that runs on a node has died."""
        await self.nodes[name].died.wait()

    # --- life ---------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts everything."""
        roles = [EngineRole.PREFILL] * self.settings.prefill + [EngineRole.DECODE] * self.settings.decode
        self.start_registry()
        for number, role in enumerate(roles):
            name = f"{role.value}-{number}"
            self.nodes[name] = EngineNode(name, f"sidecar-{number}", role)
            self.start_sidecar(name)
            self.start_engine(name)
        for number in range(self.settings.routers):
            self.start_router(f"router-{number}")
        await asyncio.sleep(STARTED_S)

    async def stop(self) -> None:
        """Ends every task."""
        for name in self.nodes:
            await self.kill_engine(name)
        if self._registry is not None:
            await self._registry.close()
        for router in self.routers:
            await router.background.close()
        await self.network.close()

    def start_registry(self) -> None:
        """Starts a registry; it takes the place of the one before."""
        sidecars = SimSidecars(self.network, self, "registry")
        self._registry = Registry(RegistryConfig(), self.store, sidecars, self._clock())

    def start_sidecar(self, name: str) -> None:
        """Starts the sidecar of a node."""
        node = self.nodes[name]
        config = SidecarConfig(role=node.role, engine_url=f"http://{name}", allow_loopback=True)
        peers = SimSidecars(self.network, self, node.sidecar_name)
        node.sidecar = Sidecar(config, node.sidecar_name, self.store, peers, self._clock())

    def kill_sidecar(self, name: str) -> None:
        """Kills the sidecar of a node: its streams break."""
        node = self.nodes[name]
        node.sidecar = None
        if node.attachment is not None:
            node.attachment.close("the sidecar died")

    def start_engine(self, name: str) -> None:
        """Starts an engine process with ids of its own."""
        node = self.nodes[name]
        ids = SeededRandom(self.random)
        pins = SimPins(self.network, self, (name, node.sidecar_name), wait_s=1.0)
        transfers = SimTransfers(self.network, self, name, Random(self.random.random()), self.settings.read_s)
        engine = self.settings.engine_class(
            self.settings.engine(),
            Holder(ids.text_id(), ids.text_id(), 1),
            KvLocation(name, 1),
            self._clock(),
            pins,
            transfers,
        )
        engine.watch(self.observed)
        node.engine, node.died = engine, asyncio.Event()
        node.tasks = [
            self.network.spawn(self._stay_attached(node, engine)),
            self.network.spawn(_tick(engine)),
        ]

    async def kill_engine(self, name: str) -> None:
        """Kills the engine process of a node: its memory is gone."""
        node = self.nodes[name]
        engine, node.engine = node.engine, None
        if engine is None:
            return
        node.died.set()
        if node.attachment is not None:
            node.attachment.close("the engine died")
        for task in node.tasks:
            task.cancel()
        await asyncio.gather(*node.tasks, return_exceptions=True)
        await engine.close()

    def start_router(self, name: str) -> None:
        """Starts a router with empty tables."""
        config, random = self.settings.router, SeededRandom(Random(self.random.random()))
        policy, clock = config.renewal_policy(), self._clock()
        registry = SimRegistryPort(self.network, self, name, random.text_id(), policy)
        renewals, engines = RenewalTable(policy), EngineTable(clock, config.suspect_s)
        conversations = ConversationTable(clock, renewals, engines, random, config.conversations_max)
        heartbeat = Heartbeat(renewals, registry, clock, policy.interval_s)
        router = TurnServices(
            clock=clock,
            engines=engines,
            conversations=conversations,
            renewals=renewals,
            heartbeat=heartbeat,
            registry=registry,
            engine_port=SimEngines(self.network, self, name),
            random=random,
            background=Background(),
            metrics=TurnMetrics(),
            policy=policy,
            limits=config.turn_limits(),
        )
        self.routers.append(router)
        self.runners.append(TurnRunner(router))
        self.network.spawn(heartbeat.run())
        self.network.spawn(follow("engines", registry.watch_engines, engines.apply))
        self.network.spawn(follow("leases", registry.watch_leases, conversations.apply))

    # --- inside -------------------------------------------------------------------------------------------

    def _clock(self) -> DriftingClock:
        loop = asyncio.get_running_loop()
        return DriftingClock(loop, self.random.uniform(0, 1e4), self.random.uniform(0.9, 1.1))

    async def _stay_attached(self, node: EngineNode, engine: WatchedEngine) -> None:
        while True:
            await asyncio.sleep(0.05)
            blocked = self.network.is_blocked(node.name, node.sidecar_name)
            if node.sidecar is None or blocked or self.network.is_blocked(node.sidecar_name, node.name):
                continue
            node.attachment = Attachment(self.network, engine, (node.name, node.sidecar_name))
            await node.attachment.hold(node.sidecar)


async def _tick(engine: WatchedEngine) -> None:
    """Lets deadlines pass also while nobody asks."""
    while True:
        await asyncio.sleep(TICK_S)
        engine.holder.give_back()
