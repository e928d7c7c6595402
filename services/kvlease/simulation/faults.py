"""What goes wrong, by seed: partitions, pauses, deaths, restarts, outages of the store, resets, sleep."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

from kvlease.sim.engine import SimEngine
from kvlease.simulation.store import STORE
from kvlease.simulation.world import World, sidecar_of

Fault = Callable[[], Coroutine[Any, Any, None]]

_WIPED = b"what sleep left behind"


class Faults:
    """Breaks something again and again, and repairs it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._network = world.network
        self._random = Random(world.random.random())
        weights: dict[Fault, float] = {
            self.part: 4,
            self.pause: 4,
            self.restart_sidecar: 2,
            self.restart_engine: 1.5,
            self.restart_both: 1,
            self.restart_under_the_same_id: 1,
            self.restart_registry: 1,
            self.restart_router: 1,
            self.stop_store: 1,
            self.slow_down: 1,
            self.end_session: 1,
            self.reset: 1,
            self.sleep: 1,
        }
        only = world.settings.fault_kinds
        self._kinds = {
            fault: weight for fault, weight in weights.items() if not only or fault.__name__ in only
        }

    async def run(self, until_s: float) -> None:
        """Until the virtual time `until_s`; then everything is repaired."""
        loop = self._world.loop
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(self._random.expovariate(1 / self._world.settings.fault_every_s))
                if loop.virtual_s >= until_s:
                    break
                kind = self._random.choices(list(self._kinds), list(self._kinds.values()))[0]
                self._network.note(kind.__name__)
                group.create_task(kind())
        self._network.heal()

    async def _wait(self, least_s: float, most_s: float) -> None:
        await asyncio.sleep(self._random.uniform(least_s, most_s))

    # --- the network and pauses ---------------------------------------------------------------------------

    async def part(self) -> None:
        """Messages one way are lost."""
        source, target = self._random.sample(self._names(), 2)
        self._network.block(source, target)
        await self._wait(0.5, 8.0)
        self._network.unblock(source, target)

    async def pause(self) -> None:
        """A process is stopped, and goes on."""
        process = self._network.processes.get(self._random.choice(self._names()))
        if process is not None:
            process.stop()
            await self._wait(0.2, 7.0)
            process.resume()

    async def slow_down(self) -> None:
        """All messages of one process are slow."""
        name = self._random.choice([STORE, *self._names()])
        self._network.slowed.add(name)
        await self._wait(1.0, 6.0)
        self._network.slowed.discard(name)

    # --- deaths -------------------------------------------------------------------------------------------

    async def restart_sidecar(self) -> None:
        """A sidecar dies; another starts at its address."""
        name = self._random.choice(self._world.engines)
        if sidecar_of(name) in self._network.processes:
            self._network.kill(sidecar_of(name))
            await self._wait(0.2, 8.0)
            self._world.start_sidecar(name)

    async def restart_engine(self) -> None:
        """An engine dies; another starts at its address."""
        name = self._random.choice(self._world.engines)
        if name in self._network.processes:
            self._network.kill(name)
            await self._wait(0.5, 5.0)
            self._world.start_engine(name)

    async def restart_both(self) -> None:
        """An engine and a sidecar die; others start at their addresses."""
        await asyncio.gather(self.restart_engine(), self.restart_sidecar())

    async def restart_under_the_same_id(self) -> None:
        """An engine id that was configured comes back under another boot id; its operator corrects it later."""
        name = self._random.choice(self._world.engines)
        engine = self._running(name)
        if engine is None:
            return
        self._network.kill(name)
        await self._wait(0.0, 0.4)
        self._world.start_engine(name, engine.holder.holder.engine_id)
        await self._wait(1.0, 4.0)
        if name in self._network.processes:
            self._network.kill(name)
            self._world.start_engine(name)

    async def restart_registry(self) -> None:
        """A registry dies; another starts at its address."""
        name = self._random.choice(self._world.registries)
        if name in self._network.processes:
            self._network.kill(name)
            await self._wait(0.0, 6.0)
            self._world.start_registry(name)

    async def restart_router(self) -> None:
        """A router dies; another starts with empty tables."""
        name = self._random.choice(self._world.routers)
        if name in self._network.processes:
            self._network.kill(name)
            await self._wait(0.0, 6.0)
            self._world.start_router(name)

    # --- the store ----------------------------------------------------------------------------------------

    async def stop_store(self) -> None:
        """The store stops, and goes on."""
        self._network.processes[STORE].stop()
        await self._wait(0.5, 10.0)
        self._network.processes[STORE].resume()

    async def end_session(self) -> None:
        """The store takes back an engine's session under a healthy sidecar."""
        engine = self._running(self._random.choice(self._world.engines))
        if engine is not None:
            engine_id, store = engine.holder.holder.engine_id, self._world.store
            self._network.processes[STORE].post(lambda: store.revoke(engine_id))

    # --- engines ------------------------------------------------------------------------------------------

    async def reset(self) -> None:
        """An engine is told to clear its prefix cache."""
        engine = self._running(self._random.choice(self._world.engines))
        if engine is not None:
            engine.reset_prefix_cache()

    async def sleep(self) -> None:
        """An engine sleeps: refused while blocks are in use, else what they held is gone."""
        name = self._random.choice(self._world.engines)
        engine, process = self._running(name), self._network.processes.get(name)
        if engine is None or process is None or not engine.reset_prefix_cache():
            return
        for block_id in range(engine.pool.total_blocks):
            engine.pool.write(block_id, _WIPED)
        process.stop()
        await self._wait(0.5, 4.0)
        process.resume()

    # --- inside -------------------------------------------------------------------------------------------

    def _running(self, name: str) -> SimEngine | None:
        process = self._network.processes.get(name)
        return self._world.engine(process) if process is not None else None

    def _names(self) -> list[str]:
        world = self._world
        return [*world.routers, *world.registries, *world.engines, *world.sidecars]
