"""What callers are told, as a table: absence is an answer, violation an error with its gRPC code."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, MissReason
from kvlease.core.records import Pinned
from kvlease.registry.config import RegistryConfig
from kvlease.registry.server import RegistryServer
from kvlease.runtime.clock import LoopClock
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.server import SidecarServer
from kvlease.testing.connector import FakeConnector
from kvlease.v1 import registry_pb2 as messages
from kvlease.v1 import registry_pb2_grpc
from kvlease.wire.engines import misses_from_wire
from kvlease.wire.leases import outcome_from_wire, pin_to_wire
from kvlease.wire.values import duration_to_wire, holder_to_wire, miss_from_wire

from .conftest import TENANT, Fleet, make_ask, make_facts, make_grant, until

DEADLINE_S = 30.0
HELD, ENDED, UNKNOWN = 1, 2, 3
OTHER_BOOT = Holder("decode-1", "boot-0", 1)
Stub = registry_pb2_grpc.RegistryServiceStub
Call = Callable[[Stub], Awaitable[object]]


@pytest.fixture
async def registry(fleet: Fleet) -> Stub:
    """One lease that is held and recorded, one that was released; the holder knows both."""
    connector = await fleet.connector(await fleet.sidecar())
    for lease_id in (HELD, ENDED):
        connector.grant(make_grant(lease_id, conversation=bytes([lease_id])))
    stub = await fleet.registry()
    assert await renew(HELD, ENDED)(stub) == {}

    async def recorded() -> bool:
        return len(await fleet.store.list_leases()) == 2

    await until(recorded)
    connector.end(ENDED, LeaseEvent.RELEASE)
    return stub


def pin(lease_id: int, pin_id: str = "pin", tenant: str = TENANT, holder: Holder | None = None) -> Call:
    async def call(registry: Stub) -> object:
        ask = make_ask(lease_id, pin_id)
        spec = pin_to_wire(ask)
        spec.tenant = tenant
        spec.holder.CopyFrom(holder_to_wire(holder or ask.holder))
        answer = await registry.PinLease(messages.PinLeaseRequest(pin=spec), timeout=DEADLINE_S)
        outcome = outcome_from_wire(answer.result)
        return "pinned" if isinstance(outcome, Pinned) else outcome

    return call


def unpin(lease_id: int, pin_id: str = "pin") -> Call:
    async def call(registry: Stub) -> object:
        holder = holder_to_wire(make_ask(lease_id).holder)
        request = messages.UnpinLeaseRequest(holder=holder, lease_id=lease_id, pin_id=pin_id)
        return type(await registry.UnpinLease(request, timeout=DEADLINE_S)).__name__

    return call


def release(lease_id: int, tenant: str = TENANT) -> Call:
    async def call(registry: Stub) -> object:
        request = messages.ReleaseLeaseRequest(lease_id=lease_id, engine_id="decode-1", tenant=tenant)
        answer = await registry.ReleaseLease(request, timeout=DEADLINE_S)
        return miss_from_wire(answer.miss) or "released"

    return call


def renew(*lease_ids: int, sequence: int = 1, duration_s: float = 20.0) -> Call:
    async def call(registry: Stub) -> object:
        stream = registry.RenewLeases()
        ids = messages.EngineRenewals(engine_id="decode-1", added_lease_ids=lease_ids)
        await stream.write(
            messages.RenewLeasesRequest(
                session="router",
                epoch=1,
                sequence=sequence,
                full=True,
                engines=[ids],
                duration=duration_to_wire(duration_s),
                reservation=duration_to_wire(30.0),
            )
        )
        answer: Any = await asyncio.wait_for(stream.read(), DEADLINE_S)
        if answer is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(
                await stream.code(), grpc.aio.Metadata(), grpc.aio.Metadata(), await stream.details()
            )
        await stream.done_writing()
        return misses_from_wire(answer.misses)

    return call


@pytest.mark.parametrize(
    ("calls", "last"),
    [
        pytest.param([pin(HELD), pin(HELD)], "pinned", id="a pin taken twice is one pin"),
        pytest.param([pin(HELD, "a"), pin(HELD, "b")], "pinned", id="two readers pin one lease"),
        pytest.param([pin(ENDED)], MissReason.RELEASED, id="a pin of an ended lease"),
        pytest.param([pin(UNKNOWN)], MissReason.UNKNOWN, id="a pin of an unknown lease"),
        pytest.param([pin(HELD, tenant="other")], MissReason.FORBIDDEN, id="a pin by another tenant"),
        pytest.param(
            [pin(HELD, holder=OTHER_BOOT)], MissReason.HOLDER_CHANGED, id="a pin at an earlier process"
        ),
        pytest.param(
            [pin(HELD), unpin(HELD), unpin(HELD)], "UnpinLeaseResponse", id="an unpin that comes twice"
        ),
        pytest.param([unpin(UNKNOWN)], "UnpinLeaseResponse", id="an unpin of an unknown lease"),
        pytest.param([release(HELD), release(HELD)], MissReason.UNKNOWN, id="a release that comes twice"),
        pytest.param([release(HELD, ""), release(HELD, "")], MissReason.RELEASED, id="an operator's, twice"),
        pytest.param([pin(HELD), release(HELD)], "released", id="a release while a reader reads"),
        pytest.param(
            [pin(HELD), release(HELD), pin(HELD, "b")], MissReason.DRAINING, id="a pin after that release"
        ),
        pytest.param([renew(ENDED)], {ENDED: MissReason.RELEASED}, id="a renewal after the end"),
        pytest.param([renew(UNKNOWN)], {UNKNOWN: MissReason.UNKNOWN}, id="a renewal of an unknown lease"),
        pytest.param(
            [release(HELD), renew(HELD)], {HELD: MissReason.RELEASED}, id="a renewal that lost a race"
        ),
        pytest.param([renew(HELD), release(HELD)], "released", id="a renewal that won it"),
    ],
)
async def test_what_is_not_there_is_an_answer_and_repeating_changes_nothing(
    registry: Stub, calls: list[Call], last: object
) -> None:
    answers = [await call(registry) for call in calls]
    assert answers[-1] == last


async def test_a_lease_that_expired_is_not_renewed(fleet: Fleet, registry: Stub) -> None:
    fleet.clock.advance(21.0)
    assert await renew(HELD)(registry) == {HELD: MissReason.EXPIRED}
    assert await pin(HELD)(registry) is MissReason.EXPIRED


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (release(HELD, "other"), grpc.StatusCode.PERMISSION_DENIED),
        (pin(0), grpc.StatusCode.INVALID_ARGUMENT),
        (pin(HELD, ""), grpc.StatusCode.INVALID_ARGUMENT),
        (release(0), grpc.StatusCode.INVALID_ARGUMENT),
        (renew(HELD, sequence=0), grpc.StatusCode.INVALID_ARGUMENT),
        (renew(HELD, duration_s=0.0), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_violation_is_an_error_with_its_code_and_changes_nothing(
    registry: Stub, call: Call, code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(registry)
    assert refused.value.code() is code
    assert await pin(HELD, "after")(registry) == "pinned"


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_registry_and_sidecar_serve_over_ipv6(fleet: Fleet) -> None:
    registry = RegistryServer(RegistryConfig(listen="[::1]:0", stop_grace_s=0.0), fleet.store, LoopClock())
    sidecar = SidecarServer(
        SidecarConfig(listen="[::1]:0", allow_loopback=True, socket_dir=str(fleet.tmp_path / "v6")),
        fleet.store,
        LoopClock(),
    )
    for server in (registry, sidecar):
        await server.start()
        fleet.stack.push_async_callback(server.stop)
        assert server.address.startswith("[::1]:")
    connector = FakeConnector(make_facts(), fleet.clock)
    await connector.attach(sidecar.socket_path)
    fleet.stack.push_async_callback(connector.detach)
    connector.grant(make_grant(HELD))
    stub = registry_pb2_grpc.RegistryServiceStub(await fleet.channel(registry.address))

    async def pinned() -> bool:
        return await pin(HELD)(stub) == "pinned"

    await until(pinned)
