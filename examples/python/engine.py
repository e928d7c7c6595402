"""The engine's side: a table of one lease, attached to a sidecar as a vLLM connector is."""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from kvlease.v1 import connector_pb2, connector_pb2_grpc, lease_pb2

BLOCK_SIZE = 16
PROTOCOL_VERSION = 1
PROVISIONAL_S = 6


class Engine:
    """Keeps one lease and answers for it. What the registry knows of it is only a copy."""

    def __init__(self, engine_id: str, boot_id: str) -> None:
        self.holder = lease_pb2.Holder(engine_id=engine_id, boot_id=boot_id, epoch=1)
        self._layout = lease_pb2.KvLayout(
            block_size=BLOCK_SIZE,
            dtype="float32",
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            block_bytes=4096,
            layout_hash="example",
        )
        self._lease: lease_pb2.Lease | None = None
        self._ends_s = 0.0
        self._pins: set[str] = set()
        self._outbox: asyncio.Queue[connector_pb2.AttachRequest] = asyncio.Queue()

    async def attach(self, channel: grpc.aio.Channel) -> "asyncio.Task[None]":
        """Registers the engine: it stays registered for as long as the returned task runs."""
        hello = connector_pb2.ConnectorHello(
            protocol_version=PROTOCOL_VERSION,
            holder=self.holder,
            model="example",
            layout=self._layout,
            total_blocks=64,
            prefix_caching=True,
            retain=True,
        )
        self._outbox.put_nowait(connector_pb2.AttachRequest(hello=hello))
        responses = aiter(connector_pb2_grpc.ConnectorServiceStub(channel).Attach(self._requests()))
        first = await asyncio.wait_for(anext(responses), timeout=5)
        if first.hello.refusal:
            raise RuntimeError(f"the sidecar refused the engine: {first.hello.refusal}")
        return asyncio.create_task(self._serve(responses))

    def grant(self, lease_id: int, tenant: str) -> None:
        """Grants a lease. It is provisional, and not recorded, until it is renewed for the first time."""
        self._lease = lease_pb2.Lease(
            lease_id=lease_id,
            kind=lease_pb2.LEASE_KIND_CONVERSATION,
            state=lease_pb2.LEASE_STATE_HELD,
            holder=self.holder,
            tenant=tenant,
            conversation_key=lease_id.to_bytes(16, "big"),
            tokens=2 * BLOCK_SIZE,
            model="example",
            layout_hash=self._layout.layout_hash,
        )
        self._ends_s = time.monotonic() + PROVISIONAL_S
        offer = connector_pb2.LeaseOffer(
            lease=self._lease, remaining=Duration(seconds=PROVISIONAL_S), provisional=True
        )
        self._outbox.put_nowait(connector_pb2.AttachRequest(offer=offer))

    async def _requests(self) -> AsyncIterator[connector_pb2.AttachRequest]:
        while True:
            yield await self._outbox.get()

    async def _serve(self, responses: AsyncIterator[connector_pb2.AttachResponse]) -> None:
        async for message in responses:
            match message.WhichOneof("message"):
                case "pin":
                    result = self._pin(message.pin.pin)
                    reply = connector_pb2.PinReply(call_id=message.pin.call_id, result=result)
                    self._outbox.put_nowait(connector_pb2.AttachRequest(pin_reply=reply))
                case "unpin":
                    self._pins.discard(message.unpin.pin_id)
                case "renew":
                    self._renew(message.renew)
                case "release":
                    self._release(message.release)
                case "read_counters":
                    gauges = connector_pb2.HolderGauges(call_id=message.read_counters.call_id)
                    self._outbox.put_nowait(connector_pb2.AttachRequest(gauges=gauges))
                case _:
                    pass  # An order of eviction means nothing to a table of one lease.

    def _miss(self, lease_id: int) -> lease_pb2.MissReason:
        if self._lease is None or self._lease.lease_id != lease_id:
            return lease_pb2.MISS_REASON_UNKNOWN
        if not self._pins and time.monotonic() >= self._ends_s:
            return lease_pb2.MISS_REASON_EXPIRED
        return lease_pb2.MISS_REASON_UNSPECIFIED

    def _pin(self, pin: lease_pb2.PinRequestSpec) -> lease_pb2.PinResult:
        if pin.holder != self.holder:
            return lease_pb2.PinResult(miss=lease_pb2.MISS_REASON_HOLDER_CHANGED)
        if miss := self._miss(pin.lease_id):
            return lease_pb2.PinResult(miss=miss)
        self._pins.add(pin.pin_id)
        return lease_pb2.PinResult(
            holder=self.holder, tokens=2 * BLOCK_SIZE, layout_hash=self._layout.layout_hash
        )

    def _renew(self, command: connector_pb2.RenewCommand) -> None:
        misses = {lease_id: self._miss(lease_id) for lease_id in command.lease_ids}
        for lease_id, miss in misses.items():
            if not miss:
                self._ends_s = time.monotonic() + command.duration.ToTimedelta().total_seconds()
                self._tell(lease_id, lease_pb2.LEASE_STATE_HELD, confirmed=True)
        reply = connector_pb2.RenewReply(
            sequence=command.sequence,
            misses=[
                connector_pb2.LeaseMiss(lease_id=lease_id, reason=miss)
                for lease_id, miss in misses.items()
                if miss
            ],
        )
        self._outbox.put_nowait(connector_pb2.AttachRequest(renew_reply=reply))

    def _release(self, command: connector_pb2.ReleaseCommand) -> None:
        miss = self._miss(command.lease_id)
        if not miss:
            # Nobody READs from this engine, so the lease need not drain first.
            self._lease = None
            self._pins.clear()
            self._tell(command.lease_id, lease_pb2.LEASE_STATE_RELEASED)
        reply = connector_pb2.ReleaseReply(call_id=command.call_id, miss=miss)
        self._outbox.put_nowait(connector_pb2.AttachRequest(release_reply=reply))

    def _tell(self, lease_id: int, state: lease_pb2.LeaseState, *, confirmed: bool = False) -> None:
        event = connector_pb2.LeaseEvents.Event(lease_id=lease_id, state=state, confirmed=confirmed)
        events = connector_pb2.LeaseEvents(events=[event], holder=self.holder)
        self._outbox.put_nowait(connector_pb2.AttachRequest(events=events))
