"""`kvlease`: the one command. Each subcommand's module is imported when it is asked for."""

import os
import sys
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Sequence
from importlib import import_module

from kvlease import __version__
from kvlease.operator.command import parser_kind

COMMANDS = {
    "registry": ("kvlease.registry.main", "serve engines and leases, and the way to their holders"),
    "sidecar": ("kvlease.sidecar.main", "serve the engines of one pod"),
    "router": ("kvlease.router.main", "serve the OpenAI API in front of the fleet"),
    "sim": ("kvlease.simulation.main", "run the whole system in virtual time over a faulty network, by seed"),
    "health": ("kvlease.operator.health", "tell by the exit status whether processes can do their work"),
    "bench": ("kvlease.bench.main", "measure one figure"),
    "engines": ("kvlease.operator.engines", "list the engines and their blocks"),
    "leases": ("kvlease.operator.leases", "list, get, watch or release leases"),
    "conversation": ("kvlease.operator.conversation", "show the turns of a conversation, and why each path"),
    "explain": (
        "kvlease.operator.explain",
        "make a recorded decision again: what each path would cost, and why",
    ),
    "drain": ("kvlease.operator.drain", "keep new turns away from an engine before it is stopped"),
    "top": ("kvlease.operator.top", "watch the fleet"),
    "doctor": ("kvlease.operator.doctor", "look for what is wrong or could be better in a fleet"),
    "completion": ("kvlease.completion", "print a shell's completion of this command"),
    "dev": ("kvlease.dev.main", "run the whole system on this machine and hold a conversation"),
}
"""Subcommand -> its module, with `add_arguments(parser)` and `run(arguments) -> int`, and what it does."""

SERVICES_PACKAGES = frozenset(
    {
        *("aiohttp", "google", "grpc_health", "grpc_reflection", "grpc_status", "httptools", "opentelemetry"),
        *("orjson", "prometheus_client", "uvloop"),
    }
)
"""What the extra `services` brings, as it is imported. An engine's environment need not have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand. The exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--version"]:
        print(f"kvlease {__version__}")
        return 0
    if not given or given[0] not in COMMANDS:
        asked_for_help = given[:1] in (["--help"], ["-h"])
        print(_usage(), file=sys.stdout if asked_for_help else sys.stderr)
        if given and not asked_for_help:
            print(f"\nkvlease: error: there is no command {given[0]!r}", file=sys.stderr)
        return 0 if asked_for_help else 2
    # gRPC's fork handlers are for processes that go on after a fork; ours only start others, and they warn.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    kind = parser_kind(given)
    try:
        module = import_module(COMMANDS[given[0]][0])
        parser = parser_of(given[0], kind)
        status: int = module.run(parser.parse_args(given[1:]))
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in SERVICES_PACKAGES:
            raise
        needs = f"this command needs {package}, which is not installed: pip install 'kvlease[services]'"
        kind(prog=f"kvlease {given[0]}", usage=SUPPRESS).error(needs)
    return status


def parser_of(name: str, kind: type[ArgumentParser] = ArgumentParser) -> ArgumentParser:
    """The parser of one subcommand; those of its verbs are of the same kind."""
    module_name, meaning = COMMANDS[name]
    parser = kind(prog=f"kvlease {name}", description=meaning)
    import_module(module_name).add_arguments(parser)
    return parser


def _usage() -> str:
    commands = "\n".join(f"  {name:12} {meaning}" for name, (_, meaning) in COMMANDS.items())
    return f"usage: kvlease COMMAND [--help] ...\n\n{commands}\n\n  --version  print the version"


if __name__ == "__main__":
    sys.exit(main())
