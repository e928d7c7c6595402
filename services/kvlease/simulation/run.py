"""One seed from beginning to end: clients and faults, promises checked at every step, and nothing left behind."""

import asyncio
import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from kvlease.core.lease import LeaseState
from kvlease.core.renewal import Belief
from kvlease.simulation.faults import Faults
from kvlease.simulation.loop import VirtualLoop
from kvlease.simulation.workload import Client, Tally
from kvlease.simulation.world import World, WorldSettings

QUIET_S = 120.0
"""After the last turn: longer than any lease, pin or READ, so that nothing may be left."""

STEP_S = 0.05
"""Promises are checked at the first step after so many virtual seconds."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of one seed.

    Attributes:
        problems: promises that were broken; none when all is well.
        used_reads: READs whose result was used.
        digest: of everything that clients saw; two runs of one seed are equal.
    """

    seed: int
    turns: int
    errors: int
    aborted: int
    used_reads: int
    virtual_s: float
    digest: str
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """The document of one seed."""
        return {"ok": self.ok, **asdict(self)}


class Promises:
    """Checks what must hold at every step."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._epochs: dict[str, int] = {}
        self._generations: dict[int, int] = {}
        self._checked_s = 0.0

    def check(self) -> None:
        """Compares the world with what was promised; what is broken stays so for more than `STEP_S`."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._checked_s + STEP_S:
            return
        self._checked_s = now_s
        for node in self._world.nodes.values():
            if node.engine is not None:
                node.engine.check(node.name)
                holder = node.engine.holder.holder
                if holder.epoch < self._epochs.get(holder.boot_id, 0):
                    self._broken(f"the epoch of {node.name} went back")
                self._epochs[holder.boot_id] = holder.epoch
        self._check_beliefs()

    async def check_records(self) -> None:
        """One record per conversation, and generations that only grow."""
        keys: set[bytes] = set()
        for record in await self._world.store.list_leases():
            if record.conversation_key in keys:
                self._broken("two leases of one conversation are recorded")
            keys.add(record.conversation_key)
            known = self._generations.setdefault(record.lease_id, record.generation)
            if record.generation < known:
                self._broken(f"the generation of lease {record.lease_id:016x} went back")

    def check_nothing_left(self) -> None:
        """After everything ended: no hold, no pin, no block that nobody frees."""
        for node in self._world.nodes.values():
            if node.engine is None:
                continue
            gauges = node.engine.gauges()
            if gauges.held_blocks or gauges.quarantined_blocks or gauges.free_blocks != gauges.total_blocks:
                self._broken(f"{node.name} keeps blocks that nobody frees: {gauges}")
            if gauges.running_requests:
                self._broken(f"{node.name} still runs {gauges.running_requests} requests")

    def _check_beliefs(self) -> None:
        """A lease that a router believes in did not expire at its holder."""
        observed = self._world.observed
        young_s = asyncio.get_running_loop().time() - 0.8 * self._world.settings.engine().lifetime_max_s
        for lease_id, state in observed.ended.items():
            young = state is LeaseState.EXPIRED and observed.granted_s[lease_id] > young_s
            for router in self._world.routers if young else ():
                if router.renewals.belief(router.clock.now_s(), lease_id) is Belief.HELD:
                    self._broken(f"a router believes in lease {lease_id:016x}, which has expired")

    def _broken(self, problem: str) -> None:
        if problem not in self._world.observed.problems:
            self._world.observed.problems.append(problem)


def simulate(settings: WorldSettings) -> RunResult:
    """Runs one seed in virtual time."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_simulate(settings, loop))


async def _simulate(settings: WorldSettings, loop: VirtualLoop) -> RunResult:
    world, tally = World(settings), Tally()
    await world.start()
    promises = Promises(world)
    loop.before_jump = promises.check
    digest = hashlib.blake2b(digest_size=8)
    try:
        await _talk(world, tally, promises)
        loop.before_jump = _nothing
        promises.check_nothing_left()
    finally:
        loop.before_jump = _nothing
        await world.stop()
    problems = (*world.observed.problems, *tally.wrong, *world.network.crashes)
    seen = (
        tally.turns,
        tally.errors,
        tally.aborted,
        world.observed.used_reads,
        round(loop.time(), 6),
        problems,
    )
    digest.update(repr(seen).encode())
    return RunResult(
        settings.seed,
        tally.turns,
        tally.errors,
        tally.aborted,
        world.observed.used_reads,
        loop.time(),
        digest.hexdigest(),
        problems,
    )


async def _talk(world: World, tally: Tally, promises: Promises) -> None:
    until_s = asyncio.get_running_loop().time() + world.settings.duration_s
    async with asyncio.TaskGroup() as group:
        for number in range(world.settings.clients):
            group.create_task(Client(world, number, tally).run(until_s))
        if world.settings.faults:
            group.create_task(Faults(world).run(until_s))
        while asyncio.get_running_loop().time() < until_s:
            await asyncio.sleep(1.0)
            await promises.check_records()
    await asyncio.sleep(QUIET_S)


def _nothing() -> None:
    """What is checked once nothing is promised any more."""
