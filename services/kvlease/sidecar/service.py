"""Serves `SidecarService` to registries and other sidecars: convert, ask, convert."""

from typing import Any

from kvlease.core.errors import InvalidArgument
from kvlease.sidecar.sidecar import Sidecar
from kvlease.v1 import sidecar_pb2, sidecar_pb2_grpc
from kvlease.wire.engines import misses_to_wire
from kvlease.wire.gauges import gauges_to_wire
from kvlease.wire.leases import outcome_to_wire, pin_from_wire
from kvlease.wire.values import (
    duration_from_wire,
    holder_from_wire,
    lease_id_from_wire,
    miss_to_wire,
    text_from_wire,
)


class SidecarServicer(sidecar_pb2_grpc.SidecarServiceServicer):
    """The gRPC face of a `Sidecar`."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    async def Pin(self, request: sidecar_pb2.PinRequest, context: Any) -> sidecar_pb2.PinResponse:
        """Asks the holder's table for a pin."""
        ask, wait_for_offer_s = pin_from_wire(request.pin)
        outcome = await self._sidecar.pin(ask, wait_for_offer_s)
        return sidecar_pb2.PinResponse(result=outcome_to_wire(outcome))

    async def Unpin(self, request: sidecar_pb2.UnpinRequest, context: Any) -> sidecar_pb2.UnpinResponse:
        """Ends a pin; idempotent."""
        await self._sidecar.unpin(
            holder_from_wire(request.holder),
            lease_id_from_wire(request.lease_id),
            text_from_wire(request.pin_id, "pin_id"),
        )
        return sidecar_pb2.UnpinResponse()

    async def Renew(self, request: sidecar_pb2.RenewRequest, context: Any) -> sidecar_pb2.RenewResponse:
        """Renews leases and reservations at the holder."""
        duration_s, reservation_s = (
            duration_from_wire(request.duration),
            duration_from_wire(request.reservation),
        )
        if (request.lease_ids and duration_s <= 0) or (request.pin_ids and reservation_s <= 0):
            raise InvalidArgument("leases and pins are renewed for a duration above 0 s")
        misses = await self._sidecar.renew(
            text_from_wire(request.engine_id, "engine_id"),
            [lease_id_from_wire(lease_id) for lease_id in request.lease_ids],
            duration_s,
            list(request.pin_ids),
            reservation_s,
        )
        return sidecar_pb2.RenewResponse(misses=misses_to_wire(misses))

    async def Release(self, request: sidecar_pb2.ReleaseRequest, context: Any) -> sidecar_pb2.ReleaseResponse:
        """Ends a lease; idempotent."""
        miss = await self._sidecar.release(
            text_from_wire(request.engine_id, "engine_id"),
            lease_id_from_wire(request.lease_id),
            request.tenant,
            superseded=request.superseded,
        )
        return sidecar_pb2.ReleaseResponse(miss=miss_to_wire(miss))

    async def ReadGauges(
        self, request: sidecar_pb2.ReadGaugesRequest, context: Any
    ) -> sidecar_pb2.ReadGaugesResponse:
        """The holder's gauges and counters."""
        gauges = await self._sidecar.read_gauges(text_from_wire(request.engine_id, "engine_id"))
        return sidecar_pb2.ReadGaugesResponse(gauges=gauges_to_wire(gauges))

    async def Drain(self, request: sidecar_pb2.DrainRequest, context: Any) -> sidecar_pb2.DrainResponse:
        """Keeps new turns away from an engine, or lets them come again; idempotent."""
        await self._sidecar.drain(text_from_wire(request.engine_id, "engine_id"), undo=request.undo)
        return sidecar_pb2.DrainResponse()
