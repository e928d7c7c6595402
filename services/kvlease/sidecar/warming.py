"""Tells the workers of engines with whom to shake hands, before a turn needs it.

The first READ between two engines waits for a NIXL handshake: seconds on a busy machine. So each worker is told
of the peers from which its engine may have to READ as soon as they are registered, one after the other: a
handshake that a READ waits for has at most one other before it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from kvlease.core.attachment import HandshakeOutcome, HandshakeReport, Peer
from kvlease.core.errors import InvalidArgument, StoreUnavailable
from kvlease.core.ids import Holder
from kvlease.core.records import Engine
from kvlease.store.port import Batch, Store
from kvlease.v1 import connector_pb2
from kvlease.wire.values import text_from_wire
from kvlease.wire.warming import peer_to_wire, report_from_wire

RETRY_S = 0.5
"""Pause before a watch that broke is begun again."""

REPORT_GRACE_S = 5.0
"""A report is awaited this much longer than its worker was given."""

REPORTS_MAX = 16
"""Reports that wait to be read; a worker sends one per peer that it was told of."""

_log = logging.getLogger(__name__)

Requests = AsyncIterator[connector_pb2.WarmRequest]
Context = grpc.aio.ServicerContext[connector_pb2.WarmRequest, connector_pb2.WarmResponse]
Observe = Callable[[HandshakeReport], None]


class UnmetPeers:
    """The peers that one engine's worker was not told of yet; pure."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._engines: dict[str, Engine] = {}
        self._told: set[Holder] = set()

    def apply(self, batch: Batch[Engine]) -> None:
        """Takes what the watch of engines tells. A peer that goes and comes back is told of again."""
        if batch.snapshot:
            self._engines.clear()
        for change in batch.changes:
            if change.gone:
                self._engines.pop(change.item.holder.engine_id, None)
            else:
                self._engines[change.item.holder.engine_id] = change.item
        self._told &= {_process_of(engine) for engine in self._engines.values()}

    def take(self) -> Peer | None:
        """The next peer to tell of; None when there is none, or the engine itself is not registered."""
        reader = self._engines.get(self._engine_id)
        if reader is None:
            return None
        for engine in self._engines.values():
            if engine.location is not None and may_read(reader, engine):
                process = _process_of(engine)
                if process not in self._told:
                    self._told.add(process)
                    return Peer(engine.holder, engine.location)
        return None


def may_read(reader: Engine, holder: Engine) -> bool:
    """Whether a turn may make one engine READ from the other: KV moves between roles only, layouts are equal."""
    return (
        reader.role is not holder.role
        and reader.retain
        and holder.retain
        and reader.layout.layout_hash == holder.layout.layout_hash
    )


def _process_of(engine: Engine) -> Holder:
    return replace(engine.holder, epoch=0)


class _StreamEnded(Exception):
    """The stream to a worker is over."""


class Warming:
    """Serves `ConnectorService.Warm`.

    Args:
        handshake_s: given to a worker for one handshake.
        hello_s: a worker must have said who it is within this.
        observe: hears of every report.
    """

    def __init__(self, store: Store, handshake_s: float, hello_s: float, observe: Observe) -> None:
        self._store = store
        self._handshake_s = handshake_s
        self._hello_s = hello_s
        self._observe = observe
        self._closed = asyncio.Event()

    async def serve(self, requests: Requests, context: Context) -> None:
        """One worker, until it leaves or `close` is called.

        Raises:
            InvalidArgument: it did not say who it is.
        """
        hello = await self._hello(requests)
        engine_id = text_from_wire(hello.engine_id, "engine_id")
        worker = _Worker(self._observe, self._handshake_s, {"engine_id": engine_id, "rank": hello.rank})
        peers = UnmetPeers(engine_id)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._until_closed())
                group.create_task(worker.read(requests))
                group.create_task(worker.tell(peers, context))
                group.create_task(self._follow(peers, worker.wake))
        except* _StreamEnded:
            pass

    def close(self) -> None:
        """Ends every stream, and those that begin later."""
        self._closed.set()

    async def _hello(self, requests: Requests) -> connector_pb2.WorkerHello:
        try:
            async with asyncio.timeout(self._hello_s):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration) as error:
            raise InvalidArgument("the worker did not say who it is") from error
        if first.WhichOneof("message") != "hello":
            raise InvalidArgument("the first message of a worker is its hello")
        return first.hello

    async def _until_closed(self) -> None:
        await self._closed.wait()
        raise _StreamEnded

    async def _follow(self, peers: UnmetPeers, wake: Callable[[], None]) -> None:
        while True:
            try:
                async with self._store.watch_engines() as batches:
                    async for batch in batches:
                        peers.apply(batch)
                        wake()
            except StoreUnavailable as error:
                _log.warning("the watch of engines broke", extra={"reason": str(error)})
            await asyncio.sleep(RETRY_S)


class _Worker:
    """One worker's stream: it is told of a peer, and of the next when it has reported."""

    def __init__(self, observe: Observe, handshake_s: float, labels: dict[str, Any]) -> None:
        self._observe = observe
        self._handshake_s = handshake_s
        self._labels = labels
        self._changed = asyncio.Event()
        self._reports: asyncio.Queue[HandshakeReport] = asyncio.Queue(REPORTS_MAX)

    def wake(self) -> None:
        """There may be a peer to tell of."""
        self._changed.set()

    async def read(self, requests: Requests) -> None:
        """Takes reports until the worker leaves."""
        async for request in requests:
            try:
                if request.WhichOneof("message") == "report" and not self._reports.full():
                    self._reports.put_nowait(report_from_wire(request.report))
            except InvalidArgument as error:
                _log.warning("a report was skipped", extra={"reason": str(error), **self._labels})
        raise _StreamEnded

    async def tell(self, peers: UnmetPeers, context: Context) -> None:
        """Tells of peers as they come, one at a time."""
        while True:
            self._changed.clear()
            while (peer := peers.take()) is not None:
                await context.write(peer_to_wire(peer, self._handshake_s))
                report = await self._report_on(peer.holder)
                self._observe(report)
                say = _log.warning if report.outcome in _UNDONE else _log.info
                labels = {"peer": report.peer.engine_id, "outcome": report.outcome.value, **self._labels}
                say("a worker was told of a peer", extra={**labels, "took_s": round(report.took_s, 3)})
            await self._changed.wait()

    async def _report_on(self, peer: Holder) -> HandshakeReport:
        bound_s = self._handshake_s + REPORT_GRACE_S
        try:
            async with asyncio.timeout(bound_s):
                while (report := await self._reports.get()).peer != peer:
                    continue
                return report
        except TimeoutError:
            return HandshakeReport(peer, HandshakeOutcome.LATE, bound_s)


_UNDONE = frozenset({HandshakeOutcome.FAILED, HandshakeOutcome.LATE})
