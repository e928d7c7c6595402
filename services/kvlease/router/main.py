"""`kvlease router`: one router process."""

import asyncio
import logging
import os
import signal
from argparse import ArgumentParser, Namespace

import uvloop

from kvlease.router.config import RouterConfig
from kvlease.router.randomness import SystemRandom
from kvlease.router.registry_client import GrpcRegistry
from kvlease.router.server import RouterServer
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.config import add_config_arguments, describe_config, load_config
from kvlease.runtime.grpc_client import Channels
from kvlease.runtime.logging import configure_logging

log = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease router`."""
    add_config_arguments(parser, RouterConfig)


def main(arguments: Namespace) -> int:
    """Runs a router until SIGINT or SIGTERM; the exit status.

    Raises:
        ConfigError: the configuration makes no sense.
        InvalidArgument: an address cannot be bound.
    """
    config = load_config(RouterConfig, "router", arguments, os.environ)
    configure_logging(config.log_level, config.log_format)
    log.info("configuration", extra=describe_config(config))
    uvloop.run(_serve(config))
    return 0


async def _serve(config: RouterConfig) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    channels = Channels()
    registry = GrpcRegistry(
        channels,
        config.registry,
        SystemRandom().text_id(),
        config.renewal_policy(),
        config.registry_call_s,
    )
    server = RouterServer(config, LoopClock(), registry)
    try:
        await server.start()
        await stopped.wait()
    finally:
        await server.stop()
        await channels.close()
