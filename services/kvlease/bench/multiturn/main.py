"""`kvlease bench multiturn`: measures on engines, prints, and keeps every turn in a JSON file."""

import asyncio
import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp

from kvlease.bench.machine import machine
from kvlease.bench.multiturn import flags
from kvlease.bench.multiturn.attached import Attachment, attached
from kvlease.bench.multiturn.charts import figure_module, plot
from kvlease.bench.multiturn.engines import TurnFailedError, engine_facts, handshakes
from kvlease.bench.multiturn.experiment import Experiment
from kvlease.bench.multiturn.fleet import EngineChoice, Running, both_engines, kvlease_engines, stock_engines
from kvlease.bench.multiturn.plan import Cell, Mode, Sweep, TurnStats
from kvlease.bench.multiturn.record import AnyCell, Progress, Record, require_writable
from kvlease.bench.multiturn.replay import Replay
from kvlease.bench.multiturn.report import limits, ratios, strays, summary, table
from kvlease.bench.multiturn.streams import Measuring, StreamPlan, beside_turns
from kvlease.core.errors import InvalidArgument
from kvlease.dev.engine_env import EngineEnvironmentError
from kvlease.dev.engine_process import EngineProcessError
from kvlease.dev.stack import StackError
from kvlease.runtime.logging import LogFormat, LogLevel, configure_logging

FAILURES = (InvalidArgument, EngineProcessError, EngineEnvironmentError, StackError, TurnFailedError)

add_arguments = flags.add_arguments


@dataclass(frozen=True, slots=True)
class Part:
    """What is measured on the same engines: cells, and streams beside turns of other cells."""

    engines: AbstractAsyncContextManager[Running]
    cells: Sequence[AnyCell]
    streams: Sequence[Cell]


def run(arguments: Namespace) -> int:
    """Measures. 0 when every cell was measured."""
    configure_logging(LogLevel.WARNING, LogFormat.TEXT)
    try:
        return _run(arguments)
    except (TimeoutError, aiohttp.ClientError) as error:
        print(f"kvlease bench multiturn: no answer: {type(error).__name__} {error}", file=sys.stderr)
    except (*FAILURES, OSError) as error:
        print(f"kvlease bench multiturn: {error}", file=sys.stderr)
    return 1


def _run(arguments: Namespace) -> int:
    plan = flags.plan_of(arguments)
    attachment = flags.attachment_of(arguments)
    stream_plan = StreamPlan(arguments.streams, arguments.stream_tokens)
    if arguments.plot is not None:
        require_writable(arguments.plot)
        figure_module()
    record = Record(arguments.output, arguments.resume, flags.link_gb_s_of(arguments))
    if record.turns and not record.settings:
        print(f"{arguments.output} does not tell its settings: they must be the same", file=sys.stderr)
    record.agree(flags.settings_of(arguments))
    cells: list[AnyCell] = list(plan.cells(record.done))
    streams = stream_plan.left(plan, plan.modes, record.streams) if isinstance(plan, Sweep) else []
    if arguments.dry_run:
        print(
            "\n".join(
                [*(cell.name for cell in cells), *(f"streams/{cell.mode}/{cell.point}" for cell in streams)]
            )
        )
        return 0
    if cells or streams:
        record.runs.append(_about())
        experiment: Measuring = Experiment(plan) if isinstance(plan, Sweep) else Replay(plan)
        progress = Progress(len(cells))
        parts = _parts(arguments, attachment, cells, streams, progress)
        asyncio.run(_measure(parts, experiment, stream_plan, record, progress))
    _tell(record, arguments)
    return 0


def _about() -> dict[str, Any]:
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"kvlease {shlex.join(sys.argv[1:])}",
        "machine": machine(),
    }


def _parts(
    arguments: Namespace,
    attachment: Attachment | None,
    cells: list[AnyCell],
    streams: list[Cell],
    progress: Progress,
) -> Iterator[Part]:
    """Kvlease's engines, then stock's; both at once where they are to be side by side."""
    if attachment is not None:
        yield Part(attached(attachment, progress.say), cells, streams)
        return
    choice: EngineChoice = flags.choice_of(arguments, progress.say)
    ours = [cell for cell in cells if cell.mode is not Mode.STOCK]
    our_streams = [cell for cell in streams if cell.mode is not Mode.STOCK]
    modes = tuple(dict.fromkeys(cell.mode for cell in (*ours, *our_streams)))
    has_stock = any(cell.mode is Mode.STOCK for cell in (*cells, *streams))
    if modes and has_stock and arguments.side_by_side:
        yield Part(both_engines(choice, modes, progress.say), side_by_side(cells), streams)
        return
    if modes:
        yield Part(kvlease_engines(choice, modes, progress.say), ours, our_streams)
    if has_stock:
        yield Part(
            stock_engines(choice, progress.say),
            [cell for cell in cells if cell.mode is Mode.STOCK],
            [cell for cell in streams if cell.mode is Mode.STOCK],
        )


def side_by_side(cells: Sequence[AnyCell]) -> list[AnyCell]:
    """The cells by repeat and then by point, so that all modes of a point are measured after each other."""
    points = {cell.point: number for number, cell in reversed(list(enumerate(cells)))}
    return sorted(cells, key=lambda cell: (cell.repeat, points[cell.point]))


async def _measure(
    parts: Iterator[Part], experiment: Measuring, stream_plan: StreamPlan, record: Record, progress: Progress
) -> None:
    for part in parts:
        async with part.engines as running:
            record.agree(await _facts(running))
            progress.say("warming up")
            await experiment.warm(running)
            if running.sidecar_urls:
                record.runs[-1]["handshakes"] = await handshakes(running.session, running.sidecar_urls)
            for beside in part.streams:
                record.add_streams(await beside_turns(running, experiment, stream_plan, beside))
                print(json.dumps(record.streams[-1]), flush=True)
            for cell in part.cells:
                turns = await experiment.run(running, cell)
                require_read_back(cell, turns)
                record.add(turns)
                progress.step(cell, turns)


async def _facts(running: Running) -> dict[str, Any]:
    """What the engines are, by whose connector they have."""
    kinds = {"stock" if mode is Mode.STOCK else "kvlease" for mode in running.fleets}
    facts: dict[str, list[dict[str, Any]]] = {}
    for role, urls in (("prefill", running.prefill_urls), ("decode", running.decode_urls)):
        told = [(await engine_facts(running.session, url)).to_json() for url in urls]
        facts[role] = [fact for number, fact in enumerate(told) if fact not in told[:number]]
    return {f"{' and '.join(sorted(kinds))} engines": facts}


def require_read_back(cell: AnyCell, turns: Sequence[TurnStats]) -> None:
    """Refuses a stock cell whose prefill engine READ nothing: it would be compared as a readback."""
    if cell.mode is Mode.STOCK and not all(turn.prefill_bytes for turn in turns):
        raise TurnFailedError(
            f"{cell.name}: the stock prefill engine READ nothing back: there is nothing to compare"
        )


def _tell(record: Record, arguments: Namespace) -> None:
    rows = summary(record.turns)
    print(table(rows))
    for found in ratios(rows):
        print(json.dumps(found))
    if (rate := flags.link_gb_s_of(arguments)) is not None:
        record.write()
        for found in limits(rows, rate):
            print(json.dumps(found))
    for stray, count in strays(record.turns).items():
        print(f"not the path of its mode: {stray}, {count} turns", file=sys.stderr)
    if arguments.plot is not None:
        plot(rows, arguments.plot)
