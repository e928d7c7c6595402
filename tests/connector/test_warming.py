"""A worker's stream to a real gRPC server on a unix socket: what it makes of the peers that it is told of."""

import queue
import tempfile
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvlease.core.attachment import HandshakeOutcome, HandshakeReport, Peer
from kvlease.core.ids import Holder
from kvlease.core.records import KvLocation
from kvlease.v1 import connector_pb2, connector_pb2_grpc
from kvlease.wire.warming import peer_to_wire, report_from_wire
from kvlease_vllm.stream import SOCKET_NAME
from kvlease_vllm.warming import Begin, Warming

WAIT_S = 20.0
PEER = Peer(Holder("peer", "boot", 1), KvLocation("host", 7, 2))


class Sidecar(connector_pb2_grpc.ConnectorServiceServicer):
    """Serves `Warm`: what workers said waits in `heard`, what is put into `say` is sent."""

    def __init__(self, socket_dir: Path) -> None:
        self.heard: queue.Queue[connector_pb2.WarmRequest] = queue.Queue()
        self.say: queue.Queue[connector_pb2.WarmResponse | None] = queue.Queue()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        connector_pb2_grpc.add_ConnectorServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{socket_dir / SOCKET_NAME}")
        self._server.start()

    def Warm(
        self, request_iterator: Iterator[connector_pb2.WarmRequest], context: grpc.ServicerContext
    ) -> Iterator[connector_pb2.WarmResponse]:
        self.heard.put(next(request_iterator))
        while (message := self.say.get()) is not None:
            yield message
            self.heard.put(next(request_iterator))

    def hear(self) -> connector_pb2.WarmRequest:
        """What the worker says next."""
        return self.heard.get(timeout=WAIT_S)

    def report(self, peer: Peer = PEER, within_s: float = WAIT_S) -> HandshakeReport:
        """What the worker makes of a peer."""
        self.say.put(peer_to_wire(peer, within_s))
        return report_from_wire(self.hear().report)

    def stop(self) -> None:
        """Ends the stream and the server."""
        self.say.put(None)
        self._server.stop(0.0).wait(WAIT_S)


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture
def sidecar(socket_dir: Path) -> Iterator[Sidecar]:
    sidecar = Sidecar(socket_dir)
    yield sidecar
    sidecar.stop()


@pytest.fixture
def start(socket_dir: Path) -> Iterator[Callable[[Begin], Warming]]:
    """Starts a worker's stream; its end comes before the sidecar's."""
    started: list[Warming] = []

    def start(begin: Begin) -> Warming:
        warming = Warming(str(socket_dir), "engine", 3, begin)
        warming.start()
        started.append(warming)
        return warming

    yield start
    for warming in started:
        warming.stop()


def ended(result: Any = None, error: Exception | None = None) -> "futures.Future[Any]":
    future: futures.Future[Any] = futures.Future()
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
    return future


def test_a_worker_says_which_it_is_and_reports_what_came_of_each_handshake(
    sidecar: Sidecar, start: Callable[[Begin], Warming]
) -> None:
    asked: list[Peer] = []
    outcomes = iter([ended(), None, ended(error=RuntimeError("nobody answers")), futures.Future[Any]()])

    def begin(peer: Peer) -> "futures.Future[Any] | None":
        asked.append(peer)
        return next(outcomes)

    start(begin)
    hello = sidecar.hear().hello
    assert (hello.engine_id, hello.rank) == ("engine", 3)
    reports = [sidecar.report(), sidecar.report(), sidecar.report(), sidecar.report(within_s=0.01)]
    assert [report.outcome for report in reports] == [
        HandshakeOutcome.DONE,
        HandshakeOutcome.KNOWN,
        HandshakeOutcome.FAILED,
        HandshakeOutcome.LATE,
    ]
    assert asked == [PEER] * 4
    assert {report.peer for report in reports} == {PEER.holder}


def test_an_error_before_the_handshake_begins_is_a_failure_and_the_stream_stands(
    sidecar: Sidecar, start: Callable[[Begin], Warming]
) -> None:
    def begin(_: Peer) -> "futures.Future[Any] | None":
        raise KeyError("vLLM")

    start(begin)
    sidecar.hear()
    assert [sidecar.report().outcome for _ in range(2)] == [HandshakeOutcome.FAILED] * 2


def test_a_worker_comes_back_when_its_sidecar_does(
    socket_dir: Path, start: Callable[[Begin], Warming]
) -> None:
    start(lambda _: None)
    for _ in range(2):
        sidecar = Sidecar(socket_dir)
        try:
            assert sidecar.hear().hello.engine_id == "engine"
            assert sidecar.report().outcome is HandshakeOutcome.KNOWN
        finally:
            sidecar.stop()


def test_stopping_ends_the_thread_with_and_without_a_sidecar(
    socket_dir: Path, start: Callable[[Begin], Warming]
) -> None:
    alone = start(lambda _: None)
    alone.stop()
    sidecar = Sidecar(socket_dir)
    try:
        attached = start(lambda _: None)
        sidecar.hear()
        attached.stop()
    finally:
        sidecar.stop()
    Warming(str(socket_dir), "engine", 0, lambda _: None).stop()
    for warming in (alone, attached):
        assert not warming._thread._thread.is_alive()
