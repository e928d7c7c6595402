"""`kvlease bench NAME`: one figure, measured by one command."""

import signal
from argparse import REMAINDER, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from kvlease.operator.command import EXIT_INTERRUPTED

BENCHMARKS = {
    "multiturn": (
        "kvlease.bench.multiturn.main",
        "turn two of a conversation on real engines, by path, beside stock",
    ),
    "compare": ("kvlease.bench.compare", "two records of multiturn, point by point"),
    "router": ("kvlease.bench.router", "what a router adds to a turn, beside its peers"),
    "leases": ("kvlease.bench.leases", "many leases renewed through one registry, pins meanwhile, a purge"),
    "routing": (
        "kvlease.bench.routing.main",
        "time to the first token on a trace, by what routes turns, on simulated engines",
    ),
    "policy": ("kvlease.bench.policy", "what keeping conversations costs and saves on a trace, by policy"),
}
"""Benchmark -> its module, with `add_arguments(parser)` and `run(arguments) -> int`, and what it measures."""


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the name of a benchmark; what follows it is the benchmark's own."""
    parser.formatter_class = RawDescriptionHelpFormatter
    names = "\n".join(f"  {name:10} {meaning}" for name, (_, meaning) in BENCHMARKS.items())
    parser.epilog = f"benchmarks, each with a --help of its own:\n{names}"
    parser.add_argument("name", choices=tuple(BENCHMARKS), help="the benchmark")
    parser.add_argument("arguments", nargs=REMAINDER, metavar="...", help="its own arguments")


def run(arguments: Namespace) -> int:
    """Measures. The exit status: 0 when every goal of the benchmark was met, 130 when it was interrupted."""
    module_name, meaning = BENCHMARKS[arguments.name]
    module = import_module(module_name)
    parser = ArgumentParser(prog=f"kvlease bench {arguments.name}", description=meaning)
    module.add_arguments(parser)
    try:
        with _interrupted_when_terminated():
            status: int = module.run(parser.parse_args(arguments.arguments))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


@contextmanager
def _interrupted_when_terminated() -> Generator[None]:
    """Has SIGTERM do what Ctrl-C does: what a benchmark started is ended, children of an engine, too."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell has its jobs in the background ignore it
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)
