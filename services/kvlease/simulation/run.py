"""One seed from beginning to end: clients and faults, then repair, then silence. What is promised:

(a) no READ whose result is used, and no late write of a given-up READ, touched a block that changed owner;
(b) blocks outlive the last renewal by at most the duration and the skew of clocks unless pinned, and are free
    before the next allocation;
(c) one live CONVERSATION lease per leaf;
(d) no believer's deadline lies after the holder's, and a PIN on a lease that ended early is refused;
(e) generations and epochs only grow;
(f) after faults stop, idle blocks are freed, live ones survive, and turns reuse again.
"""

import asyncio
import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvlease.simulation.faults import Faults
from kvlease.simulation.loop import VirtualLoop
from kvlease.simulation.workload import Client, Clients, Survivor, Tally
from kvlease.simulation.world import World, WorldSettings

STARTED_S = 1.5
"""Every engine is attached and known to the routers after this."""

REPAIRED_S = 5.0
"""After the last fault: streams stand again, and nobody suspects an engine any more."""

SURVIVORS = 2
PAUSE_S = 7.0
"""Between a survivor's turns: longer than a lease that nobody renews, shorter than the gap in which it is renewed."""

SUFFIX_WORDS = (2, 120)
"""Of the second turn: one that is appended, and one that is read back."""

QUIET_S = 28.0
"""After the last turn: longer than the gap, a beat, a renewal that was under way and the lease it renewed, all by the
slowest clocks, so that nothing may be left."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What came of one seed.

    Attributes:
        steps: callbacks that ran.
        problems: promises that were broken; none when all is well.
        used_reads: READs whose result was used.
        digest: of everything that happened; two runs of one seed are equal.
    """

    seed: int
    steps: int
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
        return asdict(self)


def simulate(settings: WorldSettings) -> RunResult:
    """Runs one seed in virtual time."""
    with _no_collection():
        return _run(settings)


@contextmanager
def _no_collection() -> Generator[None]:
    """A world is small, short-lived and full of cycles: they are looked for once, when it is over."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)
        if collects:
            gc.enable()


def _run(settings: WorldSettings) -> RunResult:
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_simulate(settings, loop))


async def _simulate(settings: WorldSettings, loop: VirtualLoop) -> RunResult:
    world, tally = World(settings, loop), Tally()
    try:
        world.start()
        await asyncio.sleep(STARTED_S)
        await _live(world, tally)
        return _result(world, tally)
    finally:
        world.network.close()


async def _live(world: World, tally: Tally) -> None:
    settings, clients = world.settings, Clients(world, tally)
    until_s = world.loop.virtual_s + settings.duration_s
    async with asyncio.TaskGroup() as group:
        for number in range(settings.clients):
            group.create_task(Client(world, clients, number).run(until_s))
        if settings.faults:
            group.create_task(Faults(world).run(until_s))
    await asyncio.sleep(REPAIRED_S)
    async with asyncio.TaskGroup() as group:
        for number in range(SURVIVORS):
            group.create_task(Survivor(world, clients, number).run(PAUSE_S, SUFFIX_WORDS[number]))
    await asyncio.sleep(QUIET_S)
    _check_nothing_left(world)


def _check_nothing_left(world: World) -> None:
    """After everything ended: no hold, no pin, no block that nobody frees, no request, no record."""
    for name in world.engines:
        gauges = world.engine(world.network.processes[name]).gauges()
        if gauges.held_blocks or gauges.quarantined_blocks or gauges.free_blocks != gauges.total_blocks:
            world.promises.broken("f", f"{name} keeps blocks that nobody frees: {gauges}")
        if gauges.running_requests:
            world.promises.broken("f", f"{name} still runs {gauges.running_requests} requests")
    if world.store.recorded_leases:
        world.promises.broken("f", f"{world.store.recorded_leases} leases are still recorded")


def _result(world: World, tally: Tally) -> RunResult:
    return RunResult(
        world.settings.seed,
        world.loop.steps,
        tally.turns,
        tally.errors,
        tally.aborted,
        world.promises.used_reads,
        round(world.loop.virtual_s, 6),
        world.network.digest(),
        (*world.promises.problems, *tally.wrong, *world.network.crashes),
    )
