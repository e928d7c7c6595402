"""Several routers of one machine at one address, each a process: a router uses one core.

Every worker is a whole router. The kernel spreads connections among them; a conversation that another worker has
led is found by its lease in the registry. Worker `i` adds `i` to the ports of `grpc_listen` and `admin_listen`.
"""

import asyncio
import logging
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing

from kvlease.core.errors import InvalidArgument
from kvlease.router.config import RouterConfig
from kvlease.runtime.child_process import tied_to_this_process
from kvlease.runtime.config import describe_flags
from kvlease.runtime.logging import configure_logging

RESTART_S = 1.0
EXIT_CANNOT_START = 2

log = logging.getLogger(__name__)


def run_workers(config: RouterConfig, arguments: Namespace) -> int:
    """Runs the workers until SIGINT or SIGTERM. The exit status: 2 when one of them cannot start."""
    configure_logging(config.log_level, config.log_format)
    try:
        with closing(_reserve(config.listen)) as reserved:
            host = config.listen.rpartition(":")[0]
            listen = f"{host}:{reserved.getsockname()[1]}"
            commands = [_command(config, arguments, listen, number) for number in range(config.workers)]
            log.info("router serves", extra={"address": listen, "workers": config.workers})
            return asyncio.run(Workers(commands).run())
    except InvalidArgument as error:
        log.error("cannot start", extra={"reason": str(error)})
        return EXIT_CANNOT_START


class Workers:
    """Keeps one process for each command line. One that ends by itself is started again after a moment."""

    def __init__(self, commands: Sequence[Sequence[str]]) -> None:
        self._commands = commands
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._status = 0

    async def run(self) -> int:
        """Until a signal, or until a worker says that it cannot start."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stopping.set)
        loop.add_signal_handler(signal.SIGHUP, self._signal_all, signal.SIGHUP)
        async with asyncio.TaskGroup() as group:
            for place, command in enumerate(self._commands):
                group.create_task(self._keep(place, command))
            await self._stopping.wait()
            self._signal_all(signal.SIGTERM)
        return self._status

    async def _keep(self, place: int, command: Sequence[str]) -> None:
        while not self._stopping.is_set():
            process = await asyncio.create_subprocess_exec(*tied_to_this_process(command))
            self._processes[place] = process
            if self._stopping.is_set():
                process.terminate()
            status = await process.wait()
            del self._processes[place]
            if status == EXIT_CANNOT_START:
                self._status = EXIT_CANNOT_START
                self._stopping.set()
            if self._stopping.is_set():
                return
            log.error("a worker ended", extra={"worker": place, "status": status})
            await self._pause()

    async def _pause(self) -> None:
        try:
            async with asyncio.timeout(RESTART_S):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            process.send_signal(number)


def _command(config: RouterConfig, arguments: Namespace, listen: str, number: int) -> list[str]:
    own = {
        "workers": "1",
        "share_listen": "true",
        "listen": listen,
        "grpc_listen": _moved(config.grpc_listen, number),
        "admin_listen": _moved(config.admin_listen, number),
    }
    return [sys.executable, "-m", "kvlease.cli", "router", *describe_flags(arguments, own)]


def _moved(address: str, number: int) -> str:
    """The address `number` ports on; port 0 stays: any free one."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number if int(port) else 0}"


def _reserve(address: str) -> socket.socket:
    """A socket that is bound and never listens: the port stays ours while no worker listens at it.

    Raises:
        InvalidArgument: the address cannot be bound.
    """
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    reserved = socket.socket(family)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind((host.strip("[]"), int(port)))
    except OSError as error:
        reserved.close()
        raise InvalidArgument(f"cannot listen on {address}: {error}") from error
    return reserved
