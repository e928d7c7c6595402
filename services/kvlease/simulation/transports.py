"""The ports of the production code over the simulated network."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from random import Random
from typing import Protocol, TypeVar

from kvlease.core.errors import HolderUnreachable
from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine, KvLocation, LeaseRecord, PinOutcome
from kvlease.core.renewal import Beat, RenewalPolicy
from kvlease.registry.registry import Registry
from kvlease.registry.renewals import EngineDelta, Heartbeat
from kvlease.router.ports import BeatAck, EngineReply, LegError, RenewalStream
from kvlease.sidecar.sidecar import Sidecar
from kvlease.sim.engine import PromptTooLong, SimEngine
from kvlease.sim.model import Sample
from kvlease.sim.openai import ReplyWriter, error_body, read_ask
from kvlease.sim.ports import Landed, ReadFailed
from kvlease.simulation.network import Pipe, SimNetwork
from kvlease.store.port import Batch

Answer = TypeVar("Answer")

REGISTRY_CALL_S = 0.5
CONNECT_S = 0.3


class Nodes(Protocol):
    """Who runs where; None for a node that is down."""

    def sidecar(self, name: str) -> Sidecar | None:
        """The sidecar process of a node."""
        ...

    def engine(self, name: str) -> SimEngine | None:
        """The engine process of a node."""
        ...

    def registry(self) -> Registry | None:
        """The registry process."""
        ...

    async def gone(self, name: str) -> None:
        """Returns when the process that now runs on a node has died."""
        ...


class SeededRandom:
    """A `RandomPort` of one seed."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def lease_id(self) -> int:
        """64 random bits, never zero."""
        return self._random.getrandbits(64) or 1

    def text_id(self) -> str:
        """32 random hex digits."""
        return f"{self._random.getrandbits(128):032x}"


class SimSidecars:
    """Sidecars by address, which is their node's name, as the node `source` reaches them."""

    def __init__(self, network: SimNetwork, nodes: Nodes, source: str) -> None:
        self._network = network
        self._nodes = nodes
        self._source = source

    async def pin(self, address: str, ask: PinAsk, wait_for_offer_s: float, deadline_s: float) -> PinOutcome:
        """Asks for a pin."""

        async def serve() -> PinOutcome:
            return await self._sidecar(address).pin(ask, wait_for_offer_s)

        return await self._network.call(self._source, address, serve, deadline_s + wait_for_offer_s)

    async def unpin(
        self, address: str, holder: Holder, lease_id: int, pin_id: str, deadline_s: float
    ) -> None:
        """Ends a pin."""

        async def serve() -> None:
            await self._sidecar(address).unpin(holder, lease_id, pin_id)

        await self._network.call(self._source, address, serve, deadline_s)

    async def renew(
        self,
        address: str,
        engine_id: str,
        lease_ids: Sequence[int],
        duration_s: float,
        pin_ids: Sequence[str],
        reservation_s: float,
        deadline_s: float,
    ) -> dict[int, MissReason]:
        """Renews leases and reservations."""

        async def serve() -> dict[int, MissReason]:
            sidecar = self._sidecar(address)
            return await sidecar.renew(engine_id, lease_ids, duration_s, pin_ids, reservation_s)

        return await self._network.call(self._source, address, serve, deadline_s)

    async def release(
        self, address: str, engine_id: str, lease_id: int, tenant: str, deadline_s: float, *, superseded: bool
    ) -> MissReason | None:
        """Ends a lease."""

        async def serve() -> MissReason | None:
            return await self._sidecar(address).release(engine_id, lease_id, tenant, superseded=superseded)

        return await self._network.call(self._source, address, serve, deadline_s)

    def _sidecar(self, address: str) -> Sidecar:
        sidecar = self._nodes.sidecar(address)
        if sidecar is None:
            raise HolderUnreachable(f"{address} is down")
        return sidecar


