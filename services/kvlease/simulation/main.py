"""`kvlease sim`: many seeds of the simulated fleet."""

import json
import logging
import multiprocessing
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

from kvlease.simulation.run import RunResult, simulate
from kvlease.simulation.world import WorldSettings

SEEDS_A_JOB_MIN = 10
"""Fewer seeds take less time than a process takes to start."""


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease sim`."""
    defaults = WorldSettings(seed=0)
    parser.add_argument("--seeds", type=_at_least(1), default=20, help="how many seeds to run (default: 20)")
    parser.add_argument(
        "--from", type=_at_least(0), default=1, dest="first", metavar="SEED", help="the first seed"
    )
    parser.add_argument(
        "--duration-s",
        type=_positive,
        default=defaults.duration_s,
        help=f"virtual seconds of faults in every seed (default: {defaults.duration_s:g})",
    )
    parser.add_argument(
        "--routers",
        type=_at_least(1),
        default=defaults.routers,
        help=f"routers that share the fleet (default: {defaults.routers})",
    )
    parser.add_argument(
        "--jobs",
        type=_at_least(1),
        help="processes that run seeds (default: one for each processor, as far as each gets ten seeds)",
    )
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what is printed")


def run(arguments: Namespace) -> int:
    """Runs the seeds. The exit status: 0 when every promise was kept."""
    worlds = [
        WorldSettings(seed, duration_s=arguments.duration_s, routers=arguments.routers)
        for seed in range(arguments.first, arguments.first + arguments.seeds)
    ]
    processors = len(os.sched_getaffinity(0))
    jobs = arguments.jobs or max(1, min(processors, arguments.seeds // SEEDS_A_JOB_MIN))
    results: list[RunResult] = []
    with _simulated(worlds, jobs) as run_results:
        for settings, result in zip(worlds, run_results, strict=True):
            results.append(result)
            if arguments.output == "table":
                sys.stdout.write(_line(result, replay_command(settings)) + "\n")
                sys.stdout.flush()
    if arguments.output == "json":
        sys.stdout.write(json.dumps(document(results), indent=2) + "\n")
    return 0 if all(result.ok for result in results) else 1


@contextmanager
def _simulated(worlds: Sequence[WorldSettings], jobs: int) -> Generator[Iterable[RunResult]]:
    """What comes of each world, in their order. A seed's result does not depend on the process it runs in."""
    if jobs == 1:
        _be_quiet()
        yield map(simulate, worlds)
        return
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawning, initializer=_be_quiet) as processes:
        yield processes.map(simulate, worlds)


def _be_quiet() -> None:
    logging.getLogger("kvlease").setLevel(logging.CRITICAL)


def document(results: Sequence[RunResult]) -> dict[str, Any]:
    """What a run of seeds came to.

    `violations` counts the seeds that broke a promise, `first_seed` is the first of them (null: none), and `digest`
    is over everything that happened in all of them.
    """
    failed = [result for result in results if not result.ok]
    digest = blake2b("".join(result.digest for result in results).encode(), digest_size=16)
    return {
        "seeds": len(results),
        "steps": sum(result.steps for result in results),
        "violations": len(failed),
        "first_seed": failed[0].seed if failed else None,
        "turns": sum(result.turns for result in results),
        "errors": sum(result.errors for result in results),
        "used_reads": sum(result.used_reads for result in results),
        "virtual_s": round(sum(result.virtual_s for result in results), 3),
        "digest": digest.hexdigest(),
        "failed": [result.to_json() for result in failed],
    }


def replay_command(settings: WorldSettings) -> str:
    """What a person types to run a seed again."""
    return (
        f"kvlease sim --seeds 1 --from {settings.seed} --duration-s {settings.duration_s:g} "
        f"--routers {settings.routers} --output json"
    )


def _line(result: RunResult, command: str) -> str:
    counts = (
        f"seed {result.seed}: {result.steps} steps, {result.turns} turns, {result.used_reads} READs used, "
        f"{result.errors} errors, {result.aborted} aborted, {result.digest}"
    )
    problems = [f"\n  {problem}" for problem in result.problems]
    again = f"\n  again: {command}" if problems else ""
    return counts + "".join(problems) + again


def _at_least(least: int) -> Any:
    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise ArgumentTypeError(f"{value} is below {least}")
        return value

    read.__name__ = "whole number"
    return read


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86_400:
        raise ArgumentTypeError(f"{text} is not between 0 and 86400 seconds")
    return value
