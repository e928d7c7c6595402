"""A sidecar between a connector on its unix socket, other sidecars and a store."""

import asyncio
import socket
import stat
from dataclasses import replace

import pytest

from kvlease.core.errors import InvalidArgument, NotOwner, UnknownEngine, VersionMismatch
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, LeaseState, MissReason
from kvlease.core.records import EngineRole, Pinned
from kvlease.runtime.sidecars import GrpcSidecars
from kvlease.sidecar.server import SidecarServer
from kvlease.testing.connector import ConnectorRefused, FakeConnector
from kvlease.v1 import connector_pb2, connector_pb2_grpc
from kvlease.wire.engines import hello_to_wire

from .conftest import TENANT, Fleet, make_ask, make_facts, make_grant, until


@pytest.fixture
async def sidecars(fleet: Fleet) -> GrpcSidecars:
    sidecars = GrpcSidecars()
    fleet.stack.push_async_callback(sidecars.close)
    return sidecars


async def confirm(fleet: Fleet, sidecars: GrpcSidecars, sidecar: SidecarServer, lease_id: int) -> None:
    await sidecars.renew(sidecar.address, "decode-1", [lease_id], 20.0, [], 0.0, 5.0)

    async def recorded() -> bool:
        return await fleet.store.get_lease(lease_id) is not None

    await until(recorded)


async def test_an_attached_engine_is_registered_with_what_only_its_process_knows(fleet: Fleet) -> None:
    sidecar = await fleet.sidecar(EngineRole.PREFILL)
    await fleet.connector(sidecar)
    (engine,) = await fleet.store.list_engines()
    assert engine.holder == make_facts().holder
    assert (engine.role, engine.model, engine.total_blocks) == (EngineRole.PREFILL, "tiny", 90)
    assert engine.sidecar_address == sidecar.address


async def test_the_socket_lies_in_a_directory_of_its_owner_alone(fleet: Fleet) -> None:
    sidecar = await fleet.sidecar()
    assert stat.S_IMODE(sidecar.socket_path.parent.stat().st_mode) == 0o700
    assert sidecar.socket_path.is_socket()


async def test_a_pin_brings_blocks_and_location_verbatim(fleet: Fleet, sidecars: GrpcSidecars) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    connector.grant(make_grant(1))
    pinned = await sidecars.pin(sidecar.address, make_ask(1), 1.0, 5.0)
    assert isinstance(pinned, Pinned)
    assert pinned.holder == make_facts().holder
    assert pinned.location == make_facts().location
    assert pinned.blocks is not None
    assert pinned.blocks.block_ids == (3, 5)
    assert pinned.blocks.digests == make_grant(1).digests
    await sidecars.unpin(sidecar.address, make_facts().holder, 1, "pin-1", 5.0)

    async def unpinned() -> bool:
        return connector.table.reading_blocks() == 0

    await until(unpinned)