class SimPins:
    """An engine's way to other holders, through its own sidecar; what runs there is the production sidecar."""

    def __init__(self, network: SimNetwork, nodes: Nodes, names: tuple[str, str], wait_s: float) -> None:
        self._network = network
        self._nodes = nodes
        self._engine, self._sidecar = names
        self._wait_s = wait_s

    async def pin(self, ask: PinAsk, sidecar_address: str) -> PinOutcome:
        """Asks for a pin on another engine."""

        async def serve() -> PinOutcome:
            sidecar = self._nodes.sidecar(self._sidecar)
            return await sidecar.remote_pin(ask, 0.0, sidecar_address) if sidecar else MissReason.UNREACHABLE

        try:
            return await self._network.call(self._engine, self._sidecar, serve, self._wait_s)
        except HolderUnreachable:
            return MissReason.UNREACHABLE

    def unpin(self, holder: Holder, lease_id: int, pin_id: str, sidecar_address: str) -> None:
        """Ends a pin on another engine."""

        async def tell() -> None:
            sidecar = self._nodes.sidecar(self._sidecar)
            if await self._network.carry(self._engine, self._sidecar) and sidecar is not None:
                await sidecar.remote_unpin(holder, lease_id, pin_id, sidecar_address)

        self._network.spawn(tell())


class SimTransfers:
    """READs that take time, stall while the holder's node is paused, and land whatever the reader does."""

    def __init__(
        self, network: SimNetwork, nodes: Nodes, reader: str, random: Random, read_s: tuple[float, float]
    ) -> None:
        self._network = network
        self._nodes = nodes
        self._reader = reader
        self._random = random
        self._read_s = read_s

    async def read(
        self, location: KvLocation, holder: Holder, block_ids: Sequence[int], landed: Landed
    ) -> None:
        """READs blocks in the order in which the network brings them."""
        node = location.side_channel_host
        usual_s, slow_s = self._read_s
        total_s = slow_s if self._random.random() < 0.1 else self._random.uniform(0.1, 1.0) * usual_s
        places = list(range(len(block_ids)))
        self._random.shuffle(places)
        for place in places:
            await asyncio.sleep(total_s / len(places))
            await self._network.awake(node)
            engine = self._nodes.engine(node)
            if engine is None or engine.holder.holder.boot_id != holder.boot_id:
                raise ReadFailed("the holder is gone")
            landed(place, engine.pool.read(block_ids[place]))
        await self._network.awake(self._reader)


class SimRegistryPort:
    """The registry as a router reaches it."""

    def __init__(
        self, network: SimNetwork, nodes: Nodes, router: str, session: str, policy: RenewalPolicy
    ) -> None:
        self._network = network
        self._nodes = nodes
        self._router = router
        self._session = session
        self._policy = policy

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """Takes a pin at the holder."""

        async def serve() -> PinOutcome:
            return await self._registry().pin(ask, wait_for_offer_s)

        try:
            return await self._call(serve, REGISTRY_CALL_S + wait_for_offer_s)
        except HolderUnreachable:
            return MissReason.UNREACHABLE

    async def unpin(self, holder: Holder, lease_id: int, pin_id: str) -> None:
        """Ends a pin."""

        async def serve() -> None:
            await self._registry().unpin(holder, lease_id, pin_id)

        await self._call(serve, REGISTRY_CALL_S)

    async def release(self, lease_id: int, engine_id: str, tenant: str) -> MissReason | None:
        """Releases a lease."""

        async def serve() -> MissReason | None:
            return await self._registry().release(lease_id, engine_id, tenant)

        try:
            return await self._call(serve, REGISTRY_CALL_S)
        except HolderUnreachable:
            return MissReason.UNREACHABLE

    def watch_engines(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[Engine]]]:
        """First a snapshot, then every change."""
        return self._registry().watch_engines()

    def watch_leases(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[LeaseRecord]]]:
        """First a snapshot, then every change."""
        return self._registry().watch_leases()

    @asynccontextmanager
    async def renew(self) -> AsyncGenerator[RenewalStream, None]:
        """Opens a stream of heartbeats."""
        stream = _SimRenewals(self._network, self._registry(), self._router, self._session, self._policy)
        try:
            yield stream
        finally:
            stream.close()

    def _registry(self) -> Registry:
        registry = self._nodes.registry()
        if registry is None:
            raise HolderUnreachable("the registry is down")
        return registry

    async def _call(self, serve: Callable[[], Awaitable[Answer]], deadline_s: float) -> Answer:
        return await self._network.call(self._router, "registry", serve, deadline_s)


