"""What every operator command shares: flags, exit statuses, and one line instead of a traceback."""

import asyncio
import json
import logging
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Coroutine, Sequence
from enum import Enum, IntEnum
from typing import Any, TypeAlias

from kvlease.core.errors import HolderUnreachable, InvalidArgument, KvleaseError
from kvlease.core.ids import lease_id_from_hex

DEFAULT_REGISTRY = "127.0.0.1:7700"
DEFAULT_ROUTING = "127.0.0.1:7710"
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
    """

    def __init__(self, message: str, status: Exit) -> None:
        super().__init__(message)
        self.status = status


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
    except OperatorError as error:
        return _stopped(name, str(error), error.status)
    except KvleaseError as error:
        return _stopped(name, str(error), status_of(error))


def status_of(error: KvleaseError) -> Exit:
    """What a command exits with that a domain error stopped."""
    if isinstance(error, HolderUnreachable):
        return Exit.UNREACHABLE
    return Exit.USAGE if isinstance(error, InvalidArgument) else Exit.PROBLEM


def _stopped(name: str, message: str, status: int) -> int:
    print(f"kvlease {name}: {message}", file=sys.stderr)
    return status


# --- flags ----------------------------------------------------------------------------------------------------


def add_common_flags(parser: ArgumentParser) -> None:
    """Adds `--output`, `--timeout-s` and `--tls-dir`."""
    parser.add_argument(
        "--output",
        type=Output,
        choices=tuple(Output),
        default=Output.TABLE,
        metavar="table|json",
        help="how to print what was found (default: table)",
    )
    parser.add_argument(
        "--timeout-s",
        type=seconds,
        default=5.0,
        metavar="SECONDS",
        help="how long each call may take (default: 5)",
    )
    parser.add_argument(
        "--tls-dir",
        default=os.environ.get("KVLEASE_TLS_DIR", ""),
        metavar="DIRECTORY",
        help="directory with ca.crt, tls.crt and tls.key of an operator, for processes that speak TLS "
        "(default: KVLEASE_TLS_DIR, else no TLS)",
    )


def add_registry_flag(parser: ArgumentParser) -> None:
    """Adds `--registry`."""
    parser.add_argument(
        "--registry",
        type=host_port,
        default=os.environ.get("KVLEASE_REGISTRY", DEFAULT_REGISTRY),
        metavar="HOST:PORT",
        help=f"a registry (default: KVLEASE_REGISTRY, else {DEFAULT_REGISTRY})",
    )


def add_routing_flag(parser: ArgumentParser) -> None:
    """Adds `--routing`."""
    parser.add_argument(
        "--routing",
        type=host_port,
        default=os.environ.get("KVLEASE_ROUTING", DEFAULT_ROUTING),
        metavar="HOST:PORT",
        help=f"a router's gRPC address (default: KVLEASE_ROUTING, else {DEFAULT_ROUTING})",
    )


def host_port(text: str) -> str:
    """An address as a flag.

    Raises:
        ArgumentTypeError: it is not host:port.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ArgumentTypeError(f"{text!r} is not host:port")
    return text


def seconds(text: str) -> float:
    """A duration as a flag.

    Raises:
        ArgumentTypeError: it is no number above 0 and at most a day.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 86_400:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and at most 86400")
    return value


def lease_id(text: str) -> int:
    """A lease id as an argument.

    Raises:
        ArgumentTypeError: it is not 16 hex digits.
    """
    try:
        return lease_id_from_hex(text)
    except InvalidArgument as error:
        raise ArgumentTypeError(str(error)) from error


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
