"""Serves `ConnectorService` on a unix socket: one stream per attached EngineCore."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from opentelemetry.trace import Tracer

from kvlease.core.errors import InvalidArgument, KvleaseError
from kvlease.core.lease import MissReason
from kvlease.runtime.metrics import CallTimer
from kvlease.runtime.telemetry import NO_TELEMETRY, joined_span, note_pin
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.connector_link import StreamConnectorLink
from kvlease.sidecar.engine import AttachedEngine
from kvlease.sidecar.metrics import MeasuredLink
from kvlease.sidecar.sidecar import Sidecar
from kvlease.sidecar.warming import Context as WarmContext
from kvlease.sidecar.warming import Requests as WarmRequests
from kvlease.sidecar.warming import Warming
from kvlease.v1 import connector_pb2, connector_pb2_grpc
from kvlease.wire import attributes
from kvlease.wire.engines import PROTOCOL_VERSION, events_from_wire, hello_from_wire, offer_from_wire
from kvlease.wire.leases import outcome_to_wire, pin_from_wire
from kvlease.wire.values import holder_from_wire, lease_id_from_wire, text_from_wire

REMOTE_CALLS_MAX = 1024
"""Questions to other sidecars in flight for one connector; past that, UNREACHABLE at once."""

_log = logging.getLogger(__name__)

Requests = AsyncIterator[connector_pb2.AttachRequest]
Context = grpc.aio.ServicerContext[connector_pb2.AttachRequest, connector_pb2.AttachResponse]


class _StreamEnded(Exception):
    """The stream to a connector is over."""


class ConnectorServicer(connector_pb2_grpc.ConnectorServiceServicer):
    """Attaches connectors to the sidecar."""

    def __init__(
        self,
        config: SidecarConfig,
        sidecar: Sidecar,
        tracer: Tracer = NO_TELEMETRY.tracer,
        timer: CallTimer | None = None,
        warming: Warming | None = None,
    ) -> None:
        self._config = config
        self._warming = warming
        self._timer = timer
        self._sidecar = sidecar
        self._tracer = tracer

    async def Attach(self, request_iterator: Requests, context: Context) -> None:
        """Serves one connector until its stream breaks or the sidecar closes it."""
        link = StreamConnectorLink(self._config.pin_call_s, self._config.holder_call_s)
        try:
            facts, holds = await self._hello(request_iterator)
            asked = link if self._timer is None else MeasuredLink(link, self._timer)
            async with self._sidecar.attached(facts, holds, asked) as engine:
                hello = connector_pb2.SidecarHello(protocol_version=PROTOCOL_VERSION)
                await context.write(connector_pb2.AttachResponse(hello=hello))
                try:
                    attachment = _Attachment(self._sidecar, engine, link, self._tracer)
                    await attachment.serve(request_iterator, context)
                finally:
                    link.close("the stream ended")
        except KvleaseError as error:
            _log.warning("a connector was refused", extra={"reason": str(error)})
            hello = connector_pb2.SidecarHello(protocol_version=PROTOCOL_VERSION, refusal=str(error))
            await context.write(connector_pb2.AttachResponse(hello=hello))

    async def Warm(self, request_iterator: WarmRequests, context: WarmContext) -> None:
        """Tells one worker of peers until it leaves."""
        if self._warming is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "handshakes are not warmed here")
        await self._warming.serve(request_iterator, context)

    async def _hello(self, requests: Requests) -> Any:
        try:
            async with asyncio.timeout(self._config.hello_s):
                first = await anext(requests)
        except (TimeoutError, StopAsyncIteration) as error:
            raise InvalidArgument("the connector did not say who it is") from error
        if first.WhichOneof("message") != "hello":
            raise InvalidArgument("the first message of a connector is its hello")
        return hello_from_wire(first.hello)


class _Attachment:
    """One attached stream: a reader, a writer, and the connector's questions to other sidecars."""

    def __init__(
        self,
        sidecar: Sidecar,
        engine: AttachedEngine,
        link: StreamConnectorLink,
        tracer: Tracer = NO_TELEMETRY.tracer,
    ) -> None:
        self._sidecar = sidecar
        self._engine = engine
        self._link = link
        self._tracer = tracer
        self._remote_calls: set[asyncio.Task[None]] = set()
        self._last_of_pin: dict[str, asyncio.Task[None]] = {}
        self._handlers: dict[str, Callable[[Any, asyncio.TaskGroup], None]] = {
            "offer": lambda message, _: engine.offer(offer_from_wire(message)),
            "events": lambda message, _: engine.apply_events(*events_from_wire(message)),
            "pin_reply": lambda message, _: link.receive_pin(message),
            "renew_reply": lambda message, _: link.receive_renewal(message),
            "release_reply": lambda message, _: link.receive_release(message),
            "gauges": lambda message, _: link.receive_gauges(message),
            "remote_pin": self._on_remote_pin,
            "remote_unpin": self._on_remote_unpin,
        }

    async def serve(self, requests: Requests, context: Context) -> None:
        """Until the connector ends the stream or the link is closed."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read(requests, group))
                group.create_task(self._write(context))
        except* _StreamEnded:
            pass

    async def _read(self, requests: Requests, group: asyncio.TaskGroup) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            handler = self._handlers.get(kind or "")
            if kind is None or handler is None:
                _log.warning("a message of an unknown kind was skipped", extra={"kind": kind})
                continue
            try:
                handler(getattr(request, kind), group)
            except InvalidArgument as error:
                _log.warning("a message was skipped", extra={"kind": kind, "reason": str(error)})
        raise _StreamEnded

    async def _write(self, context: Context) -> None:
        while (message := await self._link.next_message()) is not None:
            await context.write(message)
        raise _StreamEnded

    def _on_remote_pin(self, message: connector_pb2.RemotePin, group: asyncio.TaskGroup) -> None:
        ask, wait_for_offer_s = pin_from_wire(message.pin)
        address = text_from_wire(message.sidecar_address, "sidecar_address")

        async def answer() -> None:
            with joined_span(self._tracer, attributes.LEASE_PIN, message.traceparent) as span:
                outcome = await self._sidecar.remote_pin(ask, wait_for_offer_s, address)
                note_pin(span, ask, outcome)
            self._answer_remote_pin(message.call_id, outcome_to_wire(outcome))

        if not self._start(ask.pin_id, answer, group):
            self._answer_remote_pin(message.call_id, outcome_to_wire(MissReason.UNREACHABLE))

    def _answer_remote_pin(self, call_id: int, result: Any) -> None:
        reply = connector_pb2.RemotePinReply(call_id=call_id, result=result)
        self._link.send(connector_pb2.AttachResponse(remote_pin_reply=reply))

    def _on_remote_unpin(self, message: connector_pb2.RemoteUnpin, group: asyncio.TaskGroup) -> None:
        holder = holder_from_wire(message.holder)
        lease_id = lease_id_from_wire(message.lease_id)
        address = text_from_wire(message.sidecar_address, "sidecar_address")
        pin_id = text_from_wire(message.pin_id, "pin_id")

        async def tell() -> None:
            await self._sidecar.remote_unpin(holder, lease_id, pin_id, address)

        self._start(pin_id, tell, group)

    def _start(self, pin_id: str, call: Callable[[], Awaitable[None]], group: asyncio.TaskGroup) -> bool:
        """Begins a call once the one before it about the same pin has ended: an UNPIN overtakes no PIN.

        False, and no call, when too many are under way; each of them is bounded in time.
        """
        if len(self._remote_calls) >= REMOTE_CALLS_MAX:
            return False
        before = self._last_of_pin.get(pin_id)

        async def run() -> None:
            if before is not None:
                await asyncio.wait([before])
            await call()

        def forget(ended: "asyncio.Task[None]") -> None:
            self._remote_calls.discard(ended)
            if self._last_of_pin.get(pin_id) is ended:
                del self._last_of_pin[pin_id]

        task = group.create_task(run())
        self._remote_calls.add(task)
        self._last_of_pin[pin_id] = task
        task.add_done_callback(forget)
        return True
