"""Traces: a tracer for each part of a process, exported in the background to an OTLP/gRPC collector.

Nothing waits for the collector. Ended spans go into a bounded queue (`OTEL_BSP_MAX_QUEUE_SIZE`, 2048 spans;
when it is full the oldest are dropped), a thread sends them in batches, and an exit gives up what could not be
sent within `CLOSE_S`. Spans are made only in traces that a turn began, so background duties (renewals, watches)
make none.

Contexts cross processes as W3C `traceparent`: in HTTP headers, in gRPC metadata, and as a field of those
messages of the connector's stream that belong to one turn.
"""

import asyncio
import os
import threading
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, Sampler, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvlease import __version__
from kvlease.core.holding import PinAsk
from kvlease.core.ids import lease_id_to_hex
from kvlease.core.records import Pinned, PinOutcome
from kvlease.runtime.config import ConfigError, require, setting
from kvlease.wire import attributes

TRACE_HEADERS = frozenset({"traceparent", "tracestate"})

CLOSE_S = 1.0
"""How long an exit waits for spans that are not sent yet."""

EXPORT_S = 5.0
"""Bound of one export, its retries included."""

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(frozen=True)
class TracingSettings:
    """Settings of a process that traces."""

    otlp_endpoint: str = setting(
        "",
        "http://host:port (https: with TLS) of the OTLP/gRPC collector that gets the traces; empty: the one that "
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT names, and without any no traces",
    )
    trace_sample_ratio: float = setting(
        1.0,
        "share of the turns that are traced when their caller did not decide it; at 1, OTEL_TRACES_SAMPLER "
        "decides where it is set",
    )

    def validate_tracing(self) -> None:
        """Checks the settings of traces.

        Raises:
            ConfigError: one is out of range.
        """
        require(
            0.0 <= self.trace_sample_ratio <= 1.0,
            f"trace_sample_ratio ({self.trace_sample_ratio:g}) must be between 0 and 1",
        )
        endpoint = self.otlp_endpoint
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_endpoint is {endpoint!r}, but must be http://host:port or https://host:port"
            )


class Telemetry:
    """The tracer of one part, and what exports its spans; without a processor nothing is traced."""

    def __init__(self, tracer: trace.Tracer, processor: BatchSpanProcessor | None = None) -> None:
        self.tracer = tracer
        self._processor = processor

    @property
    def enabled(self) -> bool:
        """Whether spans go anywhere."""
        return self._processor is not None

    async def close(self) -> None:
        """Sends what is left, for `CLOSE_S` at most. Idempotent."""
        processor, self._processor = self._processor, None
        if processor is None:
            return
        loop, closed = asyncio.get_running_loop(), asyncio.Event()

        def close() -> None:
            cast(Any, processor).shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(closed.set)

        # A daemon, since an exit waits for every other thread: with the collector away this one may hang.
        threading.Thread(target=close, name="close-telemetry", daemon=True).start()
        try:
            async with asyncio.timeout(CLOSE_S):
                await closed.wait()
        except TimeoutError:
            return


NO_TELEMETRY = Telemetry(trace.NoOpTracer())
"""Traces nothing; a caller's context is passed on all the same."""


def make_telemetry(
    service: str, settings: TracingSettings, environment: Mapping[str, str] = os.environ
) -> Telemetry:
    """The telemetry of one part, `NO_TELEMETRY` when no collector is named.

    Args:
        service: `service.name` of its spans, unless OTEL_SERVICE_NAME is set.
        environment: also read by OpenTelemetry itself (OTEL_BSP_*, OTEL_RESOURCE_ATTRIBUTES, ...).
    """
    endpoint = settings.otlp_endpoint or next(
        (environment[name] for name in _ENDPOINT_VARIABLES if environment.get(name)), ""
    )
    if not endpoint or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return NO_TELEMETRY
    # Imported where traces are exported only: it takes as long as the rest of a process's start.
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
    return exporting_telemetry(service, settings, environment, exporter)


def exporting_telemetry(
    service: str, settings: TracingSettings, environment: Mapping[str, str], exporter: SpanExporter
) -> Telemetry:
    """The telemetry of one part whose spans go to `exporter`, off the thread that ends them."""
    resource = Resource.create(
        {
            attributes.SERVICE_NAME: environment.get("OTEL_SERVICE_NAME") or service,
            attributes.SERVICE_NAMESPACE: "kvlease",
            attributes.SERVICE_VERSION: __version__,
            attributes.SERVICE_INSTANCE_ID: uuid.uuid4().hex,
        }
    )
    sampler = _sampler(settings.trace_sample_ratio, environment)
    provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
    processor = BatchSpanProcessor(exporter)
    provider.add_span_processor(processor)
    return Telemetry(provider.get_tracer("kvlease", __version__), processor)


def names_trace(headers: Mapping[str, str]) -> bool:
    """Whether a caller's headers name a trace."""
    return not TRACE_HEADERS.isdisjoint(map(str.lower, headers))


def is_traced() -> bool:
    """Whether what runs belongs to a trace."""
    return trace.get_current_span().get_span_context().is_valid


def current_traceparent() -> str:
    """The current span as W3C `traceparent`; empty without one."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", "")


@contextmanager
def joined_span(tracer: trace.Tracer, name: str, traceparent: str) -> Generator[trace.Span]:
    """A span below the one that `traceparent` names; without one there, nothing is traced."""
    parent = context_of(traceparent)
    if not trace.get_current_span(parent).get_span_context().is_valid:
        yield trace.INVALID_SPAN
        return
    with tracer.start_as_current_span(name, context=parent) as span:
        yield span


def note_pin(span: trace.Span, ask: PinAsk, outcome: PinOutcome) -> None:
    """Which lease a pin was asked for, and what became of it."""
    span.set_attribute(attributes.LEASE_ID, lease_id_to_hex(ask.lease_id))
    span.set_attribute(attributes.HOLDER_ENGINE_ID, ask.holder.engine_id)
    if isinstance(outcome, Pinned):
        span.set_attributes({attributes.PIN_OUTCOME: "pinned", attributes.LEASE_TOKENS: outcome.tokens})
    else:
        span.set_attribute(attributes.PIN_OUTCOME, outcome.value)


def context_from(carrier: Mapping[str, str]) -> Context:
    """The context of a caller's headers or metadata, keys in any case; an empty one when they are malformed."""
    lower = {name.lower(): value for name, value in carrier.items() if name.lower() in TRACE_HEADERS}
    return _PROPAGATOR.extract(lower, context=Context())


def context_of(traceparent: str) -> Context:
    """The context that a `traceparent` names; an empty one when it names none."""
    return context_from({"traceparent": traceparent})


def with_trace_headers(headers: Mapping[str, str], context: Context | None = None) -> dict[str, str]:
    """The headers with the context's instead of any that they had; as they are when the context has none."""
    own: dict[str, str] = {}
    _PROPAGATOR.inject(own, context=context)
    if not own:
        return dict(headers)
    return {name: value for name, value in headers.items() if name.lower() not in TRACE_HEADERS} | own


def _sampler(ratio: float, environment: Mapping[str, str]) -> Sampler | None:
    """None leaves the choice to OTEL_TRACES_SAMPLER. Whatever the ratio, the parent's flag is honoured."""
    if ratio >= 1.0 and environment.get("OTEL_TRACES_SAMPLER"):
        return None
    return ParentBased(TraceIdRatioBased(ratio))
