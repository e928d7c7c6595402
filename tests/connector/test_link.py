"""The connector's stream to a real gRPC server on a unix socket."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from tests.connector.fake_pool import FakePool

from kvlease.core.attachment import EngineFacts
from kvlease.core.digests import ChainRoot, chain
from kvlease.core.holding import Grant, HoldLimits, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, MissReason
from kvlease.core.records import KvLayout, KvLocation, Pinned
from kvlease.core.turn import ReadOrder
from kvlease.v1 import connector_pb2, connector_pb2_grpc
from kvlease.wire.engines import hello_from_wire
from kvlease.wire.leases import outcome_from_wire, outcome_to_wire, pin_to_wire
from kvlease.wire.values import duration_to_wire
from kvlease_vllm.holder import BlockHolder
from kvlease_vllm.link import SidecarLink
from kvlease_vllm.reader import Reads, Stage
from kvlease_vllm.service import SidecarService
from kvlease_vllm.stream import SOCKET_NAME

WAIT_S = 20.0
ME = Holder("engine", "boot", 1)
LAYOUT = KvLayout(4, "float32", 1, 1, 64, "layout")
FACTS = EngineFacts(ME, "model", LAYOUT, KvLocation("host", 1), total_blocks=20)
PEER_ORDER = ReadOrder(7, "pin", LeaseKind.CONVERSATION, Holder("peer", "boot"), "peer:1")


class Sidecar(connector_pb2_grpc.ConnectorServiceServicer):
    """Serves `ConnectorService`: what connectors said waits in `heard`, what is put into `say` is sent."""

    def __init__(self, socket_dir: Path) -> None:
        self.heard: queue.Queue[connector_pb2.AttachRequest] = queue.Queue()
        self.say: queue.Queue[connector_pb2.AttachResponse | None] = queue.Queue()
        self.hello = connector_pb2.SidecarHello(protocol_version=1)
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        connector_pb2_grpc.add_ConnectorServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{socket_dir / SOCKET_NAME}")
        self._server.start()

    def Attach(
        self, request_iterator: Iterator[connector_pb2.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[connector_pb2.AttachResponse]:
        say = self.say
        threading.Thread(target=self._listen, args=(request_iterator,), daemon=True).start()
        yield connector_pb2.AttachResponse(hello=self.hello)
        while (message := say.get()) is not None:
            yield message

    def _listen(self, requests: Iterator[connector_pb2.AttachRequest]) -> None:
        try:
            for message in requests:
                self.heard.put(message)
        except grpc.RpcError:
            return

    def hear(self, kind: str) -> connector_pb2.AttachRequest:
        """The next message of a kind; others are skipped."""
        while True:
            message = self.heard.get(timeout=WAIT_S)
            if message.WhichOneof("message") == kind:
                return message

    def end_stream(self) -> None:
        ended, self.say = self.say, queue.Queue()
        ended.put(None)

    def stop(self) -> None:
        self.say.put(None)
        self._server.stop(0.0).wait(WAIT_S)


class Engine:
    """A connector's holder, reads and service, without vLLM."""

    def __init__(self, socket_dir: Path, outbox_max: int = 100) -> None:
        self.pool = FakePool(20)
        self.service = SidecarService(str(socket_dir), outbox_max)
        self.holder = BlockHolder(ME, self.pool, HoldLimits(8), 10, self.service.send_events)
        self.reads = Reads(self.service.send_pin, self.service.send_unpin, 10.0, 60.0, 2.0, time.monotonic)
        self.service.start(FACTS, self.holder, self.reads, self.reads.counters.copy)

    def grant(self, lease_id: int, block: int) -> None:
        held = chain(ChainRoot("tenant", "model"), range(4), 4)
        grant = Grant(
            lease_id,
            LeaseKind.CONVERSATION,
            (block,),
            held.digests,
            4,
            4,
            tenant="tenant",
            conversation_key=b"k",
        )
        assert self.holder.grant(grant, 60.0)

    def offer(self, lease_id: int) -> bool:
        offer = self.holder.offer(lease_id, LAYOUT)
        assert offer is not None
        return self.service.send_offer(offer)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        threading.Event().wait(0.01)


@pytest.fixture
def socket_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def sidecar(socket_dir: Path) -> Iterator[Sidecar]:
    server = Sidecar(socket_dir)
    yield server
    server.stop()


@pytest.fixture
def engine(socket_dir: Path, sidecar: Sidecar) -> Iterator[Engine]:
    one = Engine(socket_dir)
    yield one
    one.service.stop()


