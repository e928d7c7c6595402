"""The command `kvlease bench routing`."""

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from kvlease.bench.machine import machine
from kvlease.bench.routing.report import measure
from kvlease.bench.source import add_source, source_of, visits_of
from kvlease.core.errors import InvalidArgument

LOADS = (0.5, 1.0, 1.5)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease bench routing`."""
    add_source(parser)
    parser.add_argument(
        "--loads",
        type=_loads,
        default=LOADS,
        metavar="SHARE,...",
        help="shares of what the prefill engines can compute (default: 0.5,1,1.5)",
    )
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what is printed")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write FILE.png (needs the extra bench)")


def run(arguments: Namespace) -> int:
    """Measures and prints. The exit status: 0 when ours is nowhere beaten, 1 when it is, 2 for a trace that is none."""
    try:
        report = measure(visits_of(arguments), arguments.loads)
    except (OSError, InvalidArgument) as error:
        sys.stderr.write(f"kvlease bench routing: {error}\n")
        return 2
    loads = ",".join(f"{load:g}" for load in arguments.loads)
    document = {
        "what": "time to the first token of a trace's turns on simulated engines in virtual time, by load and policy",
        "command": f"kvlease bench routing {source_of(arguments)} --loads {loads}",
        "machine": machine(),
        **report.to_json(),
    }
    text = json.dumps(document, indent=2) if arguments.output == "json" else report.table()
    sys.stdout.write(text + "\n")
    if arguments.plot is not None:
        from kvlease.bench.routing.plot import plot

        plot(report, arguments.plot)
    return 0 if all(report.goals().values()) else 1


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(float(part) for part in text.split(","))
    except ValueError:
        loads = ()
    if not loads or not all(0.0 < load <= 100.0 for load in loads):
        raise ArgumentTypeError(f"shares above 0 and at most 100, with commas, not {text!r}")
    return loads
