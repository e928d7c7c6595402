"""The spans of a turn: decorators round the router's ports, and what the runner tells of a turn."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder, lease_id_to_hex
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine, LeaseRecord, PinOutcome
from kvlease.router.dialect import Api
from kvlease.router.ports import EnginePort, EngineReply, RegistryPort, RenewalStream
from kvlease.runtime.telemetry import (
    NO_TELEMETRY,
    context_from,
    context_of,
    current_traceparent,
    is_traced,
    names_trace,
    note_pin,
    with_trace_headers,
)
from kvlease.store.port import Batch
from kvlease.wire import attributes

if TYPE_CHECKING:
    from kvlease.core.planning import Plan
    from kvlease.router.conversation import OpenTurn
    from kvlease.router.turn import Turn


MODEL_CHARACTERS_MAX = 256
"""What a span keeps of the model's name, which is the client's text until an engine knows it."""


class TurnTracing:
    """Makes the span of each turn. Nothing of it fails or delays a turn."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._makes_spans = tracer is not NO_TELEMETRY.tracer

    def turn(self, headers: Mapping[str, str]) -> AbstractContextManager[None]:
        """The span of a whole turn, in the trace that the client's headers name, if they do."""
        if self._makes_spans or names_trace(headers):
            return self._turn(headers)
        return nullcontext()

    @contextmanager
    def _turn(self, headers: Mapping[str, str]) -> Generator[None]:
        with self._tracer.start_as_current_span(
            attributes.TURN,
            context=context_from(headers),
            kind=SpanKind.SERVER,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield
            except Exception as error:
                _fail(span, type(error).__name__)
                raise

    def opened(self, opened: OpenTurn) -> None:
        """The turn found its conversation: it is linked to the turn that granted the lease, and may grant one."""
        if not (self._makes_spans or is_traced()):
            return
        span = trace.get_current_span()
        opened.traceparent = current_traceparent()
        granted = opened.base.traceparent if opened.base is not None else ""
        granting = trace.get_current_span(context_of(granted)).get_span_context()
        if granting.is_valid:
            span.add_link(granting, {attributes.LINK: attributes.GRANTED_BY})

    def planning(self) -> AbstractContextManager[object]:
        """The span of the plan."""
        return self._tracer.start_as_current_span(attributes.PLAN) if self._makes_spans else nullcontext()

    def planned(self, chosen: Plan | None) -> None:
        """What the plan is; None when no engine can serve the turn."""
        if not self._makes_spans:
            return
        span = trace.get_current_span()
        if chosen is None:
            _fail(span, "unavailable")
            return
        span.set_attributes(
            _present(
                {
                    attributes.PATH: chosen.path.value,
                    attributes.REASON: chosen.reason.value,
                    attributes.PREFILL_ENGINE_ID: chosen.prefill_engine_id,
                    attributes.DECODE_ENGINE_ID: chosen.decode_engine_id,
                }
            )
        )

    def closed(self, turn: Turn) -> None:
        """How the turn went; its span ends soon."""
        if not self._makes_spans:
            return
        span, record, request = trace.get_current_span(), turn.record, turn.request
        if not span.is_recording():
            return
        chat = request.api is not Api.COMPLETIONS
        span.set_attributes(
            _present(
                {
                    attributes.PATH: record.path.value,
                    attributes.REASON: record.reason.value,
                    attributes.ENDED: record.ended,
                    attributes.READ_OUTCOME: record.outcome,
                    attributes.READ_TOKENS: record.read_tokens,
                    attributes.LOCAL_TOKENS: record.local_tokens,
                    attributes.VERIFIED_TOKENS: record.verified_tokens,
                    attributes.LEASE_ID: lease_id_to_hex(record.lease_id) if record.lease_id else None,
                    attributes.PREFILL_ENGINE_ID: record.prefill_engine_id,
                    attributes.DECODE_ENGINE_ID: record.decode_engine_id,
                    attributes.GEN_AI_OPERATION_NAME: "chat" if chat else "text_completion",
                    attributes.GEN_AI_PROVIDER_NAME: "vllm",
                    attributes.GEN_AI_CONVERSATION_ID: turn.opened.conversation.conversation_id,
                    attributes.GEN_AI_REQUEST_MODEL: request.model[:MODEL_CHARACTERS_MAX],
                    attributes.GEN_AI_REQUEST_STREAM: request.stream,
                    attributes.GEN_AI_REQUEST_CHOICE_COUNT: request.choices if request.choices > 1 else None,
                    attributes.GEN_AI_INPUT_TOKENS: record.prompt_tokens,
                    attributes.GEN_AI_OUTPUT_TOKENS: record.completion_tokens,
                    attributes.GEN_AI_CACHE_READ_TOKENS: record.reused_tokens,
                    attributes.GEN_AI_TIME_TO_FIRST_CHUNK: record.ttft_s,
                }
            )
        )
        if record.ended in ("badly", "refused"):
            _fail(span, "turn")

    def engines(self, inner: EnginePort, leg: str) -> EnginePort:
        """The way to engines for one leg, each call a span of the leg's name.

        Without spans it is the inner one: a client's own trace is among the headers of a leg.
        """
        return _TracedEngines(inner, self._tracer, leg) if self._makes_spans else inner


NO_TRACING = TurnTracing(NO_TELEMETRY.tracer)
"""Makes no spans; a client's trace reaches the engines all the same."""


class TracedRegistry:
    """A `RegistryPort` whose questions about leases are spans of the turn that asks."""

    def __init__(self, inner: RegistryPort, tracer: Tracer) -> None:
        self._inner = inner
        self._tracer = tracer

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """Takes a pin at the holder."""
        if not is_traced():
            return await self._inner.pin(ask, wait_for_offer_s)
        with self._tracer.start_as_current_span(attributes.LEASE_PIN) as span:
            outcome = await self._inner.pin(ask, wait_for_offer_s)
            note_pin(span, ask, outcome)
            return outcome

    async def unpin(self, holder: Holder, lease_id: int, pin_id: str) -> None:
        """Ends a pin."""
        with self._span(attributes.LEASE_UNPIN):
            await self._inner.unpin(holder, lease_id, pin_id)

    async def release(self, lease_id: int, engine_id: str, tenant: str) -> MissReason | None:
        """Releases a lease."""
        with self._span(attributes.LEASE_RELEASE):
            return await self._inner.release(lease_id, engine_id, tenant)

    def watch_engines(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[Engine]]]:
        """Lives as long as the router: no span."""
        return self._inner.watch_engines()

    def watch_leases(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[LeaseRecord]]]:
        """Lives as long as the router: no span."""
        return self._inner.watch_leases()

    def renew(self) -> AbstractAsyncContextManager[RenewalStream]:
        """Lives as long as the router: no span."""
        return self._inner.renew()

    def _span(self, name: str) -> AbstractContextManager[Span | None]:
        return self._tracer.start_as_current_span(name) if is_traced() else nullcontext()


