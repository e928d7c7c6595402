"""`kvlease registry`."""

from argparse import ArgumentParser, Namespace

from kvlease.registry.config import RegistryConfig
from kvlease.registry.server import RegistryServer
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.config import add_config_arguments
from kvlease.runtime.process import ClosedAfter, Service, run_service
from kvlease.store.settings import make_store


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease registry`."""
    add_config_arguments(parser, RegistryConfig)


def run(arguments: Namespace) -> int:
    """Serves until a signal. The exit status."""
    return run_service("registry", RegistryConfig, _build, arguments)


def _build(config: RegistryConfig) -> Service:
    store = make_store(config)
    return ClosedAfter(RegistryServer(config, store, LoopClock()), store.close)
