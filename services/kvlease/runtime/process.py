"""Runs a service as the whole of a process: configuration, logs, signals, one loop."""

import asyncio
import logging
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar, cast, runtime_checkable

from kvlease import __version__
from kvlease.core.errors import KvleaseError
from kvlease.runtime.config import ConfigError, ProcessConfig, describe_config, load_config
from kvlease.runtime.logging import LogFormat, LogLevel, configure_logging

_log = logging.getLogger(__name__)


class Service(Protocol):
    """Something that is started and stopped as a whole."""

    async def start(self) -> None:
        """Begins to serve."""
        ...

    async def stop(self) -> None:
        """Ends gracefully. Idempotent."""
        ...


ReloadedConfig = TypeVar("ReloadedConfig", contravariant=True)


@runtime_checkable
class Reloadable(Protocol[ReloadedConfig]):
    """A service that takes some settings anew while it runs, on SIGHUP."""

    def reload(self, config: ReloadedConfig) -> None:
        """Takes what can change. Never raises."""
        ...


class ClosedAfter:
    """A service, and what is closed when it has stopped."""

    def __init__(self, service: Service, close: Callable[[], Awaitable[None]]) -> None:
        self._service = service
        self._close = close

    async def start(self) -> None:
        """Begins to serve."""
        await self._service.start()

    async def stop(self) -> None:
        """Ends the service, then closes. Idempotent."""
        await self._service.stop()
        await self._close()


class ServiceConfig(ProcessConfig, Protocol):
    """Configuration of a process that serves."""

    @property
    def log_level(self) -> LogLevel:
        """Lowest level that is logged."""
        ...

    @property
    def log_format(self) -> LogFormat:
        """How a log line looks."""
        ...


Config = TypeVar("Config", bound=ServiceConfig)


def run_service(
    process: str, config_type: type[Config], build: Callable[[Config], Service], arguments: Namespace
) -> int:
    """Serves until SIGINT or SIGTERM. The exit status: 0, or 2 when it could not begin."""
    try:
        config = load_config(config_type, process, arguments, os.environ)
    except ConfigError as error:
        sys.stderr.write(f"kvlease {process}: {error}\n")
        return 2
    configure_logging(config.log_level, config.log_format)

    def load_again() -> Config:
        return load_config(config_type, process, arguments, os.environ)

    _log.info(
        "configuration",
        extra={"service": process, "version": __version__, "settings": describe_config(config)},
    )
    try:
        import uvloop

        return uvloop.run(_serve(build, config, load_again))
    except ImportError:
        return asyncio.run(_serve(build, config, load_again))


async def _serve(build: Callable[[Config], Service], config: Config, load_again: Callable[[], Config]) -> int:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    try:
        service = build(config)
    except KvleaseError as error:
        return _cannot_start(error)
    if isinstance(service, Reloadable):
        loop.add_signal_handler(signal.SIGHUP, _reload, cast("Reloadable[Config]", service), load_again)
    try:
        await service.start()
    except KvleaseError as error:
        await service.stop()
        return _cannot_start(error)
    await stopping.wait()
    _log.info("stopping")
    await service.stop()
    return 0


def _reload(service: Reloadable[Config], load_again: Callable[[], Config]) -> None:
    try:
        config = load_again()
    except ConfigError as error:
        _log.error("the configuration stays as it is", extra={"reason": str(error)})
        return
    service.reload(config)


def _cannot_start(error: KvleaseError) -> int:
    """Says why in the log. The exit status."""
    _log.error("cannot start", extra={"reason": str(error)})
    return 2
