"""Serves `RegistryService`: convert, ask, convert."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from kvlease.core.errors import InvalidArgument
from kvlease.core.lease import MissReason
from kvlease.registry.registry import Registry
from kvlease.registry.renewals import EngineDelta, Heartbeat, PendingBeat
from kvlease.store.port import Batch, Change, Item
from kvlease.v1 import registry_pb2, registry_pb2_grpc
from kvlease.wire.engines import engine_to_wire, misses_to_wire
from kvlease.wire.leases import lease_to_wire, outcome_to_wire, pin_from_wire
from kvlease.wire.values import (
    duration_from_wire,
    holder_from_wire,
    lease_id_from_wire,
    miss_to_wire,
    text_from_wire,
)

CHANGES_MAX = 1000
"""Changes of one watch message; the end of an engine changes all its leases at once."""

BEATS_MAX = 16
"""Heartbeats of one stream whose holders have not answered; past that the next ones are not read yet."""


class RegistryServicer(registry_pb2_grpc.RegistryServiceServicer):
    """The gRPC face of a `Registry`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._streams: set[asyncio.Task[Any]] = set()
        self._stopping = False

    def end_streams(self) -> None:
        """Ends watches and heartbeats, which never end by themselves; their callers find another replica."""
        self._stopping = True
        for stream in self._streams:
            stream.cancel()

    async def ListEngines(
        self, request: registry_pb2.ListEnginesRequest, context: Any
    ) -> registry_pb2.ListEnginesResponse:
        """Every registered engine."""
        engines = await self._registry.list_engines()
        return registry_pb2.ListEnginesResponse(engines=[engine_to_wire(engine) for engine in engines])

    async def WatchEngines(self, request: registry_pb2.WatchEnginesRequest, context: Any) -> None:
        """First a snapshot, then every change."""
        message = registry_pb2.WatchEnginesResponse
        async with self._stream(context), self._registry.watch_engines() as batches:
            async for batch in batches:
                for snapshot, part in parts_of(batch):
                    changes = [
                        message.Change(engine=engine_to_wire(change.item), gone=change.gone)
                        for change in part
                    ]
                    await context.write(message(snapshot=snapshot, changes=changes))

    async def GetLease(
        self, request: registry_pb2.GetLeaseRequest, context: Any
    ) -> registry_pb2.GetLeaseResponse:
        """The record of a lease, or why there is none."""
        found = await self._registry.get_lease(lease_id_from_wire(request.lease_id))
        if isinstance(found, MissReason):
            return registry_pb2.GetLeaseResponse(miss=miss_to_wire(found))
        return registry_pb2.GetLeaseResponse(lease=lease_to_wire(found))

    async def ListLeases(
        self, request: registry_pb2.ListLeasesRequest, context: Any
    ) -> registry_pb2.ListLeasesResponse:
        """Every recorded lease of an engine and of a tenant; empty: of any."""
        leases = await self._registry.list_leases(request.engine_id, request.tenant)
        return registry_pb2.ListLeasesResponse(leases=[lease_to_wire(lease) for lease in leases])

    async def WatchLeases(self, request: registry_pb2.WatchLeasesRequest, context: Any) -> None:
        """First a snapshot, then every change."""
        message = registry_pb2.WatchLeasesResponse
        async with self._stream(context), self._registry.watch_leases() as batches:
            async for batch in batches:
                for snapshot, part in parts_of(batch):
                    changes = [
                        message.Change(lease=lease_to_wire(change.item), gone=change.gone) for change in part
                    ]
                    await context.write(message(snapshot=snapshot, changes=changes))

    async def PinLease(
        self, request: registry_pb2.PinLeaseRequest, context: Any
    ) -> registry_pb2.PinLeaseResponse:
        """Pins at the holder: a reservation, a read part, or both."""
        ask, wait_for_offer_s = pin_from_wire(request.pin)
        outcome = await self._registry.pin(ask, wait_for_offer_s)
        return registry_pb2.PinLeaseResponse(result=outcome_to_wire(outcome))

    async def UnpinLease(
        self, request: registry_pb2.UnpinLeaseRequest, context: Any
    ) -> registry_pb2.UnpinLeaseResponse:
        """Ends a pin; idempotent."""
        await self._registry.unpin(
            holder_from_wire(request.holder),
            lease_id_from_wire(request.lease_id),
            text_from_wire(request.pin_id, "pin_id"),
        )
        return registry_pb2.UnpinLeaseResponse()

    async def RenewLeases(
        self, request_iterator: AsyncIterator[registry_pb2.RenewLeasesRequest], context: Any
    ) -> None:
        """Heartbeats of one router, answered in turn, each when its holders have answered."""
        session = self._registry.open_session()
        pending: asyncio.Queue[PendingBeat | None] = asyncio.Queue(BEATS_MAX)
        async with self._stream(context):
            writer = asyncio.create_task(_write_acks(pending, context))
            try:
                async for request in request_iterator:
                    await pending.put(self._registry.renew(session, _heartbeat(request)))
                await pending.put(None)
                await writer
            finally:
                writer.cancel()

    async def ReleaseLease(
        self, request: registry_pb2.ReleaseLeaseRequest, context: Any
    ) -> registry_pb2.ReleaseLeaseResponse:
        """Ends a lease for its tenant; idempotent."""
        miss = await self._registry.release(
            lease_id_from_wire(request.lease_id), request.engine_id, request.tenant
        )
        return registry_pb2.ReleaseLeaseResponse(miss=miss_to_wire(miss))

    async def DrainEngine(
        self, request: registry_pb2.DrainEngineRequest, context: Any
    ) -> registry_pb2.DrainEngineResponse:
        """Keeps new turns away from an engine, or lets them come again; idempotent."""
        await self._registry.drain(text_from_wire(request.engine_id, "engine_id"), undo=request.undo)
        return registry_pb2.DrainEngineResponse()

    @asynccontextmanager
    async def _stream(self, context: Any) -> AsyncGenerator[None, None]:
        """A handler that lasts as long as its caller wants, or until the registry stops."""
        task = asyncio.current_task()
        assert task is not None
        self._streams.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._stopping:
                raise
            task.uncancel()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the registry stops")
        finally:
            self._streams.discard(task)