class _TracedEngines:
    def __init__(self, inner: EnginePort, tracer: Tracer, leg: str) -> None:
        self._inner = inner
        self._tracer = tracer
        self._leg = leg

    def call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> AbstractAsyncContextManager[EngineReply]:
        """Sends a request; its span lasts until the context is left, streamed body included."""
        parts = urlsplit(url)
        span = self._tracer.start_span(
            self._leg,
            kind=SpanKind.CLIENT,
            attributes=_present(
                {
                    attributes.HTTP_METHOD: method,
                    attributes.URL_PATH: parts.path,
                    attributes.SERVER_ADDRESS: parts.hostname,
                    attributes.SERVER_PORT: parts.port,
                }
            ),
        )
        within = with_trace_headers(headers, trace.set_span_in_context(span))
        return _TracedCall(self._inner.call(method, url, within, body, timeout_s), span)


class _TracedCall(AbstractAsyncContextManager[EngineReply]):
    """One call. A class, not a generator: no span may be open across the `yield` of one."""

    def __init__(self, inner: AbstractAsyncContextManager[EngineReply], span: Span) -> None:
        self._inner = inner
        self._span = span

    async def __aenter__(self) -> EngineReply:
        try:
            reply = await self._inner.__aenter__()
        except BaseException as error:
            self._note(type(error))
            self._span.end()
            raise
        self._span.set_attribute(attributes.HTTP_STATUS, reply.status)
        if reply.status >= 400:
            _fail(self._span, str(reply.status))
        return reply

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if kind is not None:
            self._note(kind)
        try:
            return await self._inner.__aexit__(kind, error, traceback)
        finally:
            self._span.end()

    def _note(self, kind: type[BaseException]) -> None:
        """A client that left is no failure of the engine."""
        if issubclass(kind, Exception):
            _fail(self._span, kind.__name__)
        else:
            self._span.set_attribute(attributes.ERROR_TYPE, "cancelled")


def _fail(span: Span, error_type: str) -> None:
    span.set_attribute(attributes.ERROR_TYPE, error_type)
    span.set_status(Status(StatusCode.ERROR))


def _present(values: Mapping[str, str | int | float | bool | None]) -> dict[str, str | int | float | bool]:
    """The values that are known; a number may be 0."""
    return {key: value for key, value in values.items() if value is not None and value != ""}
