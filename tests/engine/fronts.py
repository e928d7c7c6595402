"""Relays before the sidecars of a stack, so that tests can silence, kill and restart one.

The sidecars of a stack live in the test's process, so no signal reaches one alone. What the others see of a
stopped or killed process is the same here: a silent front accepts connections and passes nothing on, as the
kernel does for a stopped process; a killed one breaks its clients' connections and refuses others, while the store
still lists the engine, as it does until the time to live has passed. `bury` then ends that, too.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvlease.core.records import EngineRole
from kvlease.dev.engine_process import HOST, free_ports
from kvlease.dev.stack import EngineSeat, Stack, StackPlan
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.connector_socket import SOCKET_NAME
from kvlease.sidecar.server import SidecarServer

PIECE_BYTES = 1 << 16
Place = Path | int
"""A unix socket's path, or a TCP port of this machine."""


class Front:
    """Relays every connection at `place` to `target`."""

    def __init__(self, place: Place, target: Place) -> None:
        self._place = place
        self._target = target
        self._flows = asyncio.Event()
        self._flows.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._upstreams: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listens."""
        self._flows.set()
        if isinstance(self._place, Path):
            self._place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._place.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, self._place)
        else:
            self._server = await asyncio.start_server(self._serve, HOST, self._place)

    def silence(self) -> None:
        """Passes nothing on from here, in either direction; connections stay and come."""
        self._flows.clear()

    def resume(self) -> None:
        """Passes on what has waited."""
        self._flows.set()

    def kill(self) -> None:
        """Breaks the clients' connections and refuses others; the server behind does not notice."""
        self._flows.clear()
        if self._server is not None:
            self._server.close()
        for writer in self._clients:
            writer.transport.abort()
        if isinstance(self._place, Path):
            self._place.unlink(missing_ok=True)

    async def close(self) -> None:
        """Ends everything."""
        self.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # the loop would log a connection that ends as cancelled
            await self._relay(reader, writer)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._clients.add(writer)
        upstream: asyncio.StreamWriter | None = None
        try:
            await self._flows.wait()
            from_upstream, upstream = await self._connect()
            self._upstreams.add(upstream)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, upstream))
                group.create_task(self._pump(from_upstream, writer))
        except* (OSError, EOFError):
            pass
        finally:
            self._tasks.discard(task)
            self._clients.discard(writer)
            writer.transport.abort()
            if upstream is not None:
                self._upstreams.discard(upstream)
                upstream.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, Path):
            return await asyncio.open_unix_connection(self._target)
        return await asyncio.open_connection(HOST, self._target)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until an end is gone; a killed front's server keeps its end, since nothing flows any more."""
        while True:
            with suppress(OSError):
                piece = await reader.read(PIECE_BYTES)
                await self._flows.wait()
                if piece:
                    writer.write(piece)
                    await writer.drain()
                    continue
            await self._flows.wait()
            raise EOFError


class FrontedStack(Stack):
    """A stack whose sidecars stand behind fronts, under addresses that a restart keeps."""

    def __init__(self, plan: StackPlan, progress: Callable[[str], None]) -> None:
        super().__init__(plan, progress)
        self._ports: dict[int, tuple[int, int]] = {}
        self._fronts: dict[int, tuple[Front, Front]] = {}

    def sidecar_config(self, seat: EngineSeat) -> SidecarConfig:
        """Settings that advertise the front."""
        front, behind = self._ports.setdefault(seat.number, _two_ports())
        return replace(
            super().sidecar_config(seat),
            listen=f"{HOST}:{behind}",
            advertise=f"{HOST}:{front}",
            socket_dir=str(_hidden(seat)),
        )

    async def start_sidecar(self, seat: EngineSeat) -> SidecarServer:
        """Starts the sidecar of a seat, then its fronts."""
        sidecar = await super().start_sidecar(seat)
        front, behind = self._ports[seat.number]
        fronts = (
            Front(seat.socket_dir / SOCKET_NAME, _hidden(seat) / SOCKET_NAME),
            Front(front, behind),
        )
        self._fronts[seat.number] = fronts
        for one in fronts:
            await one.start()
        return sidecar

    async def stop(self) -> None:
        """Stops the fronts, then everything."""
        for fronts in self._fronts.values():
            for front in fronts:
                await front.close()
        await super().stop()

    def silence(self, role: EngineRole) -> None:
        """The sidecar of a role is there, and says nothing more."""
        for front in self._fronts[self.seat(role).number]:
            front.silence()

    def resume(self, role: EngineRole) -> None:
        """The sidecar of a role goes on where it was silenced."""
        for front in self._fronts[self.seat(role).number]:
            front.resume()

    def kill(self, role: EngineRole) -> None:
        """The sidecar of a role is gone; the store has not noticed yet."""
        for front in self._fronts[self.seat(role).number]:
            front.kill()

    async def bury(self, role: EngineRole) -> None:
        """The store notices: what the sidecar registered is gone."""
        seat = self.seat(role)
        for front in self._fronts[seat.number]:
            await front.close()
        await self.sidecars[seat.number].stop()

    async def restart(self, role: EngineRole) -> None:
        """Another sidecar, which knows nothing, takes the place of one that was buried."""
        seat = self.seat(role)
        self.sidecars[seat.number] = await self.start_sidecar(seat)

    def seat(self, role: EngineRole) -> EngineSeat:
        """The first seat of a role."""
        return next(seat for seat in self.seats if seat.role is role)


def _hidden(seat: EngineSeat) -> Path:
    return seat.socket_dir.with_name(seat.socket_dir.name + "s")


def _two_ports() -> tuple[int, int]:
    front, behind = free_ports(2)
    return front, behind
