"""`kvlease router`."""

import gc
import os
from argparse import ArgumentParser, Namespace

from kvlease.router.config import RouterConfig
from kvlease.router.server import RouterServer
from kvlease.router.workers import run_workers
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.config import ConfigError, add_config_arguments, load_config
from kvlease.runtime.process import run_service

GARBAGE_THRESHOLDS = (5_000, 10, 20)
"""A turn leaves next to no cycles, but collections look through what is remembered of each conversation: with the
interpreter's own thresholds (700, 10, 10) a tenth of a router's CPU, with these a fiftieth."""


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease router`."""
    add_config_arguments(parser, RouterConfig)


def run(arguments: Namespace) -> int:
    """Serves until a signal, with as many processes as configured. The exit status."""
    try:
        config = load_config(RouterConfig, "router", arguments, os.environ)
    except ConfigError:
        config = RouterConfig()  # what is wrong with it is told below
    if config.workers > 1:
        return run_workers(config, arguments)
    gc.freeze()  # what was imported stays
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    return run_service("router", RouterConfig, _build, arguments)


def _build(config: RouterConfig) -> RouterServer:
    return RouterServer.connected(config, LoopClock())
