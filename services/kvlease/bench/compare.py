"""`kvlease bench compare A.json B.json`: two records of `kvlease bench multiturn`, point by point."""

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from kvlease.bench.multiturn.record import read_record
from kvlease.bench.multiturn.report import compared, summary
from kvlease.core.errors import InvalidArgument


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the two records."""
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--output", choices=("table", "json"), default="table")


def run(arguments: Namespace) -> int:
    """Prints the second record's TTFT over the first's. 1 when they share no point."""
    try:
        one, other = (summary(read_record(path)[0]) for path in (arguments.first, arguments.second))
    except InvalidArgument as error:
        print(f"kvlease bench compare: {error}", file=sys.stderr)
        return 1
    rows = compared(one, other)
    if arguments.output == "json":
        print(json.dumps(rows, indent=1))
    else:
        print(
            f"{'mode':8}{'turn':>6}{'prompt':>8}{'suffix':>8}{'at once':>8}"
            f"{'first ms':>10}{'second ms':>10}{'ratio':>8}"
        )
        for row in rows:
            print(
                f"{row['mode']:8}{row['turn']:>6}{row['length']:>8}{row['suffix']:>8}{row['conversations']:>8}"
                f"{row['first_p50_ms']:>10.1f}{row['second_p50_ms']:>10.1f}{row['ratio']:>8.3f}"
            )
    if not rows:
        print("the records share no point", file=sys.stderr)
    return 0 if rows else 1
