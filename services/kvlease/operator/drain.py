"""`kvlease drain`: keeps new turns away from an engine, and waits until it has nothing left to do."""

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from kvlease.core.clock import Clock
from kvlease.core.records import Engine, EngineRole, HolderGauges
from kvlease.operator.command import Exit, OperatorError, perform, show, warn
from kvlease.operator.connection import Fleet, RegistryClient, fleet
from kvlease.operator.flags import add_common_flags, add_registry_flag, seconds
from kvlease.operator.rows import engine_row
from kvlease.runtime.clock import LoopClock

COLUMNS = ("engine_id", "state", "running_requests", "reading_blocks", "held_blocks")
LOOK_AGAIN_S = 0.5
WRITTEN_S = 0.05
"""A record is written within a moment, where nothing is wrong."""


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease drain`."""
    parser.add_argument("engine_id", metavar="ENGINE_ID", help="as `kvlease engines` shows it")
    parser.add_argument("--undo", action="store_true", help="let it have turns again")
    parser.add_argument(
        "--wait-s",
        type=seconds,
        metavar="SECONDS",
        help="wait at most this long until it computes nothing and nobody READs from it: then it may be stopped",
    )
    add_registry_flag(parser)
    add_common_flags(parser)
    parser.epilog = "Exit status: 0, 1 unknown or still busy after --wait-s, 2 usage, 3 no answer."


def run(arguments: Namespace) -> int:
    """Drains. The exit status: 1 when the engine is unknown, or busy for longer than was to be waited."""
    return perform("drain", _drain, arguments)


async def _drain(arguments: Namespace) -> int:
    async with fleet(arguments) as ways:
        registry = await ways.registry(arguments.registry)
        await registry.drain(arguments.engine_id, undo=arguments.undo)
        engine = await _until_registered_so(registry, arguments, LoopClock())
        if not arguments.undo:
            lacking = last_of_its_role(engine, await registry.list_engines())
            if lacking:
                warn("drain", lacking, "last_of_its_role", arguments.output)
        if arguments.wait_s is None or arguments.undo:
            gauges = await ways.read_gauges(engine)
        else:
            engine, gauges = await _until_idle(ways, registry, arguments, LoopClock())
    show([engine_row(engine, gauges)], COLUMNS, arguments.output)
    return Exit.OK


async def _until_registered_so(registry: RegistryClient, arguments: Namespace, clock: Clock) -> Engine:
    """The engine once routers can know: its sidecar was told, and writes it into the store."""
    end_s = clock.now_s() + arguments.timeout_s
    while True:
        engine = await registry.find_engine(arguments.engine_id)
        if engine.draining is not arguments.undo:
            return engine
        if clock.now_s() >= end_s:
            wanted = "to take turns" if arguments.undo else "as draining"
            raise OperatorError(
                f"engine {arguments.engine_id} was told, but is not registered {wanted} after "
                f"{arguments.timeout_s:g} s: look at its sidecar and the store",
                Exit.PROBLEM,
            )
        await asyncio.sleep(WRITTEN_S)


def last_of_its_role(engine: Engine, registered: Sequence[Engine]) -> str:
    """What it means that no other engine can do the work of a drained one; empty when one can."""
    for other in registered:
        alike = other.role is engine.role and other.model == engine.model
        if alike and not other.draining and other.holder.engine_id != engine.holder.engine_id:
            return ""
    if engine.role is EngineRole.DECODE:
        what = "every turn is refused (503 decode_engines_draining)"
    else:
        what = "decode engines compute every prompt themselves"
    return (
        f"{engine.holder.engine_id} was the last {engine.role.value} engine of {engine.model} that takes turns: "
        f"{what} until another one does, or kvlease drain --undo"
    )


async def _until_idle(
    ways: Fleet, registry: RegistryClient, arguments: Namespace, clock: Clock
) -> tuple[Engine, HolderGauges]:
    end_s = clock.now_s() + arguments.wait_s
    while True:
        engine = await registry.find_engine(arguments.engine_id)
        gauges = await ways.read_gauges(engine)
        if gauges.running_requests == 0 and gauges.reading_blocks == 0:
            return engine, gauges
        if clock.now_s() >= end_s:
            raise OperatorError(
                f"engine {arguments.engine_id} still computes {gauges.running_requests} requests and "
                f"{gauges.reading_blocks} of its blocks are being read after {arguments.wait_s:g} s",
                Exit.PROBLEM,
            )
        await asyncio.sleep(LOOK_AGAIN_S)
