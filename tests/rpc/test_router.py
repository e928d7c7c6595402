"""A router over the real registry and sidecars: engines are stubs over HTTP whose connectors hold real tables."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import grpc.aio
import pytest
from aiohttp import web

from kvlease.core.attachment import EngineFacts
from kvlease.core.conversation import tenant_digest
from kvlease.core.digests import ChainRoot, chain
from kvlease.core.holding import Grant
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState
from kvlease.core.records import EngineRole, KvLayout, KvLocation
from kvlease.core.turn import TurnParams
from kvlease.router.config import RouterConfig
from kvlease.router.server import RouterServer
from kvlease.runtime.clock import LoopClock
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.server import SidecarServer
from kvlease.testing.connector import FakeConnector
from kvlease.v1 import routing_pb2, routing_pb2_grpc
from stubs.engines import StubEngine
from stubs.waiting import eventually

from .conftest import Fleet

BLOCK_SIZE = 16
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "tell me something about lighthouses " * 8}]
LONG = "a long tool result " * 300
TENANT = tenant_digest("anonymous")


@dataclass
class Pair:
    """An engine: its HTTP side, its sidecar, and its connector, which grants what the router's orders say."""

    http: StubEngine
    sidecar: SidecarServer
    connector: FakeConnector

    def keep(self, params: TurnParams) -> None:
        keep = params.keep
        if keep is None or keep.kind is not LeaseKind.CONVERSATION:
            return
        digests = chain(ChainRoot(params.tenant, "tiny"), list(range(192)), BLOCK_SIZE).digests
        grant = Grant(
            keep.lease_id,
            keep.kind,
            tuple(range(12)),
            digests,
            192,
            BLOCK_SIZE,
            tenant=params.tenant,
            conversation_key=keep.conversation_key,
            chain_keys=keep.chain_keys,
            supersedes=keep.supersedes,
            model="tiny",
        )
        self.connector.grant(grant, keep.duration_s)


async def start_pair(fleet: Fleet, engine_id: str, role: EngineRole) -> Pair:
    http = StubEngine(engine_id, role)
    await http.start()
    fleet.stack.push_async_callback(http.stop)
    config = SidecarConfig(
        listen="127.0.0.1:0",
        allow_loopback=True,
        socket_dir=str(fleet.tmp_path / engine_id),
        role=role,
        engine_url=http.url,
        stop_grace_s=0.0,
        pin_call_s=3.0,
        peer_call_s=4.0,
    )
    sidecar = SidecarServer(config, fleet.store, LoopClock())
    await sidecar.start()
    fleet.stack.push_async_callback(sidecar.stop)
    facts = EngineFacts(
        holder=Holder(engine_id, "boot-" + engine_id, 1),
        model="tiny",
        layout=KvLayout(BLOCK_SIZE, "float32", 1, 1, 4096, "layout"),
        location=KvLocation("127.0.0.1", 5600),
        vllm_version="0.32.0",
        total_blocks=90,
    )
    pair = Pair(http, sidecar, await fleet.connector(sidecar, facts))

    async def answer(request: web.Request, received: Any) -> web.StreamResponse:
        pair.keep(TurnParams.from_json(received.orders))
        return await http.answer(request, received)

    http.script = answer
    return pair


