"""`kvlease sidecar`."""

from argparse import ArgumentParser, Namespace

from kvlease.runtime.clock import LoopClock
from kvlease.runtime.config import add_config_arguments
from kvlease.runtime.process import ClosedAfter, Service, run_service
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.server import SidecarServer
from kvlease.store.settings import make_store


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease sidecar`."""
    add_config_arguments(parser, SidecarConfig)


def run(arguments: Namespace) -> int:
    """Serves until a signal. The exit status."""
    return run_service("sidecar", SidecarConfig, _build, arguments)


def _build(config: SidecarConfig) -> Service:
    store = make_store(config)
    return ClosedAfter(SidecarServer(config, store, LoopClock()), store.close)
