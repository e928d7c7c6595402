"""`kvlease sidecar`."""

import logging
from argparse import ArgumentParser, Namespace

from kvlease.runtime.clock import LoopClock
from kvlease.runtime.config import add_config_arguments
from kvlease.runtime.process import run_service
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.server import SidecarServer
from kvlease.store.memory import MemoryStore

_log = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease sidecar`."""
    add_config_arguments(parser, SidecarConfig)


def run(arguments: Namespace) -> int:
    """Serves until a signal. The exit status."""
    return run_service("sidecar", SidecarConfig, _build, arguments)


def _build(config: SidecarConfig) -> SidecarServer:
    _log.warning(
        "the memory store lives in this one process: no registry of another process sees this sidecar. "
        "`kvlease dev` runs registry, router and sidecars over one memory store"
    )
    return SidecarServer(config, MemoryStore(), LoopClock())
