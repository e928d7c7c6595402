"""One connector's questions to other sidecars: those about one pin go in order, others do not wait for them."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import PinOutcome
from kvlease.sidecar.connector_link import StreamConnectorLink
from kvlease.sidecar.connector_server import REMOTE_CALLS_MAX, _Attachment
from kvlease.v1 import connector_pb2
from kvlease.wire.leases import pin_to_wire
from kvlease.wire.values import holder_to_wire

PEER = Holder("peer", "boot", 1)


class Peers:
    """Stands for the sidecar: notes in which order it is asked; pins are answered when `open` is set."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.asked: list[tuple[str, str]] = []

    async def remote_pin(self, ask: PinAsk, wait_for_offer_s: float, address: str) -> PinOutcome:
        self.asked.append(("pin", ask.pin_id))
        await self.open.wait()
        return MissReason.EXPIRED

    async def remote_unpin(self, holder: Holder, lease_id: int, pin_id: str, address: str) -> None:
        self.asked.append(("unpin", pin_id))


class Stream:
    """The connector's end of the stream, and what came back over it."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[connector_pb2.AttachRequest | None] = asyncio.Queue()
        self.replies: list[connector_pb2.AttachResponse] = []

    async def __aiter__(self) -> AsyncIterator[connector_pb2.AttachRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    async def write(self, message: connector_pb2.AttachResponse) -> None:
        self.replies.append(message)

    def pin(self, pin_id: str, call_id: int = 1) -> None:
        spec = pin_to_wire(PinAsk(7, pin_id, PEER, "t", read_part_s=5.0))
        pin = connector_pb2.RemotePin(call_id=call_id, pin=spec, sidecar_address="peer:1")
        self.requests.put_nowait(connector_pb2.AttachRequest(remote_pin=pin))

    def unpin(self, pin_id: str) -> None:
        unpin = connector_pb2.RemoteUnpin(
            lease_id=7, pin_id=pin_id, sidecar_address="peer:1", holder=holder_to_wire(PEER)
        )
        self.requests.put_nowait(connector_pb2.AttachRequest(remote_unpin=unpin))


@pytest.fixture
def peers() -> Peers:
    return Peers()


@pytest.fixture
async def stream(peers: Peers) -> AsyncIterator[Stream]:
    stream, link = Stream(), StreamConnectorLink(1.0, 1.0)
    attachment = _Attachment(cast(Any, peers), cast(Any, _Engine()), link)
    serving = asyncio.create_task(attachment.serve(cast(Any, stream), cast(Any, stream)))
    yield stream
    peers.open.set()
    link.close("the test is over")
    stream.requests.put_nowait(None)
    await serving


class _Engine:
    """An attached engine that is told nothing here."""

    offer = apply_events = None


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_unpin_overtakes_no_pin_of_its_id(stream: Stream, peers: Peers) -> None:
    stream.pin("a")
    stream.unpin("a")
    await settle()
    assert peers.asked == [("pin", "a")]
    peers.open.set()
    await settle()
    assert peers.asked == [("pin", "a"), ("unpin", "a")]
    assert [reply.remote_pin_reply.call_id for reply in stream.replies] == [1]


async def test_a_pin_that_is_slow_holds_up_no_other(stream: Stream, peers: Peers) -> None:
    stream.pin("a")
    stream.unpin("b")
    stream.pin("c", 2)
    await settle()
    assert peers.asked == [("pin", "a"), ("unpin", "b"), ("pin", "c")]


async def test_questions_beyond_the_bound_are_answered_at_once_and_leave_room_later(
    stream: Stream, peers: Peers
) -> None:
    for call_id in range(REMOTE_CALLS_MAX + 1):
        stream.pin(f"pin-{call_id}", call_id)
    await settle()
    assert [reply.remote_pin_reply.call_id for reply in stream.replies] == [REMOTE_CALLS_MAX]
    peers.open.set()
    await settle()
    stream.pin("later", 5000)
    await settle()
    assert stream.replies[-1].remote_pin_reply.call_id == 5000
