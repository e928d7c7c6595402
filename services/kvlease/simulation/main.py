"""`kvlease sim`: many seeds of the simulated fleet."""

import json
import logging
import sys
from argparse import ArgumentParser, Namespace

from kvlease.simulation.run import RunResult, simulate
from kvlease.simulation.world import WorldSettings


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease sim`."""
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds to run (default: 20)")
    parser.add_argument("--from", type=int, default=1, dest="first", metavar="SEED", help="the first seed")
    parser.add_argument("--duration-s", type=float, default=120.0, help="virtual seconds of every seed")
    parser.add_argument("--routers", type=int, default=2, help="routers that share the fleet (default: 2)")
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what is printed")


def run(arguments: Namespace) -> int:
    """Runs the seeds. The exit status: 0 when every promise was kept."""
    logging.getLogger("kvlease").setLevel(logging.CRITICAL)
    results: list[RunResult] = []
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        settings = WorldSettings(seed, duration_s=arguments.duration_s, routers=arguments.routers)
        result = simulate(settings)
        results.append(result)
        if arguments.output == "table":
            sys.stdout.write(_line(result, replay_command(settings)) + "\n")
            sys.stdout.flush()
    ok = all(result.ok for result in results)
    if arguments.output == "json":
        document = {"ok": ok, "seeds": [result.to_json() for result in results]}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 0 if ok else 1


def replay_command(settings: WorldSettings) -> str:
    """What a person types to run a seed again."""
    return (
        f"kvlease sim --seeds 1 --from {settings.seed} --duration-s {settings.duration_s:g} "
        f"--routers {settings.routers} --output json"
    )


def _line(result: RunResult, command: str) -> str:
    counts = (
        f"seed {result.seed}: {result.turns} turns, {result.used_reads} READs used, "
        f"{result.errors} errors, {result.aborted} aborted, {result.digest}"
    )
    problems = [f"\n  {problem}" for problem in result.problems]
    again = f"\n  again: {command}" if problems else ""
    return counts + "".join(problems) + again
