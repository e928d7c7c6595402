"""Workers that are told with whom to shake hands: whom, in which order, and when no more."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from kvlease.core.attachment import EngineFacts, HandshakeOutcome, HandshakeReport
from kvlease.core.ids import Holder
from kvlease.core.records import EngineRole
from kvlease.runtime.clock import LoopClock
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.server import SidecarServer
from kvlease.v1 import connector_pb2, connector_pb2_grpc
from kvlease.wire.values import holder_to_wire
from kvlease.wire.warming import peer_from_wire, report_to_wire

from .conftest import Fleet, make_facts, until

READER = "prefill-1"


class Worker:
    """A worker's stream, opened by hand."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._say: asyncio.Queue[connector_pb2.WarmRequest | None] = asyncio.Queue()
        self._call: Any = connector_pb2_grpc.ConnectorServiceStub(channel).Warm(self._said())

    @classmethod
    async def of(cls, fleet: Fleet, sidecar: SidecarServer, engine_id: str = READER) -> "Worker":
        """The first worker of an engine."""
        worker = cls(await fleet.channel(f"unix:{sidecar.socket_path}"))
        worker.say(connector_pb2.WarmRequest(hello=connector_pb2.WorkerHello(engine_id=engine_id, rank=0)))
        return worker

    def say(self, message: connector_pb2.WarmRequest) -> None:
        """Sends a message."""
        self._say.put_nowait(message)

    def report(self, peer: Holder, outcome: HandshakeOutcome = HandshakeOutcome.DONE) -> None:
        """Says what came of a handshake."""
        self.say(report_to_wire(HandshakeReport(peer, outcome, 0.25)))

    async def told(self) -> Holder:
        """The peer that it is told of next."""
        async with asyncio.timeout(20):
            message = await self._call.read()
        assert isinstance(message, connector_pb2.WarmResponse)
        peer, _ = peer_from_wire(message)
        assert peer.location == make_facts().location
        return peer.holder

    async def ended(self) -> grpc.StatusCode:
        """How the sidecar ended the stream."""
        async with asyncio.timeout(20):
            code: grpc.StatusCode = await self._call.code()
            return code

    async def _said(self) -> AsyncIterator[connector_pb2.WarmRequest]:
        while (message := await self._say.get()) is not None:
            yield message


def facts(engine_id: str, **changes: Any) -> EngineFacts:
    return replace(make_facts(engine_id), **changes)


async def scraped(fleet: Fleet, sidecar: SidecarServer) -> str:
    text = await sidecar._metrics.exposition()
    return text.decode()


async def test_a_worker_is_told_of_the_peers_its_engine_may_read_one_at_a_time(fleet: Fleet) -> None:
    here, there = await fleet.sidecar(EngineRole.PREFILL), await fleet.sidecar()
    worker = await Worker.of(fleet, here)
    await fleet.connector(there, facts("decode-1"))
    await fleet.connector(there, facts("decode-2"))
    await fleet.connector(here, facts(READER))
    first = await worker.told()
    worker.report(first)
    second = await worker.told()
    worker.report(second, HandshakeOutcome.FAILED)
    assert {first.engine_id, second.engine_id} == {"decode-1", "decode-2"}

    async def counted() -> bool:
        text = await scraped(fleet, here)
        return all(
            f'kvlease_handshake_seconds_count{{outcome="{name}"}} 1.0' in text for name in ("done", "failed")
        )

    await until(counted)
    await fleet.connector(there, facts("decode-3"))
    assert (await worker.told()).engine_id == "decode-3"


async def test_a_worker_is_not_told_of_engines_that_no_turn_makes_it_read(fleet: Fleet) -> None:
    here, there = await fleet.sidecar(EngineRole.PREFILL), await fleet.sidecar()
    other_layout = replace(make_facts().layout, layout_hash="other")
    await fleet.connector(here, facts(READER))
    await fleet.connector(here, facts("prefill-2"))
    await fleet.connector(there, facts("decode-1", layout=other_layout))
    await fleet.connector(there, facts("decode-2", retain=False, retain_refusal="a sliding window"))
    await fleet.connector(there, facts("decode-3"))
    worker = await Worker.of(fleet, here)
    last = await worker.told()
    assert last.engine_id == "decode-3"
    worker.report(last)
    await fleet.connector(there, facts("decode-4"))
    assert (await worker.told()).engine_id == "decode-4"


async def test_a_peer_that_comes_back_as_another_process_is_told_of_again(fleet: Fleet) -> None:
    here, there = await fleet.sidecar(EngineRole.PREFILL), await fleet.sidecar()
    await fleet.connector(here, facts(READER))
    peer = await fleet.connector(there, facts("decode-1"))
    worker = await Worker.of(fleet, here)
    worker.report(await worker.told())
    peer.reset()
    await peer.detach()
    await fleet.connector(there, replace(facts("decode-1b"), holder=Holder("decode-1b", "boot-2", 1)))
    # Another epoch of the process that it has met would have come first.
    assert (await worker.told()).boot_id == "boot-2"


async def test_a_report_about_another_peer_or_of_an_unknown_outcome_is_not_the_answer(fleet: Fleet) -> None:
    here, there = await fleet.sidecar(EngineRole.PREFILL), await fleet.sidecar()
    await fleet.connector(here, facts(READER))
    await fleet.connector(there, facts("decode-1"))
    worker = await Worker.of(fleet, here)
    told = await worker.told()
    worker.report(Holder("stranger", "boot"))
    worker.say(
        connector_pb2.WarmRequest(report=connector_pb2.HandshakeReport(peer=holder_to_wire(told), outcome=99))  # type: ignore[arg-type]
    )
    worker.report(told, HandshakeOutcome.KNOWN)

    async def counted() -> bool:
        return 'kvlease_handshake_seconds_count{outcome="known"} 1.0' in await scraped(fleet, here)

    await until(counted)
    assert 'outcome="done"' not in await scraped(fleet, here)


async def test_a_worker_that_does_not_say_who_it_is_is_refused(fleet: Fleet) -> None:
    sidecar = await fleet.sidecar()
    worker = Worker(await fleet.channel(f"unix:{sidecar.socket_path}"))
    worker.report(Holder("peer", "boot"))
    assert await worker.ended() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_sidecar_that_stops_ends_the_streams_of_workers_at_once(fleet: Fleet) -> None:
    sidecar = await fleet.sidecar(EngineRole.PREFILL)
    worker = await Worker.of(fleet, sidecar)
    await fleet.connector(sidecar, facts(READER))
    peers = await fleet.sidecar()
    await fleet.connector(peers, facts("decode-1"))
    worker.report(await worker.told())
    await sidecar.stop()
    assert await worker.ended() is grpc.StatusCode.OK


async def test_a_sidecar_that_is_told_not_to_warm_says_so(
    fleet: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = SidecarConfig(
        listen="127.0.0.1:0",
        allow_loopback=True,
        socket_dir=str(tmp_path_factory.mktemp("w")),
        warm_handshakes=False,
    )
    sidecar = SidecarServer(config, fleet.store, LoopClock())
    await sidecar.start()
    fleet.stack.push_async_callback(sidecar.stop)
    worker = await Worker.of(fleet, sidecar)
    assert await worker.ended() is grpc.StatusCode.UNIMPLEMENTED
