"""Registers an engine, grants a lease, renews, pins, watches and releases it at a running registry."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from engine import Engine
from kvlease.v1 import lease_pb2, registry_pb2, registry_pb2_grpc

DEADLINE_S = 5
TENANT = "example-tenant"


async def main(registry_address: str, socket: str, service_config: str) -> None:
    lease_id = secrets.randbits(64) | 1
    engine = Engine(f"python-{secrets.token_hex(4)}", secrets.token_hex(8))
    options = [("grpc.service_config", service_config)]
    async with (
        grpc.aio.insecure_channel(f"unix:{socket}") as sidecar,
        grpc.aio.insecure_channel(registry_address, options=options) as channel,
    ):
        registry = registry_pb2_grpc.RegistryServiceStub(channel)
        attached = await engine.attach(sidecar)
        await asyncio.wait_for(registered(registry, engine.holder), DEADLINE_S)
        print("registered", engine.holder.engine_id)
        async with aclosing(changes(registry, lease_id)) as watched:
            engine.grant(lease_id, TENANT)
            print("granted", f"{lease_id:016x}")
            await renew(registry, engine.holder.engine_id, lease_id)
            await asyncio.wait_for(anext(watched), DEADLINE_S)
            print("watched HELD")
            await pin_and_unpin(registry, engine.holder, lease_id)
            await release(registry, engine.holder.engine_id, lease_id)
            await asyncio.wait_for(anext(watched), DEADLINE_S)
            print("watched gone")
        await be_refused(registry)
        attached.cancel()


async def registered(registry: registry_pb2_grpc.RegistryServiceStub, holder: lease_pb2.Holder) -> None:
    """Returns once the registry knows the engine."""
    async for response in registry.WatchEngines(registry_pb2.WatchEnginesRequest()):
        if any(change.engine.holder == holder and not change.gone for change in response.changes):
            return


async def changes(registry: registry_pb2_grpc.RegistryServiceStub, lease_id: int) -> AsyncIterator[bool]:
    """Yields whether a lease is there whenever that changes: True once it is recorded, then False."""
    known = False
    async for response in registry.WatchLeases(registry_pb2.WatchLeasesRequest()):
        for change in response.changes:
            if change.lease.lease_id == lease_id and known is change.gone:
                known = not change.gone
                yield known


async def renew(registry: registry_pb2_grpc.RegistryServiceStub, engine_id: str, lease_id: int) -> None:
    """Sends one heartbeat, which confirms the lease. Live conversations get one every 5 s."""
    beat = registry_pb2.RenewLeasesRequest(
        session=secrets.token_hex(8),
        epoch=1,
        sequence=1,
        full=True,
        engines=[registry_pb2.EngineRenewals(engine_id=engine_id, added_lease_ids=[lease_id])],
        duration=Duration(seconds=20),
        reservation=Duration(seconds=30),
    )
    stream = registry.RenewLeases(iter([beat]), timeout=DEADLINE_S)
    ack = await stream.read()
    if ack is grpc.aio.EOF or ack.sequence != 1 or ack.misses:
        raise RuntimeError(f"the lease was not renewed: {ack}")
    print("renewed", f"{lease_id:016x}")


async def pin_and_unpin(
    registry: registry_pb2_grpc.RegistryServiceStub, holder: lease_pb2.Holder, lease_id: int
) -> None:
    """Pins the lease for a reader, and ends the pin. Both may be repeated: the pin's id names it."""
    pin_id = secrets.token_hex(8)
    pin = lease_pb2.PinRequestSpec(
        lease_id=lease_id, pin_id=pin_id, holder=holder, reservation=Duration(seconds=30), tenant=TENANT
    )
    answer = await registry.PinLease(registry_pb2.PinLeaseRequest(pin=pin), timeout=DEADLINE_S)
    if answer.result.miss:
        # A miss is an answer, not an error: whoever gets it computes the tokens again.
        raise RuntimeError(f"missed: {lease_pb2.MissReason.Name(answer.result.miss)}")
    print("pinned", answer.result.tokens, "tokens")
    unpin = registry_pb2.UnpinLeaseRequest(holder=holder, lease_id=lease_id, pin_id=pin_id)
    await registry.UnpinLease(unpin, timeout=DEADLINE_S)
    print("unpinned")


async def release(registry: registry_pb2_grpc.RegistryServiceStub, engine_id: str, lease_id: int) -> None:
    """Releases the lease for its tenant."""
    request = registry_pb2.ReleaseLeaseRequest(lease_id=lease_id, engine_id=engine_id, tenant=TENANT)
    await registry.ReleaseLease(request, timeout=DEADLINE_S)
    print("released")


async def be_refused(registry: registry_pb2_grpc.RegistryServiceStub) -> None:
    """Asks for what cannot be done, and reads the machine readable reason."""
    request = registry_pb2.DrainEngineRequest(engine_id="nobody")
    try:
        await registry.DrainEngine(request, timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)
        info = error_details_pb2.ErrorInfo()
        for detail in status.details if status is not None else ():
            if detail.Unpack(info):
                print("refused", error.code().name, info.domain, info.reason)


if __name__ == "__main__":
    _, registry_address, socket, service_config_file = sys.argv
    asyncio.run(main(registry_address, socket, Path(service_config_file).read_text()))
