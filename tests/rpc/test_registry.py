"""The registry's API over real gRPC, down to a connector's table and back."""

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvlease.core.errors import InvalidArgument, KvleaseError, NotOwner, StoreUnavailable, UnknownEngine
from kvlease.core.lease import LeaseEvent, MissReason
from kvlease.core.records import EngineRole, Pinned
from kvlease.registry.config import RegistryConfig
from kvlease.registry.server import RegistryServer
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.grpc_server import SERVER_OPTIONS
from kvlease.v1 import registry_pb2 as messages
from kvlease.v1 import registry_pb2_grpc
from kvlease.wire.engines import engine_from_wire, misses_from_wire
from kvlease.wire.errors import error_from_rpc
from kvlease.wire.leases import lease_from_wire, outcome_from_wire, pin_to_wire
from kvlease.wire.values import duration_to_wire, holder_to_wire, miss_from_wire

from .conftest import TENANT, Fleet, make_ask, make_facts, make_grant, until

DEADLINE_S = 30.0


@pytest.fixture
async def registry(fleet: Fleet) -> registry_pb2_grpc.RegistryServiceStub:
    return await fleet.registry()


async def refused(call: Any) -> KvleaseError:
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await call
    return error_from_rpc(refusal.value)


def beat(sequence: int, *, full: bool = False, epoch: int = 1, **ids: Any) -> messages.RenewLeasesRequest:
    engines = [messages.EngineRenewals(engine_id="decode-1", **ids)] if ids else []
    return messages.RenewLeasesRequest(
        session="router-1",
        epoch=epoch,
        sequence=sequence,
        full=full,
        engines=engines,
        duration=duration_to_wire(20.0),
        reservation=duration_to_wire(30.0),
    )


async def answer(call: Any, request: messages.RenewLeasesRequest) -> messages.RenewLeasesResponse:
    await call.write(request)
    response = await asyncio.wait_for(call.read(), DEADLINE_S)
    assert isinstance(response, messages.RenewLeasesResponse)
    return response


