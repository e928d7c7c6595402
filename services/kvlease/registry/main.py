"""`kvlease registry`."""

import logging
from argparse import ArgumentParser, Namespace

from kvlease.registry.config import RegistryConfig
from kvlease.registry.server import RegistryServer
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.config import add_config_arguments
from kvlease.runtime.process import run_service
from kvlease.store.memory import MemoryStore

_log = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease registry`."""
    add_config_arguments(parser, RegistryConfig)


def run(arguments: Namespace) -> int:
    """Serves until a signal. The exit status."""
    return run_service("registry", RegistryConfig, _build, arguments)


def _build(config: RegistryConfig) -> RegistryServer:
    _log.warning(
        "the memory store lives in this one process: this registry sees no sidecar of another process. "
        "`kvlease dev` runs registry, router and sidecars over one memory store"
    )
    return RegistryServer(config, MemoryStore(), LoopClock())
