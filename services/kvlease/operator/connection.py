"""The ways to the processes of a fleet, in domain types; a silent one is `HolderUnreachable` with its address."""

from argparse import Namespace
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc.aio

from kvlease.core.errors import HolderUnreachable, KvleaseError, UnknownEngine
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine, HolderGauges, LeaseRecord
from kvlease.operator.command import Exit, OperatorError
from kvlease.runtime.grpc_client import Channels
from kvlease.runtime.identity import Identity
from kvlease.runtime.sidecars import GrpcSidecars
from kvlease.runtime.telemetry import NO_TELEMETRY
from kvlease.runtime.tls import Tls
from kvlease.store.port import Batch, Change
from kvlease.v1 import registry_pb2, registry_pb2_grpc
from kvlease.wire.engines import engine_from_wire
from kvlease.wire.errors import error_from_trailers
from kvlease.wire.leases import lease_from_wire
from kvlease.wire.values import miss_from_wire

Answer = TypeVar("Answer")


class RegistryClient:
    """One registry. Every call ends within `timeout_s`; watches last until they are left."""

    def __init__(self, channel: grpc.aio.Channel, address: str, timeout_s: float) -> None:
        self._stub = registry_pb2_grpc.RegistryServiceStub(channel)
        self._peer = f"the registry at {address}"
        self._timeout_s = timeout_s

    async def list_engines(self) -> tuple[Engine, ...]:
        """Every registered engine."""
        call = self._stub.ListEngines(registry_pb2.ListEnginesRequest(), timeout=self._timeout_s)
        answer = await heard(call, self._peer)
        return tuple(engine_from_wire(engine) for engine in answer.engines)

    async def find_engine(self, engine_id: str) -> Engine:
        """The engine that is registered under an id.

        Raises:
            UnknownEngine: none is.
        """
        for engine in await self.list_engines():
            if engine.holder.engine_id == engine_id:
                return engine
        raise UnknownEngine(f"engine {engine_id} is not registered")

    async def list_leases(self, engine_id: str = "", tenant: str = "") -> tuple[LeaseRecord, ...]:
        """Every recorded lease of an engine and of a tenant; empty: of any."""
        request = registry_pb2.ListLeasesRequest(engine_id=engine_id, tenant=tenant)
        answer = await heard(self._stub.ListLeases(request, timeout=self._timeout_s), self._peer)
        return tuple(lease_from_wire(lease) for lease in answer.leases)

    async def get_lease(self, lease_id: int) -> LeaseRecord | MissReason:
        """The record of a lease, or why there is none."""
        request = registry_pb2.GetLeaseRequest(lease_id=lease_id)
        answer = await heard(self._stub.GetLease(request, timeout=self._timeout_s), self._peer)
        if answer.HasField("lease"):
            return lease_from_wire(answer.lease)
        return miss_from_wire(answer.miss) or MissReason.UNKNOWN

    async def release(self, lease_id: int, engine_id: str) -> MissReason | None:
        """Ends a lease at its holder, as an operator. None, or what it was already."""
        request = registry_pb2.ReleaseLeaseRequest(lease_id=lease_id, engine_id=engine_id)
        answer = await heard(self._stub.ReleaseLease(request, timeout=self._timeout_s), self._peer)
        return miss_from_wire(answer.miss)

    async def drain(self, engine_id: str, *, undo: bool) -> None:
        """Keeps new turns away from an engine, or lets them come again.

        Raises:
            UnknownEngine: no such engine is registered.
        """
        request = registry_pb2.DrainEngineRequest(engine_id=engine_id, undo=undo)
        await heard(self._stub.DrainEngine(request, timeout=self._timeout_s), self._peer)

    @asynccontextmanager
    async def watch_leases(self) -> AsyncGenerator[AsyncIterator[Batch[LeaseRecord]], None]:
        """First a snapshot, then every change."""
        call: Any = self._stub.WatchLeases(registry_pb2.WatchLeasesRequest())
        try:
            yield self._batches(call)
        finally:
            call.cancel()

    async def _batches(self, call: Any) -> AsyncIterator[Batch[LeaseRecord]]:
        try:
            async for message in call:
                changes = tuple(
                    Change(lease_from_wire(change.lease), gone=change.gone) for change in message.changes
                )
                yield Batch(changes, snapshot=message.snapshot)
        except grpc.aio.AioRpcError as error:
            raise _named(error, self._peer) from error


@dataclass(frozen=True, slots=True)
class Fleet:
    """The ways that a command may need; channels open when they are first used."""

    channels: dict[Identity, Channels]
    sidecars: GrpcSidecars
    tls: Tls | None
    timeout_s: float

    async def channel(self, peer: Identity, address: str) -> grpc.aio.Channel:
        """The channel to a process at `host:port`."""
        return await self.channels[peer].get(address)

    async def registry(self, address: str) -> RegistryClient:
        """A registry at `host:port`."""
        channel = await self.channel(Identity.REGISTRY, address)
        return RegistryClient(channel, address, self.timeout_s)

    async def read_gauges(self, engine: Engine) -> HolderGauges:
        """An engine's blocks and counters, as its holder tells its sidecar."""
        return await self.sidecars.read_gauges(
            engine.sidecar_address, engine.holder.engine_id, self.timeout_s
        )


@asynccontextmanager
async def fleet(arguments: Namespace) -> AsyncGenerator[Fleet, None]:
    """The ways that the common flags allow, closed in the end.

    Raises:
        InvalidArgument: the certificates cannot be used.
    """
    tls = Tls(arguments.tls_dir) if arguments.tls_dir else None
    channels = {identity: Channels(identity, NO_TELEMETRY, tls) for identity in Identity}
    sidecars = GrpcSidecars(NO_TELEMETRY, tls)
    try:
        yield Fleet(channels, sidecars, tls, arguments.timeout_s)
    finally:
        await sidecars.close()
        for each in channels.values():
            await each.close()


async def heard(call: Awaitable[Answer], peer: str) -> Answer:
    """The answer of a call.

    Raises:
        HolderUnreachable: `peer` did not answer.
        KvleaseError: it refused the call.
        OperatorError: it does not serve this call.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise _named(error, peer) from error


def _named(error: grpc.aio.AioRpcError, peer: str) -> KvleaseError | OperatorError:
    """What a peer said was wrong, else that it does not answer; gRPC's own words are long and name no peer."""
    trailers = [(str(key), value) for key, value in error.trailing_metadata() or ()]
    said = error_from_trailers(trailers)
    if said is not None:
        return said
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return HolderUnreachable(f"{peer} does not answer")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        message = (
            f"{peer} answers, but does not serve this: it is another kind of process, or an older version"
        )
        return OperatorError(message, Exit.PROBLEM)
    return HolderUnreachable(f"{peer} answers {error.code().name}: {error.details()}")
