"""A way to a server on loopback that a test can cut or stall."""

import asyncio
from contextlib import suppress


class Proxy:
    """Forwards TCP to `target` (`host:port`); `address` is where it listens once it was started."""

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._open = asyncio.Event()
        self._open.set()
        self._refuses = False
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self.heal()
        self.cut()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def cut(self) -> None:
        """Breaks every connection and refuses others."""
        self._refuses = True
        for writer in self._writers:
            writer.close()

    def stall(self) -> None:
        """Takes everything and passes nothing on, as a network that drops packets."""
        self._open.clear()

    def heal(self) -> None:
        """Passes everything on again."""
        self._refuses = False
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.close()
            return
        with suppress(OSError):
            there, back = await asyncio.open_connection(self._host, self._port)
            self._writers |= {writer, back}
            try:
                await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
            finally:
                self._writers -= {writer, back}
                writer.close()
                back.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
