"""Asks sidecars over gRPC; the transport of the registry and of sidecars among themselves."""

from collections.abc import Awaitable, Sequence
from typing import TypeVar

import grpc.aio

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import HolderGauges, PinOutcome
from kvlease.runtime.grpc_client import Channels
from kvlease.runtime.identity import Identity
from kvlease.runtime.telemetry import NO_TELEMETRY, Telemetry
from kvlease.runtime.tls import Tls
from kvlease.v1 import sidecar_pb2, sidecar_pb2_grpc
from kvlease.wire.engines import misses_from_wire
from kvlease.wire.errors import error_from_rpc
from kvlease.wire.gauges import gauges_from_wire
from kvlease.wire.leases import outcome_from_wire, pin_to_wire
from kvlease.wire.values import duration_to_wire, holder_to_wire, miss_from_wire

Response = TypeVar("Response")


class GrpcSidecars:
    """Sidecars by address. A silent one is a `HolderUnreachable` after the call's deadline."""

    def __init__(self, telemetry: Telemetry = NO_TELEMETRY, tls: Tls | None = None) -> None:
        self._channels = Channels(Identity.SIDECAR, telemetry, tls)

    async def pin(self, address: str, ask: PinAsk, wait_for_offer_s: float, deadline_s: float) -> PinOutcome:
        """Asks for a pin on an engine of the sidecar at `host:port`; the wait for an offer comes on top."""
        stub = await self._stub(address)
        request = sidecar_pb2.PinRequest(pin=pin_to_wire(ask, wait_for_offer_s))
        response = await _heard(stub.Pin(request, timeout=deadline_s + wait_for_offer_s))
        return outcome_from_wire(response.result)

    async def unpin(
        self, address: str, holder: Holder, lease_id: int, pin_id: str, deadline_s: float
    ) -> None:
        """Ends a pin there; idempotent."""
        stub = await self._stub(address)
        request = sidecar_pb2.UnpinRequest(holder=holder_to_wire(holder), lease_id=lease_id, pin_id=pin_id)
        await _heard(stub.Unpin(request, timeout=deadline_s))

    async def renew(
        self,
        address: str,
        engine_id: str,
        lease_ids: Sequence[int],
        duration_s: float,
        pin_ids: Sequence[str],
        reservation_s: float,
        deadline_s: float,
    ) -> dict[int, MissReason]:
        """Renews leases and reservations of one engine there. The leases that could not be renewed."""
        stub = await self._stub(address)
        request = sidecar_pb2.RenewRequest(
            engine_id=engine_id,
            lease_ids=lease_ids,
            duration=duration_to_wire(duration_s),
            pin_ids=pin_ids,
            reservation=duration_to_wire(reservation_s),
        )
        response = await _heard(stub.Renew(request, timeout=deadline_s))
        return misses_from_wire(response.misses)

    async def release(
        self, address: str, engine_id: str, lease_id: int, tenant: str, deadline_s: float, *, superseded: bool
    ) -> MissReason | None:
        """Ends a lease there; idempotent. None, or what it was already."""
        stub = await self._stub(address)
        request = sidecar_pb2.ReleaseRequest(
            engine_id=engine_id, lease_id=lease_id, superseded=superseded, tenant=tenant
        )
        response = await _heard(stub.Release(request, timeout=deadline_s))
        return miss_from_wire(response.miss)

    async def read_gauges(self, address: str, engine_id: str, deadline_s: float) -> HolderGauges:
        """The gauges of an engine there."""
        stub = await self._stub(address)
        request = sidecar_pb2.ReadGaugesRequest(engine_id=engine_id)
        response = await _heard(stub.ReadGauges(request, timeout=deadline_s))
        return gauges_from_wire(response.gauges)

    async def drain(self, address: str, engine_id: str, deadline_s: float, *, undo: bool) -> None:
        """Keeps new turns away from an engine there, or lets them come again; idempotent."""
        stub = await self._stub(address)
        await _heard(stub.Drain(sidecar_pb2.DrainRequest(engine_id=engine_id, undo=undo), timeout=deadline_s))

    async def close(self) -> None:
        """Closes every channel."""
        await self._channels.close()

    async def _stub(self, address: str) -> sidecar_pb2_grpc.SidecarServiceStub:
        return sidecar_pb2_grpc.SidecarServiceStub(await self._channels.get(address))


async def _heard(call: Awaitable[Response]) -> Response:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
