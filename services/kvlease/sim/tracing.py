"""The spans of a simulated engine: those that vLLM and the connector make in a real one."""

from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.records import KvLocation, PinOutcome
from kvlease.runtime.telemetry import context_from, is_traced, note_pin
from kvlease.sim.ports import Landed, RemotePins, Transfers
from kvlease.wire import attributes


@contextmanager
def request_span(tracer: Tracer, headers: Mapping[str, str]) -> Generator[None]:
    """The engine's own span of a request that belongs to a trace.

    As in vLLM, whose span is made when the request has ended, what happens meanwhile is beside it, not below.
    """
    parent = context_from(headers)
    if not trace.get_current_span(parent).get_span_context().is_valid:
        yield
        return
    span = tracer.start_span(attributes.LLM_REQUEST, context=parent, kind=SpanKind.SERVER)
    token = contexts.attach(parent)
    try:
        yield
    finally:
        contexts.detach(token)
        span.end()


class TracedPins:
    """`RemotePins` whose questions are spans of the request that asks."""

    def __init__(self, inner: RemotePins, tracer: Tracer) -> None:
        self._inner = inner
        self._tracer = tracer

    async def pin(self, ask: PinAsk, sidecar_address: str) -> PinOutcome:
        """Asks for a pin."""
        if not is_traced():
            return await self._inner.pin(ask, sidecar_address)
        with self._tracer.start_as_current_span(attributes.LEASE_PIN, kind=SpanKind.CLIENT) as span:
            outcome = await self._inner.pin(ask, sidecar_address)
            note_pin(span, ask, outcome)
            return outcome

    def unpin(self, holder: Holder, lease_id: int, pin_id: str, sidecar_address: str) -> None:
        """Ends a pin."""
        self._inner.unpin(holder, lease_id, pin_id, sidecar_address)


class TracedTransfers:
    """`Transfers` whose READs are spans of the request that reads.

    Args:
        block_bytes: bytes of one block.
    """

    def __init__(self, inner: Transfers, tracer: Tracer, block_bytes: int) -> None:
        self._inner = inner
        self._tracer = tracer
        self._block_bytes = block_bytes

    def read(
        self, location: KvLocation, holder: Holder, block_ids: Sequence[int], landed: Landed
    ) -> Coroutine[Any, Any, None]:
        """READs blocks."""
        transfer = self._inner.read(location, holder, block_ids, landed)
        return self._traced(transfer, holder.engine_id, len(block_ids)) if is_traced() else transfer

    async def _traced(self, transfer: Coroutine[Any, Any, None], engine_id: str, blocks: int) -> None:
        with self._tracer.start_as_current_span(
            attributes.READ,
            kind=SpanKind.CLIENT,
            attributes={attributes.HOLDER_ENGINE_ID: engine_id, attributes.READ_BLOCKS: blocks},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                await transfer
            except BaseException as error:
                span.set_attributes(
                    {attributes.READ_OUTCOME: "failed", attributes.ERROR_TYPE: type(error).__name__}
                )
                span.set_status(Status(StatusCode.ERROR))
                raise
            span.set_attributes(
                {attributes.READ_OUTCOME: "read", attributes.READ_BYTES: blocks * self._block_bytes}
            )
