"""Parts of this version beside parts of the version before, whose protos are frozen in tests/upgrade."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from kvlease.core.lease import MissReason
from kvlease.core.records import EngineRole, Pinned
from kvlease.core.renewal import Beat, EngineDelta, RenewalPolicy
from kvlease.dev.engine_process import free_ports
from kvlease.router.registry_client import GrpcRegistry
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.grpc_client import Channels
from kvlease.runtime.identity import Identity
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.server import SidecarServer
from kvlease.v1 import (
    connector_pb2,
    lease_pb2,
    registry_pb2,
    registry_pb2_grpc,
    routing_pb2,
    sidecar_pb2,
    store_pb2,
)
from stubs.earlier import EarlierPeer, earlier_files, earlier_pool, filled

from .conftest import TENANT, Fleet, make_ask, make_grant
from .test_router import LONG, MESSAGES, said, serving_stack

MODULES = (connector_pb2, lease_pb2, registry_pb2, routing_pb2, sidecar_pb2, store_pb2)
EARLIER = [
    f"{file.package}.{message.name}"
    for file in earlier_files().file
    if file.package == "kvlease.v1"
    for message in file.message_type
]


def present(name: str) -> type[Message]:
    """The class of this version's message of that name."""
    for module in MODULES:
        if name.rpartition(".")[2] in module.DESCRIPTOR.message_types_by_name:
            found: type[Message] = getattr(module, name.rpartition(".")[2])
            return found
    raise AssertionError(f"{name} is gone")


def earlier(name: str) -> type[Message]:
    found: type[Message] = GetMessageClass(earlier_pool().FindMessageTypeByName(name))  # type: ignore[no-untyped-call]
    return found


def leaves(message: Message) -> Iterator[tuple[str, object]]:
    for field, value in message.ListFields():
        yield field.name, str(value)


@pytest.mark.parametrize("name", EARLIER)
def test_what_the_version_before_says_is_understood_as_it_was_meant(name: str) -> None:
    said = filled(earlier(name)())
    heard = present(name).FromString(said.SerializeToString())
    assert dict(leaves(heard)) == dict(leaves(said))
    assert heard.SerializeToString(deterministic=True) == said.SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", EARLIER)
def test_what_the_version_before_does_not_know_survives_its_hands(name: str) -> None:
    said = filled(present(name)())
    passed_on = earlier(name).FromString(said.SerializeToString()).SerializeToString()
    assert present(name).FromString(passed_on) == said


@asynccontextmanager
async def running(peer: EarlierPeer, listen: str = "127.0.0.1:0") -> AsyncIterator[EarlierPeer]:
    await peer.start(listen)
    try:
        yield peer
    finally:
        await peer.stop()


@asynccontextmanager
async def client_of(address: str) -> AsyncIterator[GrpcRegistry]:
    channels = Channels(Identity.REGISTRY)
    try:
        yield GrpcRegistry(channels, (address,), "router-1", RenewalPolicy(), 5.0)
    finally:
        await channels.close()


async def use(registry: GrpcRegistry, engine_id: str = "decode-1") -> None:
    """What a router asks of a registry, from the first heartbeat of a lease to its release."""
    async with registry.watch_engines() as batches:
        assert (await anext(batches)).snapshot
    async with registry.renew() as beats:
        engines = {engine_id: EngineDelta(added_lease_ids=(7,))}
        await beats.send(Beat(epoch=1, sequence=1, full=True, engines=engines))
        ack = await anext(beats.acks())
        assert (ack.sequence, ack.misses) == (1, {})
    ask = make_ask(7)
    assert isinstance(await registry.pin(ask, 0.0), Pinned)
    await registry.unpin(ask.holder, 7, ask.pin_id)
    assert await registry.release(7, engine_id, TENANT) is None
    assert await registry.pin(make_ask(7, "late"), 0.0) in (MissReason.RELEASED, MissReason.UNKNOWN)


async def test_a_router_and_a_registry_of_which_either_is_the_version_before(fleet: Fleet) -> None:
    connector = await fleet.connector(await fleet.sidecar())
    connector.grant(make_grant(7))
    assert fleet.registry_server is not None
    async with (
        running(EarlierPeer(fleet.registry_server.address)) as peer,
        client_of(peer.address) as registry,
    ):
        await use(registry)


async def test_a_conversation_goes_on_over_a_registry_of_which_either_is_the_version_before(
    fleet: Fleet,
) -> None:
    assert fleet.registry_server is not None
    async with (
        running(EarlierPeer(fleet.registry_server.address)) as peer,
        serving_stack(fleet, peer.address) as stack,
    ):
        assert await stack.chat(MESSAGES) == "recompute; first_turn"
        assert await stack.chat(said(LONG)) == "readback; long_suffix"


async def test_a_connector_and_a_sidecar_of_which_either_is_the_version_before(
    fleet: Fleet, tmp_path: Path
) -> None:
    sidecar = await fleet.sidecar()
    socket = tmp_path / "old.sock"
    async with running(EarlierPeer(f"unix:{sidecar.socket_path}"), f"unix:{socket}"):
        sidecar.socket_path = socket
        connector = await fleet.connector(sidecar)
        connector.grant(make_grant(7))
        assert fleet.registry_server is not None
        async with client_of(fleet.registry_server.address) as registry:
            await use(registry)


async def test_a_registry_and_a_sidecar_of_which_either_is_the_version_before(fleet: Fleet) -> None:
    (port,) = free_ports(1)
    async with running(EarlierPeer(f"127.0.0.1:{port}")) as peer:
        config = SidecarConfig(
            listen=f"127.0.0.1:{port}",
            advertise=peer.address,
            allow_loopback=True,
            socket_dir=str(fleet.tmp_path / "behind"),
            role=EngineRole.DECODE,
            pin_call_s=3.0,
            peer_call_s=4.0,
            holder_call_s=4.0,
        )
        sidecar = SidecarServer(config, fleet.store, LoopClock())
        await sidecar.start()
        fleet.stack.push_async_callback(sidecar.stop)
        connector = await fleet.connector(sidecar)
        connector.grant(make_grant(7))
        assert fleet.registry_server is not None
        async with client_of(fleet.registry_server.address) as registry:
            await use(registry)


async def test_an_operator_is_told_that_the_version_before_cannot_drain(fleet: Fleet) -> None:
    await fleet.connector(await fleet.sidecar())
    assert fleet.registry_server is not None
    async with running(EarlierPeer(fleet.registry_server.address)) as peer:
        stub = registry_pb2_grpc.RegistryServiceStub(await fleet.channel(peer.address))
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.DrainEngine(registry_pb2.DrainEngineRequest(engine_id="decode-1"), timeout=10)
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_peer_of_these_tests_takes_away_what_the_version_before_does_not_know(fleet: Fleet) -> None:
    engine = registry_pb2.Engine(model="tiny", draining=True)
    message = registry_pb2.ListEnginesResponse(engines=[engine]).SerializeToString()
    peer = EarlierPeer("nowhere")
    heard = peer.response("/kvlease.v1.RegistryService/ListEngines", message)
    (passed_on,) = registry_pb2.ListEnginesResponse.FromString(heard).engines
    assert (passed_on.model, passed_on.draining, peer.dropped) == ("tiny", False, {"ListEnginesResponse"})
