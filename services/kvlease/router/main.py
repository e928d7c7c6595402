"""`kvlease router`."""

from argparse import ArgumentParser, Namespace

from kvlease.router.config import RouterConfig
from kvlease.router.server import RouterServer
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.config import add_config_arguments
from kvlease.runtime.process import run_service


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease router`."""
    add_config_arguments(parser, RouterConfig)


def run(arguments: Namespace) -> int:
    """Serves until a signal. The exit status."""
    return run_service("router", RouterConfig, _build, arguments)


def _build(config: RouterConfig) -> RouterServer:
    return RouterServer.connected(config, LoopClock())
