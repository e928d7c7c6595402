"""Where the requests of a benchmark come from: a trace, or a made-up hour."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from kvlease.bench.trace import Visit, generate_trace, read_trace
from kvlease.core.errors import InvalidArgument


def add_source(parser: ArgumentParser) -> None:
    """Adds the flags that `visits_of` reads."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--trace", type=Path, help="requests, one JSON object a line; see kvlease.bench.trace"
    )
    source.add_argument("--generate", type=int, metavar="SEED", help="a made-up hour instead of a trace")
    parser.add_argument("--seconds", type=int, default=3600, help="length of the made-up trace")


def visits_of(arguments: Namespace) -> list[Visit]:
    """The requests.

    Raises:
        OSError: the trace cannot be read.
        InvalidArgument: it is none, or holds no request.
    """
    if arguments.trace is None:
        return read_trace(generate_trace(arguments.generate, arguments.seconds))
    with arguments.trace.open() as lines:
        visits = read_trace(lines)
    if not visits:
        raise InvalidArgument(f"{arguments.trace} holds no request")
    return visits


def source_of(arguments: Namespace) -> str:
    """The flags that name the requests again."""
    if arguments.trace is None:
        return f"--generate {arguments.generate} --seconds {arguments.seconds}"
    return f"--trace {arguments.trace.name}"
