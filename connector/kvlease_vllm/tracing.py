"""The connector's spans, in the traces of the requests that it serves.

They go wherever vLLM's own go: vLLM sets the process's tracer provider up when it is started with
`--otlp-traces-endpoint`, and hands a request's trace headers on only then. OpenTelemetry comes with vLLM; where
it is not installed nothing is traced. A span's parent is what the router sent with the leg, so that vLLM's
`llm_request` is beside it.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvlease.core.holding import PinAsk
from kvlease.core.ids import lease_id_to_hex
from kvlease.core.records import Pinned, PinOutcome
from kvlease.core.turn import ReadOrder
from kvlease.wire import attributes

TRACER = "kvlease_vllm"
REQUESTS_MAX = 4096
"""Requests that are traced at once; the next ones are not."""


@dataclass(frozen=True, slots=True)
class _OpenTelemetry:
    """What is used of OpenTelemetry's API."""

    trace: Any
    propagator: Any

    def context(self, headers: Mapping[str, str]) -> Any:
        """The context that trace headers name; None when they name none."""
        context = self.propagator.extract(headers)
        return context if self.trace.get_current_span(context).get_span_context().is_valid else None

    def traceparent(self, span: Any) -> str:
        """The span's context as it is sent."""
        carrier: dict[str, str] = {}
        self.propagator.inject(carrier, self.trace.set_span_in_context(span))
        return carrier.get("traceparent", "")


@dataclass(slots=True)
class _Request:
    """A request that reads and belongs to a trace.

    Attributes:
        parent: the context that came with it.
        asking: the span of the question for its pin, while that is open.
        call_id: of that question.
    """

    parent: Any
    order: ReadOrder
    asking: Any = None
    call_id: int = 0


class RequestTraces:
    """Makes the spans of pins, verification and READs. Nothing here waits or fails; any thread may call.

    Requests are known by their pin, which the choices of one completion share, READs by their request.

    Args:
        tracer: None takes the process's.
    """

    def __init__(self, tracer: Any = None) -> None:
        self._api = _opentelemetry()
        self._tracer: Any = tracer or (self._api.trace.get_tracer(TRACER) if self._api is not None else None)
        self._by_pin: dict[str, _Request] = {}
        self._by_call: dict[int, _Request] = {}
        self._reads: dict[str, Any] = {}

    # --- the reader ---------------------------------------------------------------------------------

    def begin(self, headers: Mapping[str, str] | None, order: ReadOrder) -> None:
        """A request came that reads; without valid trace headers it is not traced."""
        if self._api is None or not headers or len(self._by_pin) >= REQUESTS_MAX:
            return
        parent = self._api.context(headers)
        if parent is not None:
            self._by_pin[order.pin_id] = _Request(parent, order)

    def asked(self, call_id: int, pin_id: str) -> str:
        """The pin is asked for. The trace context for the question, empty when it is not traced."""
        request = self._by_pin.get(pin_id)
        if request is None or self._api is None:
            return ""
        self._end_question(request, "asked again")
        request.asking = self._tracer.start_span(
            attributes.LEASE_PIN, context=request.parent, attributes=_described(request.order)
        )
        request.call_id = call_id
        self._by_call[call_id] = request
        return self._api.traceparent(request.asking)

    def answered(self, call_id: int, outcome: PinOutcome) -> None:
        """The question for a pin was answered."""
        request = self._by_call.get(call_id)
        if request is not None:
            self._end_question(request, _outcome(outcome))

    @contextmanager
    def verifying(self, pin_id: str) -> Generator[Any]:
        """The comparison of the lease's digests with the prompt's; yields the span, None when not traced."""
        request = self._by_pin.get(pin_id)
        if request is None:
            yield None
            return
        span = self._tracer.start_span(attributes.VERIFY, context=request.parent)
        try:
            yield span
        finally:
            span.end()

    def posted(self, request_id: str, pin_id: str, blocks: int, block_bytes: int) -> None:
        """vLLM was told to READ."""
        request = self._by_pin.get(pin_id)
        if request is None:
            return
        self._reads[request_id] = self._tracer.start_span(
            attributes.READ,
            context=request.parent,
            attributes={
                **_described(request.order),
                attributes.READ_BLOCKS: blocks,
                attributes.READ_BYTES: blocks * block_bytes,
            },
        )

    def ended(self, request_id: str, outcome: str, tokens: int) -> None:
        """A READ has ended."""
        span = self._reads.pop(request_id, None)
        if span is None:
            return
        used = outcome == "read"
        span.set_attributes({attributes.READ_OUTCOME: outcome, attributes.READ_TOKENS: tokens if used else 0})
        if not used and self._api is not None:
            span.set_status(self._api.trace.StatusCode.ERROR)
        span.end()

    def forget(self, pin_id: str) -> None:
        """The request has ended; a READ that is still posted ends by itself."""
        request = self._by_pin.pop(pin_id, None)
        if request is not None:
            self._end_question(request, "unanswered")

    # --- the holder ---------------------------------------------------------------------------------

    @contextmanager
    def pinning(self, traceparent: str) -> Generator[Any]:
        """The answer of the holder's table to a pin; yields the span, None when not traced."""
        parent = self._api.context({"traceparent": traceparent}) if self._api and traceparent else None
        if parent is None:
            yield None
            return
        span = self._tracer.start_span(attributes.HOLDER_PIN, context=parent)
        try:
            yield span
        finally:
            span.end()

    # --- inside -------------------------------------------------------------------------------------

    def _end_question(self, request: _Request, outcome: str) -> None:
        span, request.asking = request.asking, None
        self._by_call.pop(request.call_id, None)
        if span is not None:
            span.set_attribute(attributes.PIN_OUTCOME, outcome)
            span.end()


def _opentelemetry() -> _OpenTelemetry | None:
    """OpenTelemetry's API, None where it is not installed."""
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError:
        return None
    return _OpenTelemetry(trace, TraceContextTextMapPropagator())


def note_pin(span: Any, ask: PinAsk, outcome: PinOutcome) -> None:
    """Which lease a pin was asked for, and what became of it."""
    if span is not None:
        span.set_attribute(attributes.LEASE_ID, lease_id_to_hex(ask.lease_id))
        span.set_attribute(attributes.PIN_OUTCOME, _outcome(outcome))


def note_verified(span: Any, tokens: int) -> None:
    """How much of the lease belongs to the prompt."""
    if span is not None:
        span.set_attribute(attributes.VERIFIED_TOKENS, tokens)


def _outcome(outcome: PinOutcome) -> str:
    return "pinned" if isinstance(outcome, Pinned) else outcome.value


def _described(order: ReadOrder) -> dict[str, str]:
    return {
        attributes.LEASE_ID: lease_id_to_hex(order.lease_id),
        attributes.LEASE_KIND: order.kind.value,
        attributes.HOLDER_ENGINE_ID: order.holder.engine_id,
    }
