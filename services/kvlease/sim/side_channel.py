"""One-sided READs between simulated engines, over TCP: what a block holds when it is read is what arrives."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from kvlease.core.ids import Holder
from kvlease.core.records import KvLocation
from kvlease.sim.engine import SimEngine
from kvlease.sim.ports import Landed, ReadFailed

QUESTION_BYTES_MAX = 1 << 22


class SideChannel:
    """READs from other engines' side channels.

    Args:
        block_s: seconds that one block takes.
        connect_s: bound of the connection.
    """

    def __init__(self, block_s: float, connect_s: float = 5.0) -> None:
        self._block_s = block_s
        self._connect_s = connect_s

    async def read(
        self, location: KvLocation, holder: Holder, block_ids: Sequence[int], landed: Landed
    ) -> None:
        """READs blocks one by one."""
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await asyncio.open_connection(
                    location.side_channel_host, location.side_channel_port
                )
        except (TimeoutError, OSError) as error:
            raise ReadFailed("the holder does not answer") from error
        try:
            for place, block_id in enumerate(block_ids):
                question = {"boot_id": holder.boot_id, "block_id": block_id}
                writer.write(json.dumps(question).encode() + b"\n")
                await asyncio.sleep(self._block_s)
                line = await reader.readline()
                if not line.endswith(b"\n") or line.startswith(b"!"):
                    raise ReadFailed("the holder broke off")
                landed(place, bytes.fromhex(line.decode().strip()))
        except OSError as error:
            raise ReadFailed("the connection broke") from error
        finally:
            writer.close()


@asynccontextmanager
async def serve_side_channel(engine: SimEngine, host: str, port: int) -> AsyncGenerator[int, None]:
    """Lets other engines READ this one's blocks. Yields the port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                question = json.loads(line)
                if question["boot_id"] != engine.holder.holder.boot_id:
                    writer.write(b"!\n")
                    break
                writer.write(engine.pool.read(question["block_id"]).hex().encode() + b"\n")
                await writer.drain()
        except (OSError, ValueError, KeyError, IndexError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, host, port, limit=QUESTION_BYTES_MAX)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
