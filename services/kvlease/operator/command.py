"""What every operator command shares: exit statuses, one line instead of a traceback, and how rows are shown.

With `--output json` that line is an object on standard error; standard output has results alone. A command line
that asks for JSON gets its own faults told in the same way.
"""

import asyncio
import json
import logging
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum, IntEnum
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias

from kvlease.core.errors import HolderUnreachable, InvalidArgument, KvleaseError, UnknownEngine

EXIT_INTERRUPTED = 130

Row: TypeAlias = dict[str, Any]
Perform: TypeAlias = Callable[[Namespace], Coroutine[Any, Any, int]]


class Exit(IntEnum):
    """The exit status of an operator command."""

    OK = 0
    PROBLEM = 1
    USAGE = 2
    UNREACHABLE = 3


class Output(Enum):
    """How a command prints what it found."""

    TABLE = "table"
    JSON = "json"


class OperatorError(Exception):
    """A command cannot go on; the message is one line for a person.

    Attributes:
        status: what the command exits with.
        reason: why, for scripts: `not_found`, else the status in lower case.
    """

    def __init__(self, message: str, status: Exit, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason or status.name.lower()


def not_found(message: str) -> OperatorError:
    """What was asked for is not there, though whoever would know it answered."""
    return OperatorError(message, Exit.PROBLEM, "not_found")


def parser_kind(given: Sequence[str]) -> type[ArgumentParser]:
    """What parses a command line: it tells faults of the line as JSON where the line asks for JSON."""
    wants_json = "--output=json" in given or ("--output", "json") in pairwise(given)
    return _JsonParser if wants_json else ArgumentParser


class _JsonParser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends the command as a wrong use."""
        wrong = OperatorError(message, Exit.USAGE)
        sys.exit(_complain(self.prog.removeprefix("kvlease "), wrong, Output.JSON))


def perform(name: str, command: Perform, arguments: Namespace) -> int:
    """Runs a command to its end. The exit status; whatever stops it is said in one line on standard error."""
    # What a command has to say, it says itself; the log of what it uses is for processes that serve.
    logging.getLogger("kvlease").addHandler(logging.NullHandler())
    try:
        return asyncio.run(_performed(name, command, arguments))
    except BrokenPipeError:
        # Whoever read the output has left, as `| head` does; Python must not try to flush what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


async def _performed(name: str, command: Perform, arguments: Namespace) -> int:
    try:
        return await command(arguments)
    except (OperatorError, KvleaseError) as error:
        stopped = error if isinstance(error, OperatorError) else _of_domain(error)
        return _complain(name, stopped, arguments.output)


def _of_domain(error: KvleaseError) -> OperatorError:
    """What a command makes of a domain error that stopped it."""
    if isinstance(error, UnknownEngine):
        return not_found(str(error))
    if isinstance(error, HolderUnreachable):
        return OperatorError(str(error), Exit.UNREACHABLE)
    return OperatorError(str(error), Exit.USAGE if isinstance(error, InvalidArgument) else Exit.PROBLEM)


def _complain(name: str, error: OperatorError, output: Output) -> int:
    _say("error", name, str(error), output, reason=error.reason, exit_status=int(error.status))
    return error.status


def warn(name: str, message: str, reason: str, output: Output) -> None:
    """Says on standard error what a person should know though the command did what it was told."""
    _say("warning", name, message, output, reason=reason)


def _say(kind: str, name: str, message: str, output: Output, **more: Any) -> None:
    line = f"kvlease {name}: {'warning: ' if kind == 'warning' else ''}{message}"
    if output is Output.JSON:
        line = json.dumps({kind: {"command": name, "message": message, **more}})
    print(line, file=sys.stderr)


# --- output ---------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row], columns: Sequence[str], output: Output) -> None:
    """Prints rows: as a JSON array with all that they have, or as a table of the columns."""
    if output is Output.JSON:
        print(json.dumps(list(rows), indent=2))
    else:
        print(table(rows, columns))


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """A heading and one line per row; numbers stand to the right."""
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    headings = [column.replace("_", " ").upper() for column in columns]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    numeric = [
        bool(rows) and all(isinstance(row.get(column), int | float | None) for row in rows)
        for column in columns
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in (headings, *cells)
    )


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}"
    return str(value)
