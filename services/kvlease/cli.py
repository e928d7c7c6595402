"""`kvlease`: the one command. Each subcommand's module is imported when it is asked for."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module

from kvlease import __version__

COMMANDS = {
    "registry": ("kvlease.registry.main", "serve engines and leases, and the way to their holders"),
    "sidecar": ("kvlease.sidecar.main", "serve the engines of one pod"),
    "router": ("kvlease.router.main", "serve the OpenAI API in front of the fleet"),
    "sim": ("kvlease.simulation.main", "run the whole system in virtual time over a faulty network, by seed"),
    "health": ("kvlease.operator.health", "tell by the exit status whether processes can do their work"),
    "bench": ("kvlease.bench.main", "measure one figure"),
    "dev": ("kvlease.dev.main", "run the whole system on this machine and hold a conversation"),
}
"""Subcommand -> its module, with `add_arguments(parser)` and `run(arguments) -> int`, and what it does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand. The exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:
        print(f"kvlease {__version__}")
        return 0
    if not given or given[0] not in COMMANDS:
        asked_for_help = given[:1] in (["--help"], ["-h"])
        print(_usage(), file=sys.stdout if asked_for_help else sys.stderr)
        return 0 if asked_for_help else 2
    # gRPC's fork handlers are for processes that go on after a fork; ours only start others, and they warn.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    name, (module_name, meaning) = given[0], COMMANDS[given[0]]
    module = import_module(module_name)
    parser = ArgumentParser(prog=f"kvlease {name}", description=meaning)
    module.add_arguments(parser)
    status: int = module.run(parser.parse_args(given[1:]))
    return status


def _usage() -> str:
    commands = "\n".join(f"  {name:10} {meaning}" for name, (_, meaning) in COMMANDS.items())
    return f"usage: kvlease COMMAND [--help] ...\n\n{commands}\n\n  --version  print the version"


if __name__ == "__main__":
    sys.exit(main())
