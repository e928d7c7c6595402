"""`kvlease engines`: every registered engine, and its blocks as its holder counts them."""

import asyncio
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from kvlease.core.errors import KvleaseError
from kvlease.core.records import Engine, HolderGauges
from kvlease.operator.command import Exit, perform, show
from kvlease.operator.connection import Fleet, fleet
from kvlease.operator.flags import add_common_flags, add_registry_flag
from kvlease.operator.rows import engine_row

COLUMNS = (
    "engine_id",
    "role",
    "state",
    "model",
    "held_blocks",
    "reading_blocks",
    "quarantined_blocks",
    "free_blocks",
    "total_blocks",
    "running_requests",
    "sidecar_address",
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease engines`."""
    add_registry_flag(parser)
    add_common_flags(parser)
    parser.epilog = "Exit status: 0, 1 an engine does not answer, 2 usage, 3 the registry does not answer."


def run(arguments: Namespace) -> int:
    """Lists the engines. The exit status: 1 when one of them is silent."""
    return perform("engines", _list, arguments)


async def _list(arguments: Namespace) -> int:
    async with fleet(arguments) as ways:
        registry = await ways.registry(arguments.registry)
        engines = await registry.list_engines()
        gauges = await read_all(ways, engines)
    rows = [engine_row(engine, found) for engine, found in zip(engines, gauges, strict=True)]
    show(rows, COLUMNS, arguments.output)
    return Exit.PROBLEM if None in gauges else Exit.OK


async def read_all(ways: Fleet, engines: Sequence[Engine]) -> list[HolderGauges | None]:
    """The gauges of each engine, all asked at once; None for one that does not answer."""

    async def read(engine: Engine) -> HolderGauges | None:
        try:
            return await ways.read_gauges(engine)
        except KvleaseError:
            return None

    return list(await asyncio.gather(*map(read, engines)))