def test_the_first_message_says_who_the_engine_is_and_all_that_it_holds(socket_dir: Path) -> None:
    engine = Engine(socket_dir)
    engine.grant(1, 3)
    engine.grant(2, 4)
    sidecar = Sidecar(socket_dir)
    facts, holds = hello_from_wire(sidecar.hear("hello").hello)
    assert (facts.holder, facts.layout, facts.location) == (ME, LAYOUT, FACTS.location)
    assert [(hold.record.lease_id, hold.provisional) for hold in holds] == [(1, True), (2, True)]
    engine.service.stop()
    sidecar.stop()


def test_a_restarted_sidecar_hears_of_holds_and_pins_again(socket_dir: Path) -> None:
    first = Sidecar(socket_dir)
    engine = Engine(socket_dir)
    first.hear("hello")
    engine.grant(1, 3)
    engine.holder.pin(PinAsk(1, "pin", ME, "tenant", 30.0))
    first.stop()
    second = Sidecar(socket_dir)
    _, holds = hello_from_wire(second.hear("hello").hello)
    assert [(hold.record.lease_id, hold.pin_ids, hold.provisional) for hold in holds] == [
        (1, ("pin",), False)
    ]
    engine.service.stop()
    second.stop()


def test_an_offer_without_a_sidecar_is_no_loss(socket_dir: Path) -> None:
    engine = Engine(socket_dir)
    engine.grant(1, 3)
    assert engine.offer(1)
    engine.service.stop()


def test_a_hold_is_offered_and_its_end_told(engine: Engine, sidecar: Sidecar) -> None:
    sidecar.hear("hello")
    engine.grant(1, 3)
    assert engine.offer(1)
    assert sidecar.hear("offer").offer.lease.lease_id == 1
    sidecar.say.put(connector_pb2.AttachResponse(release=connector_pb2.ReleaseCommand(call_id=5, lease_id=1)))
    assert sidecar.hear("events").events.events[0].lease_id == 1
    assert sidecar.hear("release_reply").release_reply.call_id == 5


def test_a_pin_is_answered_from_the_table(engine: Engine, sidecar: Sidecar) -> None:
    sidecar.hear("hello")
    engine.grant(1, 3)
    ask = PinAsk(1, "pin", ME, "tenant", read_part_s=5.0)
    sidecar.say.put(
        connector_pb2.AttachResponse(pin=connector_pb2.PinCommand(call_id=9, pin=pin_to_wire(ask)))
    )
    reply = sidecar.hear("pin_reply").pin_reply
    outcome = outcome_from_wire(reply.result)
    assert isinstance(outcome, Pinned)
    assert outcome.blocks is not None
    assert (reply.call_id, outcome.blocks.block_ids, outcome.layout_hash) == (9, (3,), "layout")
    assert outcome.location == FACTS.location


def test_a_wrong_question_is_a_miss_and_the_stream_goes_on(engine: Engine, sidecar: Sidecar) -> None:
    sidecar.hear("hello")
    engine.grant(1, 3)
    engine.grant(2, 4)
    engine.holder.pin(PinAsk(1, "pin", ME, "tenant", 30.0))
    in_use = pin_to_wire(PinAsk(2, "pin", ME, "tenant", 30.0))
    for call_id, question in ((1, in_use), (2, type(in_use)())):
        command = connector_pb2.PinCommand(call_id=call_id, pin=question)
        sidecar.say.put(connector_pb2.AttachResponse(pin=command))
        reply = sidecar.hear("pin_reply").pin_reply
        assert (reply.call_id, outcome_from_wire(reply.result)) == (call_id, MissReason.UNKNOWN)
    sidecar.say.put(connector_pb2.AttachResponse(remote_pin_reply=connector_pb2.RemotePinReply(call_id=1)))
    sidecar.say.put(
        connector_pb2.AttachResponse(
            renew=connector_pb2.RenewCommand(sequence=4, lease_ids=[1, 8], duration=duration_to_wire(20.0))
        )
    )
    renewal = sidecar.hear("renew_reply").renew_reply
    assert (renewal.sequence, [miss.lease_id for miss in renewal.misses]) == (4, [8])
    assert sidecar.heard.empty()