@dataclass
class Stack:
    router: RouterServer
    session: aiohttp.ClientSession
    prefill: Pair
    decode: Pair

    async def chat(self, messages: list[dict[str, Any]], conversation_id: str = "c") -> str:
        body = {"model": "tiny", "messages": messages, "conversation_id": conversation_id}
        async with self.session.post(self.router.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200
            return response.headers["X-Kvlease-Route"]

    async def lease(self, conversation_id: str = "c") -> tuple[int, str]:
        url = f"{self.router.url}/v1/kvlease/conversations/{conversation_id}"
        async with self.session.get(url) as response:
            lease = (await response.json())["lease"]
            return int(lease["lease_id"], 16), lease["state"]


@pytest.fixture
async def stack(fleet: Fleet) -> AsyncIterator[Stack]:
    assert fleet.registry_server is not None
    async with serving_stack(fleet, fleet.registry_server.address) as stack:
        yield stack


@asynccontextmanager
async def serving_stack(fleet: Fleet, registry: str) -> AsyncIterator[Stack]:
    """A router that asks the registry at an address, and two engines."""
    prefill = await start_pair(fleet, "prefill-1", EngineRole.PREFILL)
    decode = await start_pair(fleet, "decode-1", EngineRole.DECODE)
    config = RouterConfig(
        listen="127.0.0.1:0",
        grpc_listen="127.0.0.1:0",
        registry=registry,
        registry_call_s=5.0,
        stop_grace_s=0.1,
    )
    router = RouterServer.connected(config, LoopClock())
    await router.start()
    fleet.stack.push_async_callback(router.stop)
    async with aiohttp.ClientSession() as session:
        async with asyncio.timeout(20):
            known = 0
            while known < 2:
                async with session.get(router.url + "/health") as response:
                    known = sum((await response.json())["engines"].values())
        yield Stack(router, session, prefill, decode)


def said(text: str) -> list[dict[str, Any]]:
    return [*MESSAGES, {"role": "assistant", "content": "hello"}, {"role": "user", "content": text}]


async def test_a_finished_turn_is_confirmed_at_its_holder_and_recorded(fleet: Fleet, stack: Stack) -> None:
    assert await stack.chat(MESSAGES) == "recompute; first_turn"
    lease_id, _ = await stack.lease()
    table = stack.decode.connector.table
    await eventually(lambda: (hold := table.get(lease_id)) is not None and not hold.provisional)
    async with asyncio.timeout(20):
        while await fleet.store.get_lease(lease_id) is None or (await stack.lease())[1] != "held":
            await asyncio.sleep(0.005)


async def test_the_next_turn_pins_the_lease_at_its_holder(stack: Stack) -> None:
    await stack.chat(MESSAGES)
    first, _ = await stack.lease()
    assert await stack.chat(said(LONG)) == "readback; long_suffix"
    hold = stack.decode.connector.table.get(first)
    read = TurnParams.from_json(stack.prefill.http.received[1].orders).read
    assert read is not None
    assert read.lease_id == first
    assert read.sidecar_address == stack.decode.sidecar.address
    assert hold is None or read.pin_id in hold.pins


async def test_the_new_lease_supersedes_the_one_before(stack: Stack) -> None:
    await stack.chat(MESSAGES)
    first, _ = await stack.lease()
    assert await stack.chat(said("more?")) == "append; short_suffix"
    second, _ = await stack.lease()
    table = stack.decode.connector.table
    await eventually(lambda: table.get(first) is None and table.get(second) is not None)
    assert second != first


async def test_a_lease_that_the_holder_lost_is_a_recompute(stack: Stack) -> None:
    await stack.chat(MESSAGES)
    stack.decode.connector.reset()
    stack.decode.connector.table.take_ended()
    route = await stack.chat(said(LONG))
    assert route in ("recompute; lease_lost", "recompute; lease_missing")
    assert TurnParams.from_json(stack.prefill.http.received[1].orders).read is None


async def test_an_engine_whose_connector_is_gone_is_served_no_more(fleet: Fleet, stack: Stack) -> None:
    await stack.decode.connector.detach()
    async with asyncio.timeout(20):
        status = 0
        while status != 503:
            async with stack.session.get(stack.router.url + "/health") as response:
                status = response.status


async def test_without_the_registry_turns_go_on_and_reuse_ends(fleet: Fleet, stack: Stack) -> None:
    await stack.chat(MESSAGES)
    assert fleet.registry_server is not None
    await fleet.registry_server.stop()
    route = await stack.chat(said(LONG))
    assert route in ("recompute; holder_unreachable", "recompute; lease_missing")


async def test_another_router_goes_on_with_the_conversation(fleet: Fleet, stack: Stack) -> None:
    await stack.chat(MESSAGES)
    lease_id, _ = await stack.lease()
    assert fleet.registry_server is not None
    config = RouterConfig(
        listen="127.0.0.1:0",
        grpc_listen="127.0.0.1:0",
        registry=fleet.registry_server.address,
        registry_call_s=5.0,
        stop_grace_s=0.1,
    )
    async with asyncio.timeout(20):
        while await fleet.store.get_lease(lease_id) is None:
            await asyncio.sleep(0.005)
    other = RouterServer.connected(config, LoopClock())
    await other.start()
    fleet.stack.push_async_callback(other.stop)
    elsewhere = replace(stack, router=other)
    async with asyncio.timeout(20):
        known = 0
        while known < 2:
            async with stack.session.get(other.url + "/health") as response:
                health = await response.json()
                known = sum(health["engines"].values()) if health["recorded_leases"] else 0
    route = await elsewhere.chat(said(LONG))
    assert route == "readback; long_suffix"
    read = TurnParams.from_json(stack.prefill.http.received[1].orders).read
    assert read is not None
    assert read.lease_id == lease_id


async def test_the_routing_service_tells_renews_and_releases(stack: Stack) -> None:
    await stack.chat(MESSAGES)
    lease_id, _ = await stack.lease()
    name = {"tenant": TENANT, "conversation_id": "c"}
    async with grpc.aio.insecure_channel(stack.router.grpc_address) as channel:
        stub = routing_pb2_grpc.RoutingServiceStub(channel)
        told = await stub.GetConversation(routing_pb2.GetConversationRequest(**name), timeout=10)
        assert [(turn.path, turn.reason, turn.lease_id) for turn in told.turns] == [
            (routing_pb2.TURN_PATH_RECOMPUTE, "first_turn", lease_id)
        ]
        ask = routing_pb2.RenewConversationRequest(**name)
        ask.duration.FromSeconds(60)
        assert (await stub.RenewConversation(ask, timeout=10)).live
        release = routing_pb2.ReleaseConversationRequest(**name)
        assert (await stub.ReleaseConversation(release, timeout=10)).released
        assert not (await stub.ReleaseConversation(release, timeout=10)).released
        assert not (await stub.RenewConversation(ask, timeout=10)).live
    table = stack.decode.connector.table
    await eventually(lambda: table.get(lease_id) is None)
    states = [hold.state for hold in table.take_ended()]
    assert states == [LeaseState.RELEASED]