async def _write_acks(pending: "asyncio.Queue[PendingBeat | None]", context: Any) -> None:
    while (beat := await pending.get()) is not None:
        ack = await beat.ack()
        await context.write(
            registry_pb2.RenewLeasesResponse(
                sequence=ack.sequence, misses=misses_to_wire(ack.misses), resync=ack.resync
            )
        )


def parts_of(batch: Batch[Item]) -> Iterator[tuple[bool, tuple[Change[Item], ...]]]:
    """The messages of one batch: only the first one of a snapshot replaces what the watcher knew."""
    changes = batch.changes
    yield batch.snapshot, changes[:CHANGES_MAX]
    for start in range(CHANGES_MAX, len(changes), CHANGES_MAX):
        yield False, changes[start : start + CHANGES_MAX]


def _heartbeat(request: registry_pb2.RenewLeasesRequest) -> Heartbeat:
    if request.sequence == 0:
        raise InvalidArgument("the sequence of a heartbeat begins at 1")
    return Heartbeat(
        session=text_from_wire(request.session, "session"),
        epoch=request.epoch,
        sequence=request.sequence,
        full=request.full,
        engines=tuple(_delta(engine) for engine in request.engines),
        duration_s=duration_from_wire(request.duration),
        reservation_s=duration_from_wire(request.reservation),
    )


def _delta(message: registry_pb2.EngineRenewals) -> EngineDelta:
    return EngineDelta(
        engine_id=text_from_wire(message.engine_id, "engine_id"),
        added_lease_ids=tuple(lease_id_from_wire(lease_id) for lease_id in message.added_lease_ids),
        dropped_lease_ids=tuple(message.dropped_lease_ids),
        added_pin_ids=tuple(message.added_pin_ids),
        dropped_pin_ids=tuple(message.dropped_pin_ids),
    )