class _SimRenewals:
    """One stream of heartbeats."""

    def __init__(
        self, network: SimNetwork, registry: Registry, router: str, session: str, policy: RenewalPolicy
    ) -> None:
        self._network = network
        self._registry = registry
        self._session = session
        self._policy = policy
        self._state = registry.open_session()
        self._acks: asyncio.Queue[BeatAck | None] = asyncio.Queue(10_000)
        self._up = Pipe(network, router, "registry", self.close)
        self._down = Pipe(network, "registry", router, self.close)
        self._broken = False

    async def send(self, beat: Beat) -> None:
        """Sends one beat."""
        if self._broken:
            raise HolderUnreachable("the stream is broken")
        engines = tuple(
            EngineDelta(
                engine_id,
                delta.added_lease_ids,
                delta.dropped_lease_ids,
                delta.added_pin_ids,
                delta.dropped_pin_ids,
            )
            for engine_id, delta in beat.engines.items()
        )
        policy = self._policy
        heartbeat = Heartbeat(
            self._session,
            beat.epoch,
            beat.sequence,
            beat.full,
            engines,
            policy.duration_s,
            policy.reservation_s,
        )
        self._up.send(lambda: self._take(heartbeat))

    async def acks(self) -> AsyncIterator[BeatAck]:
        """The answers, until the stream ends."""
        while (ack := await self._acks.get()) is not None:
            yield ack
        raise HolderUnreachable("the stream broke")

    def close(self) -> None:
        """Breaks the stream."""
        if not self._broken:
            self._broken = True
            self._up.close()
            self._down.close()
            self._acks.put_nowait(None)

    def _take(self, heartbeat: Heartbeat) -> None:
        pending = self._registry.renew(self._state, heartbeat)

        async def answer() -> None:
            ack = await pending.ack()
            self._down.send(lambda: self._acks.put_nowait(BeatAck(ack.sequence, ack.misses, ack.resync)))

        self._network.spawn(answer())


class SimEngines:
    """HTTP to simulated engines; the host of a URL is the engine's node."""

    def __init__(self, network: SimNetwork, nodes: Nodes, router: str) -> None:
        self._network = network
        self._nodes = nodes
        self._router = router

    @asynccontextmanager
    async def call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> AsyncGenerator[EngineReply, None]:
        """Sends a completion; leaving early aborts it at the engine."""
        node = url.removeprefix("http://").split("/")[0]
        try:
            async with asyncio.timeout(CONNECT_S):
                arrived = await self._network.carry(self._router, node, lossy=False)
        except TimeoutError:
            arrived = False
        engine = self._nodes.engine(node)
        if not arrived or engine is None:
            raise LegError("no connection", sent=False)
        exchange = _Exchange(self._network, (node, self._router), timeout_s)
        work = self._network.spawn(exchange.serve(engine, json.loads(body or b"{}")))
        guard = self._network.spawn(exchange.watch(self._nodes.gone(node), work))
        try:
            await exchange.started()
            yield exchange
        finally:
            guard.cancel()
            work.cancel()
            exchange.close()


class _Exchange:
    """One request and its answer: an `EngineReply`."""

    def __init__(self, network: SimNetwork, names: tuple[str, str], timeout_s: float) -> None:
        node, router = names
        self._chunks: asyncio.Queue[bytes | LegError | None] = asyncio.Queue(100_000)
        self._head = asyncio.Event()
        self._pipe = Pipe(network, node, router, lambda: self._fail("the connection broke"))
        self._timeout_s = timeout_s
        self._failed: LegError | None = None
        self.status = 200
        self.headers: Mapping[str, str] = {}

    async def serve(self, engine: SimEngine, body: Mapping[str, object]) -> None:
        """Runs at the engine."""
        try:
            await self._complete(engine, body)
        except PromptTooLong as error:
            self.status = 400
            self._send("application/json", json.dumps(error_body(400, str(error))).encode())
        self._pipe.send(lambda: self._chunks.put_nowait(None))

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
            self._send("application/json", json.dumps(answer).encode())

    async def watch(self, gone: Awaitable[None], work: "asyncio.Task[None]") -> None:
        """Breaks the exchange when the engine dies."""
        await gone
        work.cancel()
        self._fail("the engine died")

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

    def close(self) -> None:
        """Nobody listens any more."""
        self._pipe.close()

    def _send(self, kind: str, data: bytes) -> None:
        def deliver() -> None:
            self.headers = {"Content-Type": kind}
            self._head.set()
            self._chunks.put_nowait(data)

        self._pipe.send(deliver)

    def _fail(self, reason: str) -> None:
        self._failed = LegError(reason, sent=True)
        self._chunks.put_nowait(self._failed)
        self._head.set()