async def test_a_pin_waits_for_a_lease_that_is_about_to_be_offered(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    pin = asyncio.create_task(sidecars.pin(sidecar.address, make_ask(1), 5.0, 5.0))

    async def asked() -> bool:
        return connector.pins > 0

    await until(asked)
    connector.grant(make_grant(1))
    assert isinstance(await pin, Pinned)


async def test_a_pin_without_a_wait_misses_an_unknown_lease_at_once(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar()
    await fleet.connector(sidecar)
    assert await sidecars.pin(sidecar.address, make_ask(1), 0.0, 5.0) is MissReason.UNKNOWN


async def test_a_connector_that_does_not_answer_is_a_miss_within_the_bound(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar(pin_call_s=0.5)
    connector = await fleet.connector(sidecar)
    connector.grant(make_grant(1))
    connector.silent = True
    assert await sidecars.pin(sidecar.address, make_ask(1), 0.0, 5.0) is MissReason.UNREACHABLE


async def test_a_question_for_an_engine_that_is_not_attached_is_a_miss_or_an_error(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar()
    assert await sidecars.pin(sidecar.address, make_ask(1), 0.0, 5.0) is MissReason.UNREACHABLE
    with pytest.raises(UnknownEngine, match="decode-1"):
        await sidecars.renew(sidecar.address, "decode-1", [1], 20.0, [], 0.0, 5.0)
    await sidecars.unpin(sidecar.address, make_facts().holder, 1, "pin-1", 5.0)


async def test_a_provisional_lease_is_recorded_only_once_it_is_confirmed(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    connector.grant(make_grant(1))
    assert isinstance(await sidecars.pin(sidecar.address, make_ask(9), 0.0, 5.0), MissReason)
    assert await fleet.store.get_lease(1) is None
    await confirm(fleet, sidecars, sidecar, 1)
    record = await fleet.store.get_lease(1)
    assert record is not None
    assert (record.state, record.tenant, record.tokens) == (LeaseState.HELD, TENANT, 64)
    assert record.generation > 0
    assert record.chain_keys == (1, 2)


async def test_an_ended_lease_loses_its_record(fleet: Fleet, sidecars: GrpcSidecars) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    connector.grant(make_grant(1))
    await confirm(fleet, sidecars, sidecar, 1)
    connector.end(1, LeaseEvent.EVICT)

    async def removed() -> bool:
        return await fleet.store.get_lease(1) is None

    await until(removed)
    assert await sidecars.pin(sidecar.address, make_ask(1), 0.0, 5.0) is MissReason.EVICTED


async def test_the_next_turn_of_a_conversation_supersedes_the_last_also_on_another_engine(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    first, second = await fleet.sidecar(), await fleet.sidecar()
    decode_1 = await fleet.connector(first)
    decode_2 = await fleet.connector(second, make_facts("decode-2"))
    decode_1.grant(make_grant(1))
    await confirm(fleet, sidecars, first, 1)
    decode_2.grant(make_grant(2, supersedes=1))
    await sidecars.renew(second.address, "decode-2", [2], 20.0, [], 0.0, 5.0)

    async def superseded() -> bool:
        return decode_1.table.get(1) is None

    await until(superseded)
    assert [record.lease_id for record in await fleet.store.list_leases()] == [2]


async def test_a_broken_stream_loses_the_engine_and_all_its_leases_in_one_event(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    for lease_id in (1, 2, 3):
        connector.grant(make_grant(lease_id, conversation=bytes([lease_id])))
        await confirm(fleet, sidecars, sidecar, lease_id)
    async with fleet.store.watch_leases() as batches:
        assert len((await anext(batches)).changes) == 3
        await connector.detach()
        gone = await asyncio.wait_for(anext(batches), 20)
    assert {change.item.lease_id for change in gone.changes if change.gone} == {1, 2, 3}

    async def unregistered() -> bool:
        return await fleet.store.list_engines() == ()

    await until(unregistered)


async def test_a_restarted_sidecar_learns_everything_again_under_the_same_ids(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    first = await fleet.sidecar()
    connector = await fleet.connector(first)
    connector.grant(make_grant(1))
    await confirm(fleet, sidecars, first, 1)
    assert isinstance(await sidecars.pin(first.address, make_ask(1), 0.0, 5.0), Pinned)
    await first.stop()
    assert await fleet.store.get_lease(1) is None
    assert connector.table.lease_of_pin("pin-1") == 1

    second = await fleet.sidecar()
    await connector.attach(second.socket_path)

    async def recorded() -> bool:
        return await fleet.store.get_lease(1) is not None

    await until(recorded)
    renewed = await sidecars.pin(second.address, make_ask(1), 0.0, 5.0)
    assert isinstance(renewed, Pinned)
    assert connector.table.reading_blocks() == 2


async def test_an_engine_id_under_another_boot_id_is_refused_with_the_way_out(fleet: Fleet) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    await connector.detach()
    with pytest.raises(ConnectorRefused, match="leave `engine_id` out"):
        await fleet.connector(sidecar, make_facts(boot_id="boot-2"))


async def test_one_sidecar_serves_every_data_parallel_rank(fleet: Fleet, sidecars: GrpcSidecars) -> None:
    sidecar = await fleet.sidecar()
    await fleet.connector(sidecar, replace(make_facts("decode_dp0"), data_parallel_rank=0))
    rank_1 = await fleet.connector(sidecar, replace(make_facts("decode_dp1"), data_parallel_rank=1))
    assert {engine.data_parallel_rank for engine in await fleet.store.list_engines()} == {0, 1}
    rank_1.grant(make_grant(1))
    outcome = await sidecars.pin(sidecar.address, make_ask(1, engine_id="decode_dp1"), 1.0, 5.0)
    assert isinstance(outcome, Pinned)
    missed = await sidecars.pin(sidecar.address, make_ask(1, "pin-2", "decode_dp0"), 0.0, 5.0)
    assert missed is MissReason.UNKNOWN


@pytest.mark.parametrize("where", ["elsewhere", "here"])
async def test_a_reader_pins_and_unpins_through_its_own_sidecar(fleet: Fleet, where: str) -> None:
    holder_sidecar = await fleet.sidecar()
    reader_sidecar = await fleet.sidecar() if where == "elsewhere" else holder_sidecar
    holder = await fleet.connector(holder_sidecar)
    reader = await fleet.connector(reader_sidecar, make_facts("prefill-1"))
    holder.grant(make_grant(1))
    outcome = await reader.remote_pin(make_ask(1), holder_sidecar.address)
    assert isinstance(outcome, Pinned)
    assert outcome.blocks is not None
    assert holder.table.reading_blocks() == 2
    reader.remote_unpin(make_facts().holder, 1, "pin-1", holder_sidecar.address)

    async def unpinned() -> bool:
        return holder.table.reading_blocks() == 0

    await until(unpinned)


async def test_a_reader_hears_of_a_dead_peer_as_a_miss(fleet: Fleet) -> None:
    reader = await fleet.connector(await fleet.sidecar())
    ask = replace(make_ask(1), holder=Holder("gone", "boot-1"))
    assert await reader.remote_pin(ask, "127.0.0.1:1") is MissReason.UNREACHABLE


async def test_a_peer_that_refuses_a_question_breaks_no_stream(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise VersionMismatch("another version")

    sidecar = await fleet.sidecar()
    reader = await fleet.connector(sidecar)
    ask = replace(make_ask(1), holder=Holder("elsewhere", "boot-1"))
    monkeypatch.setattr(GrpcSidecars, "pin", refuse)
    assert await reader.remote_pin(ask, "127.0.0.1:1") is MissReason.UNREACHABLE
    assert await reader.remote_pin(ask, "127.0.0.1:1") is MissReason.UNREACHABLE


async def test_a_store_that_is_down_delays_no_pin_and_loses_no_record(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar()
    fleet.store.broken = True
    connector = await fleet.connector(sidecar)
    connector.grant(make_grant(1))
    assert isinstance(await sidecars.pin(sidecar.address, make_ask(1), 1.0, 5.0), Pinned)
    connector.grant(make_grant(2, supersedes=1))
    assert await sidecars.renew(sidecar.address, "decode-1", [2], 20.0, [], 0.0, 5.0) == {}
    fleet.store.broken = False

    async def recorded() -> bool:
        return [record.lease_id for record in await fleet.store.list_leases()] == [2]

    await until(recorded)
    assert len(await fleet.store.list_engines()) == 1


async def test_a_reset_loses_the_records_and_registers_the_next_epoch(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    connector.grant(make_grant(1))
    await confirm(fleet, sidecars, sidecar, 1)
    connector.reset()

    async def in_next_epoch() -> bool:
        (engine,) = await fleet.store.list_engines()
        return engine.holder.epoch == 2 and await fleet.store.get_lease(1) is None

    await until(in_next_epoch)
    assert await sidecars.pin(sidecar.address, make_ask(1), 0.0, 5.0) is MissReason.HOLDER_CHANGED


async def test_the_least_recently_used_of_equal_leases_is_first_in_the_order_of_eviction(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    for lease_id in (1, 2, 3):
        connector.grant(make_grant(lease_id, conversation=bytes([lease_id])))
        await confirm(fleet, sidecars, sidecar, lease_id)
    assert isinstance(await sidecars.pin(sidecar.address, make_ask(1), 0.0, 5.0), Pinned)
    await sidecars.renew(sidecar.address, "decode-1", [1, 2, 3], 20.0, [], 0.0, 5.0)

    async def ordered() -> bool:
        return connector.order == (2, 3, 1)

    await until(ordered)


async def test_a_release_needs_the_tenant_of_the_lease(fleet: Fleet, sidecars: GrpcSidecars) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    connector.grant(make_grant(1))
    await confirm(fleet, sidecars, sidecar, 1)
    with pytest.raises(NotOwner):
        await sidecars.release(sidecar.address, "decode-1", 1, "someone-else", 5.0, superseded=False)
    assert connector.table.get(1) is not None
    assert await sidecars.release(sidecar.address, "decode-1", 1, TENANT, 5.0, superseded=False) is None
    assert connector.table.get(1) is None
    again = await sidecars.release(sidecar.address, "decode-1", 1, "", 5.0, superseded=False)
    assert again is MissReason.RELEASED


async def test_gauges_come_from_the_holder(fleet: Fleet, sidecars: GrpcSidecars) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    connector.grant(make_grant(1))
    assert (await sidecars.read_gauges(sidecar.address, "decode-1", 5.0)).held_blocks == 2


async def test_a_second_stream_of_the_same_engine_replaces_the_first(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar()
    first = await fleet.connector(sidecar)
    second = FakeConnector(make_facts(), fleet.clock)
    second.grant(make_grant(1))
    await second.attach(sidecar.socket_path)
    fleet.stack.push_async_callback(second.detach)
    await first.ended()
    assert isinstance(await sidecars.pin(sidecar.address, make_ask(1), 0.0, 5.0), Pinned)
    assert len(await fleet.store.list_engines()) == 1


async def test_a_sidecar_that_stops_ends_the_streams_and_the_sessions_of_its_engines(fleet: Fleet) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    assert len(await fleet.store.list_engines()) == 1
    await asyncio.wait_for(sidecar.stop(), 20)
    assert await fleet.store.list_engines() == ()
    await asyncio.wait_for(connector.ended(), 20)


async def first_answer(
    fleet: Fleet, sidecar: SidecarServer, *requests: connector_pb2.AttachRequest
) -> connector_pb2.AttachResponse:
    stub = connector_pb2_grpc.ConnectorServiceStub(await fleet.channel(f"unix:{sidecar.socket_path}"))
    call = stub.Attach()
    for request in requests:
        await call.write(request)
    response = await asyncio.wait_for(call.read(), 20)
    assert isinstance(response, connector_pb2.AttachResponse)
    return response


async def test_a_stream_that_does_not_begin_with_a_hello_is_refused(fleet: Fleet) -> None:
    request = connector_pb2.AttachRequest(events=connector_pb2.LeaseEvents())
    answer = await first_answer(fleet, await fleet.sidecar(), request)
    assert "first message" in answer.hello.refusal


async def test_a_connector_of_another_protocol_version_is_told_both_versions(fleet: Fleet) -> None:
    hello = hello_to_wire(make_facts(), [])
    hello.protocol_version = 99
    answer = await first_answer(fleet, await fleet.sidecar(), connector_pb2.AttachRequest(hello=hello))
    assert "version 99" in answer.hello.refusal
    assert "version 1" in answer.hello.refusal
    assert await fleet.store.list_engines() == ()


async def test_a_message_that_makes_no_sense_is_skipped_and_breaks_nothing(
    fleet: Fleet, sidecars: GrpcSidecars
) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)
    connector.say(connector_pb2.AttachRequest(offer=connector_pb2.LeaseOffer()))
    connector.say(connector_pb2.AttachRequest())
    connector.say(connector_pb2.AttachRequest(remote_pin=connector_pb2.RemotePin(call_id=1)))
    connector.grant(make_grant(1))
    assert isinstance(await sidecars.pin(sidecar.address, make_ask(1), 1.0, 5.0), Pinned)


async def test_a_socket_that_a_killed_sidecar_left_is_replaced(fleet: Fleet) -> None:
    left = fleet.tmp_path / "s0" / "sidecar.sock"
    left.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(left))
    await fleet.connector(await fleet.sidecar())
    assert len(await fleet.store.list_engines()) == 1


async def test_a_sidecar_that_stops_leaves_the_socket_of_the_one_that_took_its_place(fleet: Fleet) -> None:
    first = await fleet.sidecar()
    await fleet.connector(first)
    second = await fleet.sidecar(socket_dir=first.socket_path.parent)
    await first.stop()
    await fleet.connector(second, make_facts("decode-2"))
    assert "decode-2" in {engine.holder.engine_id for engine in await fleet.store.list_engines()}


async def test_a_sidecar_that_stops_leaves_nothing_in_its_directory(fleet: Fleet) -> None:
    sidecar = await fleet.sidecar()
    assert [each.name for each in sidecar.socket_path.parent.iterdir()] == ["sidecar.sock"]
    await sidecar.stop()
    assert list(sidecar.socket_path.parent.iterdir()) == []


async def test_a_sidecar_whose_socket_has_no_place_does_not_start(fleet: Fleet) -> None:
    (fleet.tmp_path / "s" / "sidecar.sock").mkdir(parents=True)
    with pytest.raises(InvalidArgument, match=r"sidecar\.sock"):
        await fleet.sidecar(socket_dir=fleet.tmp_path / "s")
