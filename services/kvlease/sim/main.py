"""A simulated engine as a process."""

import asyncio
import logging
import os
import signal
import sys
import uuid
from argparse import ArgumentParser, Namespace
from dataclasses import replace

from aiohttp import web

from kvlease.core.ids import Holder
from kvlease.core.records import KvLocation
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.config import ConfigError, add_config_arguments, load_config
from kvlease.runtime.http_log import server_logger
from kvlease.runtime.logging import configure_logging
from kvlease.runtime.telemetry import make_telemetry
from kvlease.runtime.tls import make_tls
from kvlease.sim.config import SimConfig
from kvlease.sim.engine import SimEngine
from kvlease.sim.http import EngineApi
from kvlease.sim.link import SidecarLink
from kvlease.sim.side_channel import SideChannel, serve_side_channel
from kvlease.sim.tracing import TracedPins, TracedTransfers

_log = logging.getLogger(__name__)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds a flag for every setting."""
    add_config_arguments(parser, SimConfig)


async def serve(config: SimConfig, stop: asyncio.Event) -> None:
    """Serves one engine until `stop` is set."""
    holder = Holder(f"sim-{uuid.uuid4().hex}", uuid.uuid4().hex)
    tls = make_tls(config)
    telemetry = make_telemetry("kvlease-sim", config)
    tracer = telemetry.tracer
    link = SidecarLink(config.socket_dir, config.pin_wait_s, tracer)
    location = KvLocation(config.host, config.side_channel_port)
    pins = TracedPins(link, tracer)
    transfers = TracedTransfers(SideChannel(config.read_block_s), tracer, config.block_bytes)
    engine = SimEngine(config.engine(), holder, location, LoopClock(), pins, transfers)
    async with serve_side_channel(engine, config.host, config.side_channel_port) as side_channel_port:
        engine.place(replace(location, side_channel_port=side_channel_port))
        runner = web.AppRunner(
            EngineApi(engine, tracer).app(), handler_cancellation=True, access_log=None, logger=server_logger
        )
        await runner.setup()
        ssl_context = None if tls is None else tls.server_context(clients_have_certificates=True)
        await web.TCPSite(runner, config.host, config.port, ssl_context=ssl_context).start()
        _log.info("engine ready", extra={"engine_id": holder.engine_id, "address": str(runner.addresses[0])})
        attached = asyncio.create_task(link.run(engine), name="link")
        try:
            await stop.wait()
        finally:
            attached.cancel()
            await asyncio.gather(attached, return_exceptions=True)
            await runner.cleanup()
            await engine.close()
            await telemetry.close()


async def _until_signal(config: SimConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await serve(config, stop)


def run(arguments: Namespace) -> int:
    """Serves until SIGINT or SIGTERM. The exit status."""
    try:
        config = load_config(SimConfig, "sim", arguments, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    configure_logging(config.log_level, config.log_format)
    asyncio.run(_until_signal(config))
    return 0
