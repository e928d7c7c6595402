"""A simulated engine's end of the stream to its sidecar, over a unix socket."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from opentelemetry.trace import Tracer

from kvlease.core.attachment import LeaseOffer
from kvlease.core.errors import InvalidArgument
from kvlease.core.holding import HoldEvent, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, MissReason
from kvlease.core.records import PinOutcome
from kvlease.runtime.grpc_client import CHANNEL_OPTIONS
from kvlease.runtime.telemetry import NO_TELEMETRY, current_traceparent, joined_span, note_pin
from kvlease.sim.engine import SimEngine
from kvlease.v1 import connector_pb2, connector_pb2_grpc
from kvlease.wire import attributes
from kvlease.wire.engines import events_to_wire, hello_to_wire, misses_to_wire, offer_to_wire
from kvlease.wire.gauges import gauges_to_wire
from kvlease.wire.leases import outcome_from_wire, outcome_to_wire, pin_from_wire, pin_to_wire
from kvlease.wire.values import duration_from_wire, holder_to_wire, miss_to_wire

SOCKET_NAME = "sidecar.sock"
OUTBOX_MAX = 4096
"""Messages that wait for the sidecar. When it is full the stream is begun anew, which says everything again."""

PAUSE_S = 0.2
TICK_S = 0.25

_log = logging.getLogger(__name__)

Request = connector_pb2.AttachRequest
Handler = Callable[[Any], Request | None]


class SidecarLink:
    """Attaches an engine to the sidecar in a directory, and comes back when the stream breaks.

    It is the engine's way to other holders (`RemotePins`), and hears of its offers (`OfferListener`).

    Args:
        pin_wait_s: how long a pin's answer is waited for.
        tracer: makes the spans of the holder's answers.
    """

    def __init__(self, socket_dir: str, pin_wait_s: float, tracer: Tracer = NO_TELEMETRY.tracer) -> None:
        self._tracer = tracer
        self._address = f"unix:{Path(socket_dir) / SOCKET_NAME}"
        self._pin_wait_s = pin_wait_s
        self._outbox: asyncio.Queue[Request] | None = None
        self._call: grpc.aio.StreamStreamCall[Request, connector_pb2.AttachResponse] | None = None
        self._pins: dict[int, asyncio.Future[PinOutcome]] = {}
        self._last_call_id = 0

    async def run(self, engine: SimEngine) -> None:
        """Stays attached until cancelled."""
        engine.holder.listen(self)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tick(engine))
            while True:
                try:
                    await self._attach(engine)
                except grpc.aio.AioRpcError as error:
                    _log.debug("not attached: %s", error.code())
                await asyncio.sleep(PAUSE_S)

    # --- RemotePins ---------------------------------------------------------------------------------------

    async def pin(self, ask: PinAsk, sidecar_address: str) -> PinOutcome:
        """Asks for a pin on another engine; UNREACHABLE when nobody answers in time."""
        self._last_call_id += 1
        call_id = self._last_call_id
        future: asyncio.Future[PinOutcome] = asyncio.get_running_loop().create_future()
        self._pins[call_id] = future
        message = connector_pb2.RemotePin(
            call_id=call_id,
            pin=pin_to_wire(ask),
            sidecar_address=sidecar_address,
            traceparent=current_traceparent(),
        )
        try:
            if not self._send(Request(remote_pin=message)):
                return MissReason.UNREACHABLE
            async with asyncio.timeout(self._pin_wait_s):
                return await future
        except TimeoutError:
            return MissReason.UNREACHABLE
        finally:
            del self._pins[call_id]

    def unpin(self, holder: Holder, lease_id: int, pin_id: str, sidecar_address: str) -> None:
        """Ends a pin on another engine, without waiting."""
        message = connector_pb2.RemoteUnpin(
            lease_id=lease_id,
            pin_id=pin_id,
            sidecar_address=sidecar_address,
            holder=holder_to_wire(holder),
        )
        self._send(Request(remote_unpin=message))

    # --- OfferListener ------------------------------------------------------------------------------------

    def offered(self, offer: LeaseOffer) -> None:
        """Tells the sidecar of a hold."""
        self._send(Request(offer=offer_to_wire(offer)))

    def happened(self, holder: Holder, events: Sequence[HoldEvent]) -> None:
        """Tells the sidecar what happened to holds."""
        self._send(Request(events=events_to_wire(holder, events)))

    # --- inside -------------------------------------------------------------------------------------------

    async def _attach(self, engine: SimEngine) -> None:
        """Holds one stream until it ends."""
        async with grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS) as channel:
            outbox: asyncio.Queue[Request] = asyncio.Queue(OUTBOX_MAX)
            outbox.put_nowait(Request(hello=hello_to_wire(engine.facts(), engine.holder.offers())))
            self._outbox = outbox
            call = connector_pb2_grpc.ConnectorServiceStub(channel).Attach(_messages(outbox))
            self._call = call
            try:
                handle = self._handlers(engine)
                async for response in call:
                    kind = response.WhichOneof("message")
                    if kind in handle:
                        self._answer(handle[kind], getattr(response, kind))
            finally:
                self._outbox = self._call = None
                call.cancel()
                for future in self._pins.values():
                    if not future.done():
                        future.set_result(MissReason.UNREACHABLE)

    def _answer(self, handle: Handler, message: object) -> None:
        try:
            reply = handle(message)
        except InvalidArgument as error:
            _log.warning("a message was skipped", extra={"reason": str(error)})
            return
        if reply is not None:
            self._send(reply)

    def _handlers(self, engine: SimEngine) -> dict[str, Handler]:
        return {
            "hello": self._on_hello,
            "pin": lambda message: _on_pin(engine, message, self._tracer),
            "unpin": lambda message: engine.holder.unpin(message.lease_id, message.pin_id),
            "renew": lambda message: _on_renew(engine, message),
            "release": lambda message: _on_release(engine, message),
            "eviction_order": lambda message: engine.holder.set_order(message.lease_ids),
            "remote_pin_reply": self._on_remote_pin_reply,
            "read_counters": lambda message: Request(gauges=gauges_to_wire(engine.gauges(), message.call_id)),
        }

    def _on_hello(self, message: connector_pb2.SidecarHello) -> None:
        if message.refusal:
            _log.error("the sidecar refuses this engine", extra={"reason": message.refusal})
        else:
            _log.info("attached to the sidecar")

    def _on_remote_pin_reply(self, message: connector_pb2.RemotePinReply) -> None:
        future = self._pins.get(message.call_id)
        if future is not None and not future.done():
            future.set_result(outcome_from_wire(message.result))

    def _send(self, message: Request) -> bool:
        if self._outbox is None:
            return False
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            if self._call is not None:
                self._call.cancel()
            return False
        return True

    async def _tick(self, engine: SimEngine) -> None:
        """Lets deadlines pass also while nobody asks, so that the sidecar hears of them."""
        while True:
            await asyncio.sleep(TICK_S)
            engine.holder.give_back()


async def _messages(outbox: asyncio.Queue[Request]) -> AsyncIterator[Request]:
    while True:
        yield await outbox.get()


def _on_pin(engine: SimEngine, message: connector_pb2.PinCommand, tracer: Tracer) -> Request:
    outcome: PinOutcome = MissReason.UNKNOWN
    with suppress(InvalidArgument), joined_span(tracer, attributes.HOLDER_PIN, message.traceparent) as span:
        ask, _ = pin_from_wire(message.pin)
        outcome = engine.holder.pin(ask)
        note_pin(span, ask, outcome)
    reply = connector_pb2.PinReply(call_id=message.call_id, result=outcome_to_wire(outcome))
    return Request(pin_reply=reply)


def _on_renew(engine: SimEngine, message: connector_pb2.RenewCommand) -> Request:
    misses = engine.holder.renew(
        message.lease_ids,
        duration_from_wire(message.duration),
        message.pin_ids,
        duration_from_wire(message.reservation),
    )
    reply = connector_pb2.RenewReply(sequence=message.sequence, misses=misses_to_wire(misses))
    return Request(renew_reply=reply)


def _on_release(engine: SimEngine, message: connector_pb2.ReleaseCommand) -> Request:
    event = LeaseEvent.SUPERSEDE if message.superseded else LeaseEvent.RELEASE
    miss = engine.holder.end(message.lease_id, event)
    reply = connector_pb2.ReleaseReply(call_id=message.call_id, miss=miss_to_wire(miss))
    return Request(release_reply=reply)
