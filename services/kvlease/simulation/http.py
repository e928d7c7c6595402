"""HTTP from routers to simulated engines, over the simulated network."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager

import orjson

from kvlease.core.errors import HolderUnreachable
from kvlease.router.ports import EngineReply, LegError
from kvlease.sim.engine import PromptTooLong, SimEngine
from kvlease.sim.model import Sample
from kvlease.sim.openai import ReplyWriter, error_body, read_ask
from kvlease.simulation.network import Connection, SimNetwork, current
from kvlease.simulation.transports import Programs


class SimEngines:
    """HTTP to simulated engines; the host of a URL is the engine's process."""

    def __init__(self, network: SimNetwork, programs: Programs) -> None:
        self._network = network
        self._programs = programs

    @asynccontextmanager
    async def call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> AsyncGenerator[EngineReply, None]:
        """Sends a completion; leaving early aborts it at the engine."""
        name, here = url.removeprefix("http://").split("/")[0], current()
        try:
            connection = await self._network.connect(name)
        except HolderUnreachable as error:
            raise LegError("no connection", sent=False) from error
        exchange = _Exchange(self._network, connection, timeout_s)
        there, request = connection.other(here), orjson.loads(body or b"{}")
        connection.send(here, lambda: exchange.begin(self._programs.engine(there), request))
        try:
            await exchange.started()
            yield exchange
        finally:
            connection.close(here)


class _Exchange:
    """One request and its answer: an `EngineReply`."""

    def __init__(self, network: SimNetwork, connection: Connection, timeout_s: float) -> None:
        self._network = network
        self._connection = connection
        self._here = current()
        self._there = connection.other(self._here)
        self._chunks: asyncio.Queue[bytes | LegError | None] = asyncio.Queue(100_000)
        self._head = asyncio.Event()
        self._timeout_s = timeout_s
        self._failed: LegError | None = None
        self.status = 200
        self.headers: Mapping[str, str] = {}
        connection.on_close(self._here, self._fail)

    # --- runs at the engine -------------------------------------------------------------------------------

    def begin(self, engine: SimEngine, body: Mapping[str, object]) -> None:
        """Answers a request until the connection ends."""
        work = self._network.spawn(self._there, self._serve(engine, body))
        self._connection.on_close(self._there, work.cancel)

    async def _serve(self, engine: SimEngine, body: Mapping[str, object]) -> None:
        try:
            await self._complete(engine, body)
        except PromptTooLong as error:
            self._send("application/json", orjson.dumps(error_body(400, str(error))), status=400)
        self._connection.send(self._there, lambda: self._chunks.put_nowait(None))

    async def _complete(self, engine: SimEngine, body: Mapping[str, object]) -> None:
        ask = read_ask(body, chat=True, default_model=engine.settings.model)
        writer, generation = ReplyWriter(ask), engine.generate(ask.request)
        samples: list[Sample] = []
        async with aclosing(generation.tokens()) as tokens:
            async for sample in tokens:
                samples.append(sample)
                if ask.stream:
                    first = len(samples) == 1
                    chunk = writer.chunk(0, sample, generation.finish_reason, first=first)
                    self._send("text/event-stream", chunk)
        if ask.stream:
            self._send("text/event-stream", writer.last_chunk(len(samples), generation.report()))
        else:
            answer = writer.whole([(samples, generation.finish_reason)], generation.report())
            self._send("application/json", orjson.dumps(answer))

    def _send(self, kind: str, data: bytes, status: int = 200) -> None:
        def deliver() -> None:
            self.status, self.headers = status, {"Content-Type": kind}
            self._head.set()
            self._chunks.put_nowait(data)

        self._connection.send(self._there, deliver)

    # --- runs at the router -------------------------------------------------------------------------------

    async def started(self) -> None:
        """Waits for the head of the answer."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._head.wait()
        except TimeoutError as error:
            raise LegError("no answer", sent=True) from error
        if self._failed is not None and not self.headers:
            raise self._failed

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        while (chunk := await self._chunks.get()) is not None:
            if isinstance(chunk, LegError):
                raise chunk
            yield chunk

    def _fail(self) -> None:
        self._failed = LegError("the connection broke", sent=True)
        self._chunks.put_nowait(self._failed)
        self._head.set()
