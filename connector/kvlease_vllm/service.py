"""Answers the sidecar's messages from the holder's table, and hands READ pins to and fro.

Runs on the link's thread, but for the `send_*` methods, which any thread may call.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlease.core.attachment import EngineFacts, LeaseOffer
from kvlease.core.errors import InvalidArgument
from kvlease.core.holding import HoldEvent, PinAsk
from kvlease.core.lease import LeaseEvent, MissReason
from kvlease.core.records import Pinned, PinOutcome
from kvlease.core.turn import ReadOrder
from kvlease.v1 import connector_pb2, lease_pb2
from kvlease.wire.engines import events_to_wire, hello_to_wire, misses_to_wire, offer_to_wire
from kvlease.wire.leases import outcome_from_wire, outcome_to_wire, pin_from_wire, pin_to_wire
from kvlease.wire.values import duration_from_wire, holder_to_wire, miss_to_wire
from kvlease_vllm.holder import BlockHolder
from kvlease_vllm.link import SidecarLink
from kvlease_vllm.reader import Reads
from kvlease_vllm.tracing import RequestTraces, note_pin

logger = logging.getLogger("vllm.kvlease.service")

Request = connector_pb2.AttachRequest


@dataclass(frozen=True, slots=True)
class Engine:
    """What the service answers from."""

    facts: EngineFacts
    holder: BlockHolder
    reads: Reads
    counters: Callable[[], Counter[str]]


class SidecarService:
    """The connector's side of `ConnectorService.Attach`."""

    def __init__(self, socket_dir: str, outbox_max: int, traces: RequestTraces | None = None) -> None:
        self._traces = traces or RequestTraces()
        self._link = SidecarLink(socket_dir, self, outbox_max)
        self._started: Engine | None = None

    def start(
        self, facts: EngineFacts, holder: BlockHolder, reads: Reads, counters: Callable[[], Counter[str]]
    ) -> None:
        """Begins to attach; before this, nothing is sent."""
        self._started = Engine(facts, holder, reads, counters)
        self._link.start()

    def stop(self) -> None:
        """Ends the stream."""
        if self._started is not None:
            self._link.stop()

    @property
    def _engine(self) -> Engine:
        if self._started is None:
            raise RuntimeError("the service answers after its start only")
        return self._started

    # --- from the scheduler's half ------------------------------------------------------------------

    def send_offer(self, offer: LeaseOffer) -> bool:
        """Offers a hold. False when the outbox is full; without a sidecar the next Hello says it."""
        return self._link.send(Request(offer=offer_to_wire(offer)))

    def send_events(self, events: Sequence[HoldEvent]) -> None:
        """Reports what happened to holds; when the outbox is full, a new Hello says it instead."""
        if self._started is None:
            return
        message = Request(events=events_to_wire(self._started.holder.holder, events))
        if not self._link.send(message):
            self._link.restart()

    def send_pin(self, call_id: int, ask: PinAsk, order: ReadOrder) -> bool:
        """Asks for a pin on another engine; the answer comes to `Reads.answer`. False without a sidecar."""
        if not self._link.is_attached:
            return False
        pin = connector_pb2.RemotePin(
            call_id=call_id,
            pin=pin_to_wire(ask),
            sidecar_address=order.sidecar_address,
            traceparent=self._traces.asked(call_id, order.pin_id),
        )
        return self._link.send(Request(remote_pin=pin))

    def send_unpin(self, order: ReadOrder) -> None:
        """Ends a pin on another engine; a lost one ends by its deadline."""
        unpin = connector_pb2.RemoteUnpin(
            lease_id=order.lease_id,
            pin_id=order.pin_id,
            sidecar_address=order.sidecar_address,
            holder=holder_to_wire(order.holder),
        )
        self._link.send(Request(remote_unpin=unpin))

    # --- LinkHandler --------------------------------------------------------------------------------

    def hello(self) -> Request:
        """Who the engine is and all that it holds."""
        holder, offers = self._engine.holder.offers(self._engine.facts.layout)
        hello = hello_to_wire(self._engine.facts, offers)
        hello.holder.CopyFrom(holder_to_wire(holder))
        return Request(hello=hello)

    def tick(self) -> None:
        """Applies deadlines and asks again for read parts, off the scheduler's thread."""
        self._engine.holder.advance()
        self._engine.reads.ask_again()

    def receive(self, message: connector_pb2.AttachResponse) -> None:
        """Handles one message of the sidecar."""
        kind = message.WhichOneof("message")
        if kind is None:
            return
        handle: Callable[[connector_pb2.AttachResponse], Request | None] = getattr(self, f"_on_{kind}")
        try:
            reply = handle(message)
        except InvalidArgument as error:
            # One wrong question must not break the stream: that would lose every lease of the engine.
            logger.warning("wrong message of the sidecar (%s): %s", kind, error)
            return
        if reply is not None:
            self._link.send(reply)

    def _on_hello(self, message: connector_pb2.AttachResponse) -> None:
        if message.hello.refusal:
            logger.error("the sidecar refuses this engine: %s", message.hello.refusal)

    def _on_pin(self, message: connector_pb2.AttachResponse) -> Request:
        outcome = self._pin(message.pin.pin, message.pin.traceparent)
        if isinstance(outcome, Pinned):
            layout = self._engine.facts.layout
            outcome = Pinned(
                outcome.holder,
                outcome.tokens,
                layout.layout_hash,
                outcome.blocks,
                self._engine.facts.location,
            )
        reply = connector_pb2.PinReply(call_id=message.pin.call_id, result=outcome_to_wire(outcome))
        return Request(pin_reply=reply)

    def _pin(self, message: lease_pb2.PinRequestSpec, traceparent: str) -> PinOutcome:
        try:
            ask, _ = pin_from_wire(message)
            with self._traces.pinning(traceparent) as span:
                outcome = self._engine.holder.pin(ask)
                note_pin(span, ask, outcome)
            return outcome
        except InvalidArgument as error:
            logger.warning("wrong question for a pin: %s", error)
            return MissReason.UNKNOWN

    def _on_unpin(self, message: connector_pb2.AttachResponse) -> None:
        self._engine.holder.unpin(message.unpin.lease_id, message.unpin.pin_id)

    def _on_renew(self, message: connector_pb2.AttachResponse) -> Request:
        renew = message.renew
        misses = self._engine.holder.renew(
            renew.lease_ids,
            duration_from_wire(renew.duration),
            renew.pin_ids,
            duration_from_wire(renew.reservation),
        )
        reply = connector_pb2.RenewReply(sequence=renew.sequence, misses=misses_to_wire(misses))
        return Request(renew_reply=reply)

    def _on_release(self, message: connector_pb2.AttachResponse) -> Request:
        release = message.release
        event = LeaseEvent.SUPERSEDE if release.superseded else LeaseEvent.RELEASE
        miss = self._engine.holder.end(release.lease_id, event)
        return Request(
            release_reply=connector_pb2.ReleaseReply(call_id=release.call_id, miss=miss_to_wire(miss))
        )

    def _on_eviction_order(self, message: connector_pb2.AttachResponse) -> None:
        self._engine.holder.set_order(list(message.eviction_order.lease_ids))

    def _on_remote_pin_reply(self, message: connector_pb2.AttachResponse) -> None:
        outcome: PinOutcome = outcome_from_wire(message.remote_pin_reply.result)
        self._traces.answered(message.remote_pin_reply.call_id, outcome)
        self._engine.reads.answer(message.remote_pin_reply.call_id, outcome)

    def _on_read_counters(self, message: connector_pb2.AttachResponse) -> Request:
        gauges = self._engine.holder.gauges()
        counters = self._engine.counters()
        return Request(
            gauges=connector_pb2.HolderGauges(
                call_id=message.read_counters.call_id,
                held_blocks=gauges.held_blocks,
                reading_blocks=gauges.reading_blocks,
                quarantined_blocks=counters.pop("quarantined_blocks", 0),
                running_requests=counters.pop("running_requests", 0),
                free_blocks=gauges.free_blocks,
                total_blocks=gauges.total_blocks,
                counters=counters,
            )
        )