def test_a_read_asks_through_the_sidecar_and_hears_back(engine: Engine, sidecar: Sidecar) -> None:
    sidecar.hear("hello")
    wait_for(lambda: engine.service._link.is_attached)
    engine.reads.begin("r", PEER_ORDER, "tenant")
    question = sidecar.hear("remote_pin").remote_pin
    assert (question.sidecar_address, question.pin.lease_id) == ("peer:1", 7)
    engine.grant(7, 5)
    answer = engine.holder.pin(PinAsk(7, "pin", ME, "tenant", read_part_s=5.0))
    sidecar.say.put(
        connector_pb2.AttachResponse(
            remote_pin_reply=connector_pb2.RemotePinReply(
                call_id=question.call_id, result=outcome_to_wire(answer)
            )
        )
    )
    read = engine.reads.get("r")
    assert read is not None
    wait_for(lambda: read.stage is Stage.PINNED)
    engine.reads.settle(read, "read")
    assert sidecar.hear("remote_unpin").remote_unpin.pin_id == "pin"


def test_counters_and_gauges_are_answered(engine: Engine, sidecar: Sidecar) -> None:
    sidecar.hear("hello")
    engine.grant(1, 3)
    engine.reads.count("reads", 2)
    sidecar.say.put(connector_pb2.AttachResponse(read_counters=connector_pb2.ReadCounters(call_id=3)))
    gauges = sidecar.hear("gauges").gauges
    assert (gauges.call_id, gauges.held_blocks, gauges.total_blocks, gauges.counters["reads"]) == (
        3,
        1,
        20,
        2,
    )


def test_an_order_of_eviction_is_taken(engine: Engine, sidecar: Sidecar) -> None:
    sidecar.hear("hello")
    engine.grant(1, 3)
    engine.grant(2, 4)
    order = connector_pb2.EvictionOrder(lease_ids=[2, 1])
    sidecar.say.put(connector_pb2.AttachResponse(eviction_order=order))
    sidecar.say.put(connector_pb2.AttachResponse(read_counters=connector_pb2.ReadCounters(call_id=3)))
    sidecar.hear("gauges")
    engine.holder.gain(1)
    assert [block.ref_cnt for block in engine.pool.blocks[3:5]] == [1, 0]


def test_without_a_sidecar_a_read_is_unreachable_at_once(socket_dir: Path) -> None:
    engine = Engine(socket_dir)
    engine.reads.begin("r", PEER_ORDER, "tenant")
    read = engine.reads.get("r")
    assert read is not None
    assert read.outcome == "unreachable"
    engine.service.stop()


def test_a_full_outbox_refuses_offers_and_breaks_the_stream_for_an_event(socket_dir: Path) -> None:
    engine = Engine(socket_dir, outbox_max=1)
    engine.service.stop()
    broken: list[bool] = []
    link = engine.service._link
    link._outbox = queue.Queue(1)
    link._attach_thread._stream = SimpleNamespace(cancel=lambda: broken.append(True))  # type: ignore[assignment]
    engine.grant(1, 3)
    assert engine.offer(1)
    assert not engine.offer(1)
    assert broken == []
    engine.holder.pin(PinAsk(1, "pin", ME, "tenant", 30.0))
    assert broken == [True]
    assert link.dropped == 2


def test_an_engine_that_is_refused_asks_again(socket_dir: Path, sidecar: Sidecar) -> None:
    sidecar.hello.refusal = "no"
    engine = Engine(socket_dir)
    for _ in range(2):
        sidecar.hear("hello")
        sidecar.end_stream()
    sidecar.hear("hello")
    engine.service.stop()


def test_stopping_ends_both_threads_with_and_without_a_sidecar(socket_dir: Path) -> None:
    alone = Engine(socket_dir)
    alone.service.stop()
    sidecar = Sidecar(socket_dir)
    attached = Engine(socket_dir)
    sidecar.hear("hello")
    attached.service.stop()
    for link in (alone.service._link, attached.service._link):
        assert not link._attach_thread._thread.is_alive()
        assert not link._tick_thread.is_alive()
        assert not link.is_attached
    sidecar.stop()


def test_a_handler_that_fails_is_asked_again(socket_dir: Path, sidecar: Sidecar) -> None:
    class Failing:
        hellos = 0

        def hello(self) -> connector_pb2.AttachRequest:
            self.hellos += 1
            if self.hellos == 1:
                raise RuntimeError("not yet")
            return connector_pb2.AttachRequest(hello=connector_pb2.ConnectorHello(model="second"))

        def receive(self, message: connector_pb2.AttachResponse) -> None: ...

        def tick(self) -> None:
            raise RuntimeError("a tick that fails is logged")

    link = SidecarLink(str(socket_dir), Failing(), 10)
    link.start()
    assert sidecar.hear("hello").hello.model == "second"
    link.stop()
