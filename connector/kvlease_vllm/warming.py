"""Handshakes that a worker does before a turn needs them.

The first READ from an engine waits for a NIXL handshake, which takes seconds on a busy machine. The sidecar
tells every worker of the peers that join. An idle engine is not stepped, so this cannot come by way of its
scheduler: each worker holds a stream of its own. Nothing here makes a step wait.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, cast

from kvlease.core.attachment import HandshakeOutcome, HandshakeReport, Peer
from kvlease.core.errors import InvalidArgument
from kvlease.v1 import connector_pb2
from kvlease.wire.warming import peer_from_wire, report_to_wire
from kvlease_vllm.stream import Cancellable, StreamThread, Stub

logger = logging.getLogger("vllm.kvlease.warming")

Requests = queue.Queue[connector_pb2.WarmRequest | None]
"""What the worker says; None ends the stream."""

Begin = Callable[[Peer], "Future[Any] | None"]
"""Begins a handshake in the background; None when there is nothing to do."""


class Warming:
    """Shakes hands with the peers that the sidecar names, one after the other.

    Args:
        engine_id, rank: the engine that the worker belongs to, and which of its workers it is.
    """

    def __init__(self, socket_dir: str, engine_id: str, rank: int, begin: Begin) -> None:
        self._hello = connector_pb2.WorkerHello(engine_id=engine_id, rank=rank)
        self._begin = begin
        self._thread = StreamThread("kvlease-warming", socket_dir, self._hold)

    def start(self) -> None:
        """Starts the thread; call in the process that serves, never before a fork."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the stream and the thread, within a second. Idempotent."""
        self._thread.stop()

    def _hold(self, stub: Stub) -> None:
        requests: Requests = queue.Queue()
        requests.put(connector_pb2.WarmRequest(hello=self._hello))
        try:
            stream: Any = stub.Warm(_said(requests))
            self._thread.opened(cast(Cancellable, stream))
            for message in stream:
                try:
                    requests.put(report_to_wire(self._meet(*peer_from_wire(message))))
                except InvalidArgument as error:
                    logger.warning("wrong message of the sidecar: %s", error)
        finally:
            requests.put(None)

    def _meet(self, peer: Peer, within_s: float) -> HandshakeReport:
        begun_s = time.monotonic()
        outcome = self._outcome(peer, within_s)
        took_s = time.monotonic() - begun_s
        logger.info("handshake with engine %s: %s, %.3f s", peer.holder.engine_id, outcome.value, took_s)
        return HandshakeReport(peer.holder, outcome, took_s)

    def _outcome(self, peer: Peer, within_s: float) -> HandshakeOutcome:
        try:
            handshake = self._begin(peer)
            if handshake is None:
                return HandshakeOutcome.KNOWN
            handshake.result(within_s)
            return HandshakeOutcome.DONE
        except TimeoutError:
            return HandshakeOutcome.LATE
        except Exception as error:
            # Whatever it was, vLLM has logged it with its stack, and the next READ tries again.
            logger.warning("no handshake with engine %s yet: %s", peer.holder.engine_id, error)
            return HandshakeOutcome.FAILED


def _said(requests: Requests) -> Iterator[connector_pb2.WarmRequest]:
    while (request := requests.get()) is not None:
        yield request
