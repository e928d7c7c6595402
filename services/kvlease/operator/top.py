"""`kvlease top`: the fleet at a glance, again and again; rates are of the time between two looks."""

import asyncio
import json
import sys
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlease.core.records import Engine, HolderGauges, LeaseRecord
from kvlease.operator.command import Exit, Output, Row, perform, table
from kvlease.operator.connection import Fleet, RegistryClient, fleet
from kvlease.operator.engines import read_all
from kvlease.operator.flags import add_common_flags, add_registry_flag, count, seconds
from kvlease.operator.rows import engine_row
from kvlease.runtime.clock import LoopClock

COLUMNS = (
    "engine_id",
    "role",
    "state",
    "running_requests",
    "leases",
    "held_percent",
    "reading_percent",
    "quarantined_blocks",
    "free_blocks",
    "read_mib_per_s",
    "evictions_per_s",
)
CLEAR = "\x1b[H\x1b[2J"
"""Moves a terminal's cursor home and clears the screen; nothing of it goes into a file or a pipe."""


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen of the fleet at `at_s`, seconds of a monotonic clock."""

    at_s: float
    engines: tuple[Engine, ...]
    gauges: tuple[HolderGauges | None, ...]
    leases: tuple[LeaseRecord, ...]

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """The counters of each engine that answered."""
        return {
            engine.holder.engine_id: gauges.counters
            for engine, gauges in zip(self.engines, self.gauges, strict=True)
            if gauges is not None
        }


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease top`."""
    parser.add_argument(
        "--interval-s", type=seconds, default=2.0, metavar="SECONDS", help="between two looks (default: 2)"
    )
    parser.add_argument("--count", type=count, metavar="N", help="end after N looks (default: Ctrl-C)")
    add_registry_flag(parser)
    add_common_flags(parser)
    parser.epilog = "With --output json each look is one line."


def run(arguments: Namespace) -> int:
    """Shows the fleet until Ctrl-C, or `--count` times."""
    return perform("top", _watch, arguments)


async def _watch(arguments: Namespace) -> int:
    left, before = arguments.count or -1, None
    async with fleet(arguments) as ways:
        registry = await ways.registry(arguments.registry)
        while True:
            look = await _look(ways, registry)
            _print_look(look, before, arguments.output)
            before = look
            left -= 1
            if left == 0:
                return Exit.OK
            await asyncio.sleep(arguments.interval_s)


async def _look(ways: Fleet, registry: RegistryClient) -> Look:
    engines, leases = await asyncio.gather(registry.list_engines(), registry.list_leases())
    gauges = await read_all(ways, engines)
    return Look(LoopClock().now_s(), engines, tuple(gauges), leases)


def top_rows(look: Look, before: Look | None) -> list[Row]:
    """One row per engine; rates are null at the first look, and of an engine that was not there before."""
    leases = Counter(lease.holder.engine_id for lease in look.leases)
    earlier: Mapping[str, Mapping[str, int]] = before.counters() if before is not None else {}
    elapsed_s = look.at_s - before.at_s if before is not None else 0.0
    rows: list[Row] = []
    for engine, gauges in zip(look.engines, look.gauges, strict=True):
        engine_id = engine.holder.engine_id
        row = engine_row(engine, gauges)
        row["leases"] = leases[engine_id]
        row["held_percent"] = _percent(row["held_blocks"], engine.total_blocks)
        row["reading_percent"] = _percent(row["reading_blocks"], engine.total_blocks)
        counters = gauges.counters if gauges is not None else {}
        known = earlier.get(engine_id) if gauges is not None else None
        row["read_mib_per_s"] = _rate(counters, known, "bytes_read", elapsed_s, 1 << 20)
        row["evictions_per_s"] = _rate(counters, known, "evictions", elapsed_s, 1)
        rows.append(row)
    return rows


def _percent(part: int | None, whole: int) -> float | None:
    return None if part is None or not whole else 100.0 * part / whole


def _rate(
    counters: Mapping[str, int], before: Mapping[str, int] | None, name: str, elapsed_s: float, unit: int
) -> float | None:
    if before is None or elapsed_s <= 0:
        return None
    return max(0, counters.get(name, 0) - before.get(name, 0)) / unit / elapsed_s


def _print_look(look: Look, before: Look | None, output: Output) -> None:
    rows = top_rows(look, before)
    if output is Output.JSON:
        print(json.dumps({"engines": rows, "leases": len(look.leases)}))
    else:
        head = CLEAR if sys.stdout.isatty() else ""
        print(f"{head}{_summary(look)}\n{table(rows, COLUMNS)}\n")
    sys.stdout.flush()


def _summary(look: Look) -> str:
    roles = Counter(engine.role.value for engine in look.engines)
    silent = sum(gauges is None for gauges in look.gauges)
    tokens = sum(lease.tokens for lease in look.leases)
    words = [f"{count} {role}" for role, count in sorted(roles.items())] or ["no engines"]
    if silent:
        words.append(f"{silent} silent")
    return (
        f"{', '.join(words)}; {len(look.leases)} leases of {tokens:,} tokens, {_tenants(look.leases)} tenants"
    )


def _tenants(leases: Sequence[LeaseRecord]) -> int:
    return len({lease.tenant for lease in leases})
