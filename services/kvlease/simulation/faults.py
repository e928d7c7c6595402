"""What goes wrong, by seed: partitions, pauses, deaths, restarts, resets."""

import asyncio
from random import Random

from kvlease.simulation.world import World


class Faults:
    """Breaks something every few seconds and repairs it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = Random(world.random.random())

    async def run(self, until_s: float) -> None:
        """Until the virtual time `until_s`; then everything is repaired."""
        loop = asyncio.get_running_loop()
        kinds = [self._partition, self._pause, self._sidecar, self._engine, self._registry, self._reset]
        weights = [4, 5, 2, 1, 1, 1]
        async with asyncio.TaskGroup() as group:
            while loop.time() < until_s:
                await asyncio.sleep(self._random.expovariate(1 / 4.0))
                kind = self._random.choices(kinds, weights)[0]
                group.create_task(kind())
        self._world.network.heal()

    async def _partition(self) -> None:
        network, (source, target) = self._world.network, self._random.sample(self._names(), 2)
        network.block(source, target)
        await asyncio.sleep(self._random.uniform(0.5, 12.0))
        network.unblock(source, target)

    async def _pause(self) -> None:
        network, name = self._world.network, self._random.choice(self._names())
        network.pause(name)
        await asyncio.sleep(self._random.uniform(0.2, 9.0))
        network.resume(name)

    async def _sidecar(self) -> None:
        world, name = self._world, self._random.choice(list(self._world.nodes))
        if world.nodes[name].sidecar is None:
            return
        world.kill_sidecar(name)
        await asyncio.sleep(self._random.uniform(0.2, 15.0))
        world.start_sidecar(name)

    async def _engine(self) -> None:
        world, name = self._world, self._random.choice(list(self._world.nodes))
        if world.nodes[name].engine is None:
            return
        await world.kill_engine(name)
        await asyncio.sleep(self._random.uniform(0.5, 6.0))
        world.start_engine(name)

    async def _registry(self) -> None:
        registry = self._world.registry()
        self._world.start_registry()
        if registry is not None:
            await registry.close()

    async def _reset(self) -> None:
        engine = self._world.engine(self._random.choice(list(self._world.nodes)))
        if engine is not None:
            engine.reset_prefix_cache()

    def _names(self) -> list[str]:
        nodes = self._world.nodes.values()
        routers = [f"router-{number}" for number in range(self._world.settings.routers)]
        engines = [node.name for node in nodes]
        return [*routers, "registry", *engines, *(node.sidecar_name for node in nodes)]
