"""The way to one attached connector over its stream: call ids, bounded waits, a bounded outbox."""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from kvlease.core.errors import HolderUnreachable
from kvlease.core.holding import PinAsk
from kvlease.core.lease import MissReason
from kvlease.core.records import HolderGauges, PinOutcome
from kvlease.runtime.telemetry import current_traceparent
from kvlease.v1 import connector_pb2
from kvlease.wire.engines import misses_from_wire
from kvlease.wire.gauges import gauges_from_wire
from kvlease.wire.leases import outcome_from_wire, pin_to_wire
from kvlease.wire.values import duration_to_wire, miss_from_wire

OUTBOX_MAX = 4096
"""Messages that wait for the connector. When it is full, questions fail at once, tellings are dropped: pins
end by their deadlines, and the next order of eviction replaces the dropped one."""

Answer = TypeVar("Answer")


class StreamConnectorLink:
    """A `ConnectorLink` over one `Attach` stream.

    Args:
        pin_call_s: bound of a pin.
        call_s: bound of every other question.
    """

    def __init__(self, pin_call_s: float, call_s: float) -> None:
        self._pin_call_s = pin_call_s
        self._call_s = call_s
        self._outbox: asyncio.Queue[connector_pb2.AttachResponse | None] = asyncio.Queue(OUTBOX_MAX)
        self._pins: dict[int, asyncio.Future[PinOutcome]] = {}
        self._renewals: dict[int, asyncio.Future[dict[int, MissReason]]] = {}
        self._releases: dict[int, asyncio.Future[MissReason | None]] = {}
        self._gauges: dict[int, asyncio.Future[HolderGauges]] = {}
        self._last_call_id = 0
        self.closed_because = ""

    # --- questions ----------------------------------------------------------------------------------------

    async def pin(self, ask: PinAsk) -> PinOutcome:
        """Asks the holder's table for a pin."""
        call_id = self._next_call_id()
        command = connector_pb2.PinCommand(
            call_id=call_id, pin=pin_to_wire(ask), traceparent=current_traceparent()
        )
        message = connector_pb2.AttachResponse(pin=command)
        return await self._answer(self._pins, call_id, message, self._pin_call_s)

    async def renew(
        self, lease_ids: Sequence[int], duration_s: float, pin_ids: Sequence[str], reservation_s: float
    ) -> dict[int, MissReason]:
        """Renews leases and the reservations of pins. The leases that could not be renewed."""
        sequence = self._next_call_id()
        command = connector_pb2.RenewCommand(
            sequence=sequence,
            lease_ids=lease_ids,
            duration=duration_to_wire(duration_s),
            pin_ids=pin_ids,
            reservation=duration_to_wire(reservation_s),
        )
        message = connector_pb2.AttachResponse(renew=command)
        return await self._answer(self._renewals, sequence, message, self._call_s)

    async def release(self, lease_id: int, *, superseded: bool) -> MissReason | None:
        """Ends a lease. None, or what it was already."""
        call_id = self._next_call_id()
        command = connector_pb2.ReleaseCommand(call_id=call_id, lease_id=lease_id, superseded=superseded)
        message = connector_pb2.AttachResponse(release=command)
        return await self._answer(self._releases, call_id, message, self._call_s)

    async def read_gauges(self) -> HolderGauges:
        """The holder's gauges and counters."""
        call_id = self._next_call_id()
        question = connector_pb2.ReadCounters(call_id=call_id)
        message = connector_pb2.AttachResponse(read_counters=question)
        return await self._answer(self._gauges, call_id, message, self._call_s)

    # --- tellings -----------------------------------------------------------------------------------------

    def unpin(self, lease_id: int, pin_id: str) -> None:
        """Tells that a pin has ended."""
        command = connector_pb2.UnpinCommand(lease_id=lease_id, pin_id=pin_id)
        self.send(connector_pb2.AttachResponse(unpin=command))

    def order_evictions(self, lease_ids: Sequence[int]) -> None:
        """Tells the order of eviction, least worth keeping first."""
        order = connector_pb2.EvictionOrder(lease_ids=lease_ids)
        self.send(connector_pb2.AttachResponse(eviction_order=order))

    def send(self, message: connector_pb2.AttachResponse) -> bool:
        """Puts a message into the outbox. False when it was dropped: full, or closed."""
        if self.closed_because:
            return False
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            return False
        return True

    # --- the stream's side --------------------------------------------------------------------------------

    async def next_message(self) -> connector_pb2.AttachResponse | None:
        """The next message for the connector; None when the link is closed."""
        if self.closed_because:
            return None
        message = await self._outbox.get()
        return None if self.closed_because else message

    def receive_pin(self, reply: connector_pb2.PinReply) -> None:
        """Hands a pin's outcome to whoever asked; a late one is dropped, its pin ends by its deadline."""
        self._resolve(self._pins, reply.call_id, outcome_from_wire(reply.result))

    def receive_renewal(self, reply: connector_pb2.RenewReply) -> None:
        """Hands a renewal's misses to whoever asked."""
        self._resolve(self._renewals, reply.sequence, misses_from_wire(reply.misses))

    def receive_release(self, reply: connector_pb2.ReleaseReply) -> None:
        """Hands a release's answer to whoever asked."""
        self._resolve(self._releases, reply.call_id, miss_from_wire(reply.miss))

    def receive_gauges(self, reply: connector_pb2.HolderGauges) -> None:
        """Hands gauges to whoever asked."""
        self._resolve(self._gauges, reply.call_id, gauges_from_wire(reply))

    def close(self, reason: str) -> None:
        """Ends the stream; every open question fails at once."""
        if self.closed_because:
            return
        self.closed_because = reason
        for waiting in (self._pins, self._renewals, self._releases, self._gauges):
            for future in waiting.values():
                if not future.done():
                    future.set_exception(HolderUnreachable(f"the connector is gone: {reason}"))
        if self._outbox.empty():
            self._outbox.put_nowait(None)

    # --- inside -------------------------------------------------------------------------------------------

    def _next_call_id(self) -> int:
        self._last_call_id += 1
        return self._last_call_id

    async def _answer(
        self,
        waiting: "dict[int, asyncio.Future[Answer]]",
        call_id: int,
        message: connector_pb2.AttachResponse,
        bound_s: float,
    ) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting[call_id] = future
        try:
            if not self.send(message):
                raise HolderUnreachable("the connector does not take its messages")
            async with asyncio.timeout(bound_s):
                return await future
        except TimeoutError as error:
            raise HolderUnreachable(f"the connector did not answer within {bound_s:g} s") from error
        finally:
            del waiting[call_id]

    def _resolve(self, waiting: "dict[int, asyncio.Future[Answer]]", call_id: int, answer: Answer) -> None:
        future = waiting.get(call_id)
        if future is not None and not future.done():
            future.set_result(answer)
