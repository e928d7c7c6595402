"""`kvlease bench compare A.json B.json`: two records of `kvlease bench multiturn`, point by point."""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlease.bench.multiturn.record import read_record
from kvlease.bench.multiturn.report import compared, compared_table, summary
from kvlease.core.errors import InvalidArgument


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the two records."""
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument("--output", choices=("table", "json"), default="table")


def run(arguments: Namespace) -> int:
    """Prints the second record's TTFT over the first's. 1 when they share no point."""
    try:
        documents = [read_record(path) for path in (arguments.first, arguments.second)]
    except InvalidArgument as error:
        print(f"kvlease bench compare: {error}", file=sys.stderr)
        return 1
    one, other = (summary(document["turns"]) for document in documents)
    rows = compared(one, other)
    print(json.dumps(rows, indent=1) if arguments.output == "json" else compared_table(rows))
    for note in _notes(documents, (len(one) - len(rows), len(other) - len(rows))):
        print(note, file=sys.stderr)
    if not rows:
        print("the records share no point", file=sys.stderr)
    return 0 if rows else 1


def _notes(documents: Sequence[Mapping[str, Any]], alone: tuple[int, int]) -> Iterator[str]:
    """What a reader of the ratios must know: what differs beside the code, and what was not compared."""
    first, second = (document.get("settings", {}) for document in documents)
    for name in sorted(first.keys() & second.keys()):
        if first[name] != second[name]:
            yield f"the records differ in {name}: {json.dumps(first[name])} and {json.dumps(second[name])}"
    for which, count in zip(("first", "second"), alone, strict=True):
        if count:
            yield f"{count} points of the {which} record are not in the other"
