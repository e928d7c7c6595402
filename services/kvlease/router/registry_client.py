"""The registry over gRPC, in domain types."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
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
from kvlease.wire.errors import error_from_rpc, error_from_trailers
from kvlease.wire.leases import lease_from_wire, outcome_from_wire, pin_to_wire
from kvlease.wire.values import duration_to_wire, holder_to_wire, miss_from_wire

log = logging.getLogger(__name__)


class Replicas:
    """Which of several equal registries is asked: the same one until it fails, then the next.

    Args:
        addresses: host:port of each, at least one.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = deque(addresses)

    @property
    def current(self) -> str:
        """The one to ask."""
        return self._addresses[0]

    def leave(self, address: str) -> bool:
        """A replica failed. True when there is another one to ask; calls fail together, so it is left once."""
        if address == self.current and len(self._addresses) > 1:
            self._addresses.rotate(-1)
            log.warning("registry left for another", extra={"left": address, "asked": self.current})
        return address != self.current


class GrpcRegistry:
    """A `RegistryPort` over one channel, or over the next replica's once that one's registry fails.

    Args:
        addresses: host:port of each replica; any answers any call.
        session: random id of this router's heartbeats.
        call_timeout_s: of every unary call; an offer that is waited for comes on top.
    """

    def __init__(
        self,
        channels: Channels,
        addresses: Sequence[str],
        session: str,
        policy: RenewalPolicy,
        call_timeout_s: float,
    ) -> None:
        self._channels = channels
        self._replicas = Replicas(addresses)
        self._session = session
        self._policy = policy
        self._call_timeout_s = call_timeout_s

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """Takes a pin at the holder; UNREACHABLE when nobody answered in time."""
        message = registry_pb2.PinLeaseRequest(pin=pin_to_wire(ask, wait_for_offer_s))
        try:
            answer = await self._ask("PinLease", message, self._call_timeout_s + wait_for_offer_s)
            return outcome_from_wire(answer.result)
        except (grpc.aio.AioRpcError, InvalidArgument):
            return MissReason.UNREACHABLE

    async def unpin(self, holder: Holder, lease_id: int, pin_id: str) -> None:
        """Ends a pin; best effort, idempotent."""
        message = registry_pb2.UnpinLeaseRequest(
            holder=holder_to_wire(holder), lease_id=lease_id, pin_id=pin_id
        )
        try:
            await self._ask("UnpinLease", message, self._call_timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from error

    async def release(self, lease_id: int, engine_id: str, tenant: str) -> MissReason | None:
        """Releases a lease; None when this call released it."""
        message = registry_pb2.ReleaseLeaseRequest(lease_id=lease_id, engine_id=engine_id, tenant=tenant)
        try:
            answer = await self._ask("ReleaseLease", message, self._call_timeout_s)
        except grpc.aio.AioRpcError:
            return MissReason.UNREACHABLE
        return miss_from_wire(answer.miss)

    @asynccontextmanager
    async def watch_engines(self) -> AsyncGenerator[AsyncIterator[Batch[Engine]], None]:
        """First a snapshot, then every change."""
        request = registry_pb2.WatchEnginesRequest()
        async with self._stream("WatchEngines", request) as messages:
            yield _engine_batches(messages)

    @asynccontextmanager
    async def watch_leases(self) -> AsyncGenerator[AsyncIterator[Batch[LeaseRecord]], None]:
        """First a snapshot, then every change."""
        request = registry_pb2.WatchLeasesRequest()
        async with self._stream("WatchLeases", request) as messages:
            yield _lease_batches(messages)

    @asynccontextmanager
    async def renew(self) -> AsyncGenerator[RenewalStream, None]:
        """Opens a stream of heartbeats. Left with an error, another replica gets the next one."""
        address = self._replicas.current
        call = (await self._stub(address)).RenewLeases()
        try:
            yield _GrpcRenewals(call, self._session, self._policy, self._call_timeout_s)
        except HolderUnreachable:
            self._replicas.leave(address)
            raise
        finally:
            call.cancel()

    async def _ask(self, method: str, message: Any, timeout_s: float) -> Any:
        """One unary call, all of which are idempotent; once more where the replica cannot be reached.

        One that takes the call and is silent has used up the time; the next call goes elsewhere.
        """
        address = self._replicas.current
        try:
            return await getattr(await self._stub(address), method)(message, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            trailers = [(str(key), value) for key, value in error.trailing_metadata() or ()]
            if error_from_trailers(trailers) is not None:
                raise  # an answer: another replica would give the same
            if not self._replicas.leave(address) or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
        stub = await self._stub(self._replicas.current)
        return await getattr(stub, method)(message, timeout=timeout_s)

    @asynccontextmanager
    async def _stream(self, method: str, message: Any) -> AsyncGenerator[AsyncIterator[Any], None]:
        """The messages of a watch, from one replica."""
        address = self._replicas.current
        call = getattr(await self._stub(address), method)(message)
        try:
            yield _messages(call)
        except HolderUnreachable:
            self._replicas.leave(address)
            raise
        finally:
            call.cancel()

    async def _stub(self, address: str) -> Any:
        channel = await self._channels.get(address)
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


async def _engine_batches(messages: AsyncIterator[Any]) -> AsyncIterator[Batch[Engine]]:
    async for message in messages:
        changes = tuple(
            Change(engine_from_wire(change.engine), gone=change.gone) for change in message.changes
        )
        yield Batch(changes, snapshot=message.snapshot)


async def _lease_batches(messages: AsyncIterator[Any]) -> AsyncIterator[Batch[LeaseRecord]]:
    async for message in messages:
        changes = tuple(Change(lease_from_wire(change.lease), gone=change.gone) for change in message.changes)
        yield Batch(changes, snapshot=message.snapshot)