async def test_engines_are_listed_and_watched(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    watch = registry.WatchEngines(messages.WatchEnginesRequest())
    empty: Any = await watch.read()
    assert (empty.snapshot, len(empty.changes)) == (True, 0)
    connector = await fleet.connector(await fleet.sidecar(EngineRole.PREFILL))
    listed = await registry.ListEngines(messages.ListEnginesRequest(), timeout=DEADLINE_S)
    assert [engine_from_wire(engine).role for engine in listed.engines] == [EngineRole.PREFILL]
    came: Any = await watch.read()
    assert engine_from_wire(came.changes[0].engine).holder == make_facts().holder
    await connector.detach()
    went: Any = await watch.read()
    assert went.changes[0].gone
    assert engine_from_wire(went.changes[0].engine).holder == make_facts().holder
    watch.cancel()


async def test_a_heartbeat_confirms_a_lease_which_then_is_listed_and_watched(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    connector = await fleet.connector(await fleet.sidecar())
    watch = registry.WatchLeases(messages.WatchLeasesRequest())
    assert (await watch.read()).snapshot  # type: ignore[union-attr]
    connector.grant(make_grant(1))
    session = registry.RenewLeases()
    ack = await answer(session, beat(1, full=True, added_lease_ids=[1]))
    assert (ack.sequence, len(ack.misses), ack.resync) == (1, 0, False)
    seen: Any = await asyncio.wait_for(watch.read(), DEADLINE_S)
    record = lease_from_wire(seen.changes[0].lease)
    assert (record.lease_id, record.tenant) == (1, TENANT)
    found = await registry.GetLease(messages.GetLeaseRequest(lease_id=1), timeout=DEADLINE_S)
    assert lease_from_wire(found.lease) == record
    listed = await registry.ListLeases(messages.ListLeasesRequest(tenant=TENANT), timeout=DEADLINE_S)
    assert [lease.lease_id for lease in listed.leases] == [1]
    await session.done_writing()
    watch.cancel()


async def test_a_lease_without_a_record_is_a_miss(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    found = await registry.GetLease(messages.GetLeaseRequest(lease_id=5), timeout=DEADLINE_S)
    assert miss_from_wire(found.miss) is MissReason.UNKNOWN
    assert not found.HasField("lease")


async def test_a_pin_goes_to_the_holder_and_an_unpin_ends_it(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    connector = await fleet.connector(await fleet.sidecar())
    connector.grant(make_grant(1))
    ask = make_ask(1, reservation_s=30.0)
    request = messages.PinLeaseRequest(pin=pin_to_wire(ask, 0.1))
    outcome = outcome_from_wire((await registry.PinLease(request, timeout=DEADLINE_S)).result)
    assert isinstance(outcome, Pinned)
    assert (outcome.tokens, outcome.blocks) == (64, None)
    assert connector.table.reading_blocks() == 2
    unpin = messages.UnpinLeaseRequest(holder=holder_to_wire(ask.holder), lease_id=1, pin_id="pin-1")
    await registry.UnpinLease(unpin, timeout=DEADLINE_S)

    async def unpinned() -> bool:
        return connector.table.reading_blocks() == 0

    await until(unpinned)


@pytest.mark.parametrize(
    ("boot_id", "miss"),
    [("another-boot", MissReason.HOLDER_CHANGED), ("", MissReason.UNREACHABLE)],
)
async def test_a_pin_at_a_holder_that_is_not_there_is_a_miss(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub, boot_id: str, miss: MissReason
) -> None:
    if boot_id:
        await fleet.connector(await fleet.sidecar(), make_facts(boot_id=boot_id))
    request = messages.PinLeaseRequest(pin=pin_to_wire(make_ask(1)))
    outcome = outcome_from_wire((await registry.PinLease(request, timeout=DEADLINE_S)).result)
    assert outcome is miss


async def test_a_pin_that_makes_no_sense_is_refused_with_its_reason(
    registry: registry_pb2_grpc.RegistryServiceStub,
) -> None:
    error = await refused(registry.PinLease(messages.PinLeaseRequest(), timeout=DEADLINE_S))
    assert isinstance(error, InvalidArgument)


async def test_a_heartbeat_renews_all_that_its_session_keeps_and_reports_what_is_gone(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    connector = await fleet.connector(await fleet.sidecar())
    for lease_id in (1, 2):
        connector.grant(make_grant(lease_id, conversation=bytes([lease_id])))
    session = registry.RenewLeases()
    await answer(session, beat(1, full=True, added_lease_ids=[1, 2]))
    connector.end(2, LeaseEvent.EVICT)
    fleet.clock.advance(15.0)
    ack = await answer(session, beat(2))
    assert misses_from_wire(ack.misses) == {2: MissReason.EVICTED}
    fleet.clock.advance(15.0)
    connector.expire()
    assert connector.table.get(1) is not None
    assert misses_from_wire((await answer(session, beat(3))).misses) == {}
    await session.done_writing()


async def test_a_lease_that_a_session_drops_is_renewed_no_more(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    connector = await fleet.connector(await fleet.sidecar())
    connector.grant(make_grant(1))
    session = registry.RenewLeases()
    await answer(session, beat(1, full=True, added_lease_ids=[1]))
    await answer(session, beat(2, dropped_lease_ids=[1]))
    fleet.clock.advance(21.0)
    await answer(session, beat(3))
    connector.expire()
    assert connector.table.get(1) is None
    await session.done_writing()


async def test_a_heartbeat_renews_the_reservations_of_pins(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    connector = await fleet.connector(await fleet.sidecar())
    connector.grant(make_grant(1))
    request = messages.PinLeaseRequest(pin=pin_to_wire(make_ask(1, reservation_s=30.0), 0.1))
    await registry.PinLease(request, timeout=DEADLINE_S)
    session = registry.RenewLeases()
    fleet.clock.advance(5.0)
    await answer(session, beat(1, full=True, added_lease_ids=[1], added_pin_ids=["pin-1"]))
    fleet.clock.advance(15.0)
    await answer(session, beat(2))
    fleet.clock.advance(19.0)
    connector.expire()
    assert connector.table.lease_of_pin("pin-1") == 1
    await session.done_writing()


async def test_a_stream_that_begins_with_a_delta_is_asked_for_the_full_list(
    registry: registry_pb2_grpc.RegistryServiceStub,
) -> None:
    session = registry.RenewLeases()
    ack = await answer(session, beat(7, added_lease_ids=[1]))
    assert (ack.resync, ack.sequence) == (True, 0)
    ack = await answer(session, beat(8, full=True, epoch=2))
    assert (ack.resync, ack.sequence) == (False, 8)
    await session.done_writing()


async def test_leases_of_an_engine_that_is_gone_are_unreachable_in_the_ack(
    registry: registry_pb2_grpc.RegistryServiceStub,
) -> None:
    session = registry.RenewLeases()
    ack = await answer(session, beat(1, full=True, added_lease_ids=[1]))
    assert ack.sequence == 1
    assert misses_from_wire(ack.misses) == {1: MissReason.UNREACHABLE}
    await session.done_writing()


async def test_only_its_tenant_or_an_operator_releases_a_lease(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    connector = await fleet.connector(await fleet.sidecar())
    connector.grant(make_grant(1))
    session = registry.RenewLeases()
    await answer(session, beat(1, full=True, added_lease_ids=[1]))

    async def recorded() -> bool:
        return await fleet.store.get_lease(1) is not None

    await until(recorded)
    foreign = messages.ReleaseLeaseRequest(lease_id=1, tenant="someone-else")
    assert isinstance(await refused(registry.ReleaseLease(foreign, timeout=DEADLINE_S)), NotOwner)
    assert connector.table.get(1) is not None
    own = messages.ReleaseLeaseRequest(lease_id=1, tenant=TENANT)
    released = await registry.ReleaseLease(own, timeout=DEADLINE_S)
    assert miss_from_wire(released.miss) is None
    assert connector.table.get(1) is None
    await session.done_writing()


async def test_a_release_of_an_unknown_lease_is_a_miss(
    registry: registry_pb2_grpc.RegistryServiceStub,
) -> None:
    released = await registry.ReleaseLease(messages.ReleaseLeaseRequest(lease_id=9), timeout=DEADLINE_S)
    assert miss_from_wire(released.miss) is MissReason.UNKNOWN


async def test_a_store_that_is_down_is_an_error_that_says_when_to_repeat(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    fleet.store.broken = True
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await registry.ListEngines(messages.ListEnginesRequest(), timeout=DEADLINE_S)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    assert isinstance(error_from_rpc(refusal.value), StoreUnavailable)


async def test_health_and_reflection_name_the_service(fleet: Fleet) -> None:
    assert fleet.registry_server is not None
    channel = await fleet.channel(fleet.registry_server.address)
    health: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    checked = await health.Check(health_pb2.HealthCheckRequest(service="kvlease.v1.RegistryService"))
    assert checked.status == health_pb2.HealthCheckResponse.SERVING
    reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
    call = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    listed = await call.read()
    assert "kvlease.v1.RegistryService" in {service.name for service in listed.list_services_response.service}
    call.cancel()


def test_the_policy_admits_clients_that_ping_without_calls() -> None:
    # gRPC's default policy answers the third such ping with GOAWAY; waiting for that takes minutes.
    options = dict(SERVER_OPTIONS)
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.http2.min_ping_interval_without_data_ms"] <= 10_000


async def test_a_registry_that_stops_sends_its_watchers_elsewhere_at_once(fleet: Fleet) -> None:
    config = RegistryConfig(listen="127.0.0.1:0", stop_grace_s=3600.0)
    server = RegistryServer(config, fleet.store, LoopClock())
    await server.start()
    stub = registry_pb2_grpc.RegistryServiceStub(await fleet.channel(server.address))
    watch, session = stub.WatchLeases(messages.WatchLeasesRequest()), stub.RenewLeases()
    await watch.read()
    await answer(session, beat(1, full=True))
    await asyncio.wait_for(server.stop(), 20)
    assert await watch.code() is grpc.StatusCode.UNAVAILABLE
    assert await session.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_silent_holder_delays_no_renewal_of_a_later_heartbeat_elsewhere(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    sidecar = await fleet.sidecar(holder_call_s=1.0)
    connector = await fleet.connector(sidecar)
    silent = await fleet.connector(sidecar, make_facts("decode-2"))
    silent.silent = True
    connector.grant(make_grant(1))
    session = registry.RenewLeases()
    first = beat(1, full=True)
    first.engines.add(engine_id="decode-2", added_lease_ids=[7])
    await session.write(first)
    await session.write(beat(2, added_lease_ids=[1]))

    async def confirmed() -> bool:
        return await fleet.store.get_lease(1) is not None

    await until(confirmed)
    acks: list[Any] = [await session.read(), await session.read()]
    assert [ack.sequence for ack in acks] == [1, 2]
    assert [misses_from_wire(ack.misses) for ack in acks] == 2 * [{7: MissReason.UNREACHABLE}]
    await session.done_writing()


async def test_a_drained_engine_is_registered_so_until_it_is_undone_also_when_it_attaches_again(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    sidecar = await fleet.sidecar()
    connector = await fleet.connector(sidecar)

    async def drains() -> list[bool]:
        listed = await registry.ListEngines(messages.ListEnginesRequest(), timeout=DEADLINE_S)
        return [engine_from_wire(engine).draining for engine in listed.engines]

    async def is_draining() -> bool:
        return await drains() == [True]

    async def is_serving() -> bool:
        return await drains() == [False]

    await registry.DrainEngine(messages.DrainEngineRequest(engine_id="decode-1"), timeout=DEADLINE_S)
    await until(is_draining)
    await connector.detach()
    await connector.attach(sidecar.socket_path)
    await until(is_draining)
    undo = messages.DrainEngineRequest(engine_id="decode-1", undo=True)
    await registry.DrainEngine(undo, timeout=DEADLINE_S)
    await until(is_serving)


async def test_an_engine_that_nobody_registered_cannot_be_drained(
    fleet: Fleet, registry: registry_pb2_grpc.RegistryServiceStub
) -> None:
    call = registry.DrainEngine(messages.DrainEngineRequest(engine_id="nobody"), timeout=DEADLINE_S)
    assert isinstance(await refused(call), UnknownEngine)
