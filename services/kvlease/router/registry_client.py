"""The registry over gRPC, in domain types."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio

from kvlease.core.errors import HolderUnreachable, InvalidArgument
from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine, LeaseRecord, PinOutcome
from kvlease.core.renewal import Beat, RenewalPolicy
from kvlease.router.ports import BeatAck, RenewalStream
from kvlease.runtime.grpc_client import Channels
from kvlease.store.port import Batch, Change
from kvlease.v1 import registry_pb2, registry_pb2_grpc
from kvlease.wire.engines import engine_from_wire, misses_from_wire
from kvlease.wire.errors import error_from_rpc
from kvlease.wire.leases import lease_from_wire, outcome_from_wire, pin_to_wire
from kvlease.wire.values import duration_to_wire, holder_to_wire, miss_from_wire


class GrpcRegistry:
    """A `RegistryPort` over one channel.

    Args:
        session: random id of this router's heartbeats.
        call_timeout_s: of every unary call; an offer that is waited for comes on top.
    """

    def __init__(
        self, channels: Channels, address: str, session: str, policy: RenewalPolicy, call_timeout_s: float
    ) -> None:
        self._channels = channels
        self._address = address
        self._session = session
        self._policy = policy
        self._call_timeout_s = call_timeout_s

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """Takes a pin at the holder; UNREACHABLE when nobody answered in time."""
        message = registry_pb2.PinLeaseRequest(pin=pin_to_wire(ask, wait_for_offer_s))
        try:
            stub = await self._stub()
            answer = await stub.PinLease(message, timeout=self._call_timeout_s + wait_for_offer_s)
            return outcome_from_wire(answer.result)
        except (grpc.aio.AioRpcError, InvalidArgument):
            return MissReason.UNREACHABLE

    async def unpin(self, holder: Holder, lease_id: int, pin_id: str) -> None:
        """Ends a pin; best effort, idempotent."""
        message = registry_pb2.UnpinLeaseRequest(
            holder=holder_to_wire(holder), lease_id=lease_id, pin_id=pin_id
        )
        try:
            await (await self._stub()).UnpinLease(message, timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def release(self, lease_id: int, engine_id: str, tenant: str) -> MissReason | None:
        """Releases a lease; None when this call released it."""
        message = registry_pb2.ReleaseLeaseRequest(lease_id=lease_id, engine_id=engine_id, tenant=tenant)
        try:
            answer = await (await self._stub()).ReleaseLease(message, timeout=self._call_timeout_s)
        except grpc.aio.AioRpcError:
            return MissReason.UNREACHABLE
        return miss_from_wire(answer.miss)

    @asynccontextmanager
    async def watch_engines(self) -> AsyncGenerator[AsyncIterator[Batch[Engine]], None]:
        """First a snapshot, then every change."""
        call = (await self._stub()).WatchEngines(registry_pb2.WatchEnginesRequest())
        try:
            yield _engine_batches(call)
        finally:
            call.cancel()

    @asynccontextmanager
    async def watch_leases(self) -> AsyncGenerator[AsyncIterator[Batch[LeaseRecord]], None]:
        """First a snapshot, then every change."""
        call = (await self._stub()).WatchLeases(registry_pb2.WatchLeasesRequest())
        try:
            yield _lease_batches(call)
        finally:
            call.cancel()

    @asynccontextmanager
    async def renew(self) -> AsyncGenerator[RenewalStream, None]:
        """Opens a stream of heartbeats."""
        call = (await self._stub()).RenewLeases()
        try:
            yield _GrpcRenewals(call, self._session, self._policy, self._call_timeout_s)
        finally:
            call.cancel()

    async def _stub(self) -> Any:
        channel = await self._channels.get(self._address)
        return cast(Any, registry_pb2_grpc).RegistryServiceStub(channel)


class _GrpcRenewals:
    def __init__(self, call: Any, session: str, policy: RenewalPolicy, send_timeout_s: float) -> None:
        self._call = call
        self._session = session
        self._policy = policy
        self._send_timeout_s = send_timeout_s

    async def send(self, beat: Beat) -> None:
        """Sends one beat; a stream that takes it not in time is broken."""
        message = registry_pb2.RenewLeasesRequest(
            session=self._session,
            epoch=beat.epoch,
            sequence=beat.sequence,
            full=beat.full,
            engines=[
                registry_pb2.EngineRenewals(
                    engine_id=engine_id,
                    added_lease_ids=delta.added_lease_ids,
                    dropped_lease_ids=delta.dropped_lease_ids,
                    added_pin_ids=delta.added_pin_ids,
                    dropped_pin_ids=delta.dropped_pin_ids,
                )
                for engine_id, delta in beat.engines.items()
            ],
            duration=duration_to_wire(self._policy.duration_s),
            reservation=duration_to_wire(self._policy.reservation_s),
        )
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error
        except (TimeoutError, asyncio.InvalidStateError) as error:
            raise HolderUnreachable("the registry takes no heartbeat") from error

    async def acks(self) -> AsyncIterator[BeatAck]:
        """The answers, until the stream ends."""
        async for message in _messages(self._call):
            yield BeatAck(message.sequence, misses_from_wire(message.misses), message.resync)


async def _messages(call: Any) -> AsyncIterator[Any]:
    try:
        async for message in call:
            yield message
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error


async def _engine_batches(call: Any) -> AsyncIterator[Batch[Engine]]:
    async for message in _messages(call):
        changes = tuple(
            Change(engine_from_wire(change.engine), gone=change.gone) for change in message.changes
        )
        yield Batch(changes, snapshot=message.snapshot)


async def _lease_batches(call: Any) -> AsyncIterator[Batch[LeaseRecord]]:
    async for message in _messages(call):
        changes = tuple(Change(lease_from_wire(change.lease), gone=change.gone) for change in message.changes)
        yield Batch(changes, snapshot=message.snapshot)
