"""A connector without an engine: a real table of holds, attached over a real socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio

from kvlease.core.attachment import EngineFacts, LeaseOffer, offer_of
from kvlease.core.clock import Clock
from kvlease.core.holding import Grant, HoldLimits, HoldTable, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, MissReason
from kvlease.core.records import BlockList, HolderGauges, Pinned, PinOutcome
from kvlease.runtime.telemetry import NO_TELEMETRY, joined_span, note_pin
from kvlease.v1 import connector_pb2, connector_pb2_grpc
from kvlease.wire import attributes
from kvlease.wire.engines import events_to_wire, hello_to_wire, misses_to_wire, offer_to_wire
from kvlease.wire.gauges import gauges_to_wire
from kvlease.wire.leases import outcome_from_wire, outcome_to_wire, pin_from_wire, pin_to_wire
from kvlease.wire.values import duration_from_wire, holder_to_wire, miss_to_wire

Request, Response = connector_pb2.AttachRequest, connector_pb2.AttachResponse


class ConnectorRefused(Exception):
    """The sidecar refused the engine; the message says why."""


class FakeConnector:
    """Attaches to a sidecar and answers from its table.

    Attributes:
        table: what it holds; survives a detach, as in an engine whose sidecar restarts.
        silent: takes messages but answers none, as an engine that is stopped.
        order: the order of eviction that it was told last.
        pins: questions for pins that it has answered.
        renewals: messages of renewals that it has answered.
        tracer: makes the spans of its answers to pins.
    """

    def __init__(self, facts: EngineFacts, clock: Clock, limits: HoldLimits | None = None) -> None:
        self.facts = facts
        self.table = HoldTable(facts.holder, limits or HoldLimits(reading_blocks_max=1_000))
        self.silent = False
        self.order: tuple[int, ...] = ()
        self.pins = 0
        self.renewals = 0
        self.tracer = NO_TELEMETRY.tracer
        self._clock = clock
        self._channel: grpc.aio.Channel | None = None
        self._outbox: asyncio.Queue[connector_pb2.AttachRequest | None] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._remote: dict[int, asyncio.Future[PinOutcome]] = {}
        self._handlers: dict[str, Callable[[Any], connector_pb2.AttachRequest | None]] = {
            "pin": self._on_pin,
            "unpin": self._on_unpin,
            "renew": self._on_renew,
            "release": self._on_release,
            "eviction_order": self._on_eviction_order,
            "remote_pin_reply": self._on_remote_pin_reply,
            "read_counters": self._on_read_counters,
        }

    async def attach(self, socket_path: Path) -> None:
        """Says hello with everything that it holds, and is attached when the sidecar has answered.

        Raises:
            ConnectorRefused: with the sidecar's reason.
        """
        self._outbox = asyncio.Queue()
        self._channel = grpc.aio.insecure_channel(
            f"unix:{socket_path}", options=(("grpc.use_local_subchannel_pool", 1),)
        )
        stub = connector_pb2_grpc.ConnectorServiceStub(self._channel)
        call = stub.Attach(self._requests(self._outbox))
        hello = await call.read()
        if not isinstance(hello, Response) or hello.hello.refusal:
            await self.detach()
            raise ConnectorRefused(hello.hello.refusal if isinstance(hello, Response) else "no answer")
        self._reader = asyncio.create_task(self._read(call))

    async def detach(self) -> None:
        """Breaks the stream, as the end of the engine process does."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
        self._outbox.put_nowait(None)
        if self._channel is not None:
            await self._channel.close(None)
            self._channel = None

    def say(self, message: connector_pb2.AttachRequest) -> None:
        """Sends a message as it is."""
        self._outbox.put_nowait(message)

    async def ended(self) -> None:
        """Returns when the sidecar has ended the stream."""
        if self._reader is not None:
            await asyncio.wait([self._reader])

    def grant(self, grant: Grant, duration_s: float = 6.0) -> None:
        """Grants a provisional CONVERSATION lease and offers it."""
        self.table.grant(self._clock.now_s(), grant, duration_s, provisional=True)
        self.table.take_events()
        hold = self.table.get(grant.lease_id)
        if hold is not None:
            offer = offer_of(hold, self.table.holder, self._clock.now_s(), self.facts.layout)
            self._outbox.put_nowait(Request(offer=offer_to_wire(offer)))

    def end(self, lease_id: int, event: LeaseEvent) -> None:
        """Ends a lease by itself, as under pressure."""
        self.table.end(self._clock.now_s(), lease_id, event)
        self._tell_events()

    def expire(self) -> None:
        """Lets deadlines pass up to the clock's time."""
        self.table.advance(self._clock.now_s())
        self._tell_events()

    def reset(self) -> None:
        """Resets the cache: every hold is lost, the next epoch begins."""
        self.table.reset(self._clock.now_s())
        self._tell_events()

    async def remote_pin(self, ask: PinAsk, sidecar_address: str, traceparent: str = "") -> PinOutcome:
        """Asks, as a reader, for a pin on another engine."""
        call_id = len(self._remote) + 1
        self._remote[call_id] = asyncio.get_running_loop().create_future()
        message = connector_pb2.RemotePin(
            call_id=call_id, pin=pin_to_wire(ask), sidecar_address=sidecar_address, traceparent=traceparent
        )
        self._outbox.put_nowait(Request(remote_pin=message))
        return await self._remote[call_id]

    def remote_unpin(self, holder: Holder, lease_id: int, pin_id: str, sidecar_address: str) -> None:
        """Ends, as a reader, a pin on another engine."""
        message = connector_pb2.RemoteUnpin(
            lease_id=lease_id,
            pin_id=pin_id,
            sidecar_address=sidecar_address,
            holder=holder_to_wire(holder),
        )
        self._outbox.put_nowait(Request(remote_unpin=message))

    # --- inside -------------------------------------------------------------------------------------------

    async def _requests(
        self, outbox: "asyncio.Queue[connector_pb2.AttachRequest | None]"
    ) -> AsyncIterator[connector_pb2.AttachRequest]:
        yield Request(hello=hello_to_wire(self.facts, self._offers()))
        while (message := await outbox.get()) is not None:
            yield message

    def _offers(self) -> list[LeaseOffer]:
        now_s = self._clock.now_s()
        self.table.advance(now_s)
        return [offer_of(hold, self.table.holder, now_s, self.facts.layout) for hold in self.table.holds()]

    async def _read(self, call: Any) -> None:
        while isinstance(message := await call.read(), Response):
            kind = message.WhichOneof("message")
            handler = self._handlers.get(kind)
            answer = handler(getattr(message, kind)) if handler and not self.silent else None
            if answer is not None:
                self._outbox.put_nowait(answer)
            self._tell_events()

    def _tell_events(self) -> None:
        events = self.table.take_events()
        if events:
            self._outbox.put_nowait(Request(events=events_to_wire(self.table.holder, events)))

    def _on_pin(self, command: connector_pb2.PinCommand) -> connector_pb2.AttachRequest:
        self.pins += 1
        ask, _ = pin_from_wire(command.pin)
        with joined_span(self.tracer, attributes.HOLDER_PIN, command.traceparent) as span:
            outcome = self._pin(ask)
            note_pin(span, ask, outcome)
        reply = connector_pb2.PinReply(call_id=command.call_id, result=outcome_to_wire(outcome))
        return Request(pin_reply=reply)

    def _pin(self, ask: PinAsk) -> PinOutcome:
        hold = self.table.pin(self._clock.now_s(), ask)
        if isinstance(hold, MissReason):
            return hold
        grant = hold.grant
        blocks = BlockList(grant.block_ids, grant.digests, grant.tokens, grant.tail_digest)
        reads = ask.read_part_s > 0
        return Pinned(
            self.table.holder,
            grant.tokens,
            self.facts.layout.layout_hash,
            blocks if reads else None,
            self.facts.location if reads else None,
        )

    def _on_unpin(self, command: connector_pb2.UnpinCommand) -> None:
        self.table.unpin(self._clock.now_s(), command.lease_id, command.pin_id)

    def _on_renew(self, command: connector_pb2.RenewCommand) -> connector_pb2.AttachRequest:
        now_s = self._clock.now_s()
        misses = self.table.renew(now_s, command.lease_ids, duration_from_wire(command.duration))
        self.table.renew_reservations(now_s, command.pin_ids, duration_from_wire(command.reservation))
        self.renewals += 1
        reply = connector_pb2.RenewReply(sequence=command.sequence, misses=misses_to_wire(misses))
        return Request(renew_reply=reply)

    def _on_release(self, command: connector_pb2.ReleaseCommand) -> connector_pb2.AttachRequest:
        event = LeaseEvent.SUPERSEDE if command.superseded else LeaseEvent.RELEASE
        miss = self.table.end(self._clock.now_s(), command.lease_id, event)
        reply = connector_pb2.ReleaseReply(call_id=command.call_id, miss=miss_to_wire(miss))
        return Request(release_reply=reply)

    def _on_eviction_order(self, order: connector_pb2.EvictionOrder) -> None:
        self.order = tuple(order.lease_ids)

    def _on_remote_pin_reply(self, reply: connector_pb2.RemotePinReply) -> None:
        self._remote[reply.call_id].set_result(outcome_from_wire(reply.result))

    def _on_read_counters(self, question: connector_pb2.ReadCounters) -> connector_pb2.AttachRequest:
        held = sum(len(hold.grant.block_ids) for hold in self.table.holds())
        gauges = HolderGauges(held_blocks=held, reading_blocks=self.table.reading_blocks())
        return Request(gauges=gauges_to_wire(gauges, question.call_id))
