"""A part's telemetry: where it goes, what is sampled, and that nothing waits for the collector."""

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from kvlease.runtime.config import ConfigError
from kvlease.runtime.telemetry import (
    CLOSE_S,
    NO_TELEMETRY,
    Telemetry,
    TracingSettings,
    context_from,
    context_of,
    current_traceparent,
    exporting_telemetry,
    joined_span,
    make_telemetry,
    with_trace_headers,
)

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"


class Kept(SpanExporter):
    """An exporter that keeps spans, once `gate` is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.began = threading.Event()
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.began.set()
        self.gate.wait()
        self.spans.extend(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        return


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.gate.set()


def made(kept: Kept, ratio: float = 1.0, **environment: str) -> Telemetry:
    return exporting_telemetry("part", TracingSettings(trace_sample_ratio=ratio), environment, kept)


async def ended(
    telemetry: Telemetry, kept: Kept, traceparent: str = "", spans: int = 1
) -> list[ReadableSpan]:
    """What is exported of spans below a `traceparent`."""
    kept.gate.set()
    for _ in range(spans):
        telemetry.tracer.start_span("kvlease.turn", context=context_of(traceparent)).end()
    await telemetry.close()
    return kept.spans


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (TracingSettings(trace_sample_ratio=1.5), r"trace_sample_ratio \(1.5\) must be between 0 and 1"),
        (TracingSettings(trace_sample_ratio=-0.1), "trace_sample_ratio"),
        (
            TracingSettings(otlp_endpoint="collector:4317"),
            "otlp_endpoint is 'collector:4317', but must be http",
        ),
    ],
)
def test_settings_out_of_range_are_refused_with_their_value(
    settings: TracingSettings, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        settings.validate_tracing()


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1", "OTEL_SDK_DISABLED": "TRUE"},
    ],
)
def test_without_a_collector_nothing_is_traced(environment: dict[str, str]) -> None:
    assert make_telemetry("part", TracingSettings(), environment) is NO_TELEMETRY


@pytest.mark.parametrize("name", ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
async def test_the_standard_variables_name_a_collector(name: str) -> None:
    telemetry = make_telemetry("part", TracingSettings(), {name: "http://127.0.0.1:9"})
    assert telemetry.enabled
    await telemetry.close()


async def test_the_service_is_named_by_its_part_unless_the_environment_names_it(kept: Kept) -> None:
    (span,) = await ended(made(kept), kept)
    assert span.resource.attributes["service.name"] == "part"
    (_, span) = await ended(made(kept, OTEL_SERVICE_NAME="other"), kept)
    assert span.resource.attributes["service.name"] == "other"


async def test_a_ratio_of_0_traces_only_what_the_caller_samples(kept: Kept) -> None:
    assert not await ended(made(kept, ratio=0.0), kept, spans=20)
    assert len(await ended(made(kept, ratio=0.0), kept, SAMPLED)) == 1


async def test_a_caller_that_does_not_sample_is_honoured_at_any_ratio(kept: Kept) -> None:
    assert not await ended(made(kept), kept, NOT_SAMPLED)


async def test_a_ratio_is_the_share_of_turns_that_are_traced(kept: Kept) -> None:
    assert 300 < len(await ended(made(kept, ratio=0.5), kept, spans=1000)) < 700


async def test_ending_spans_waits_for_no_collector_however_many_there_are(kept: Kept) -> None:
    telemetry = made(kept)
    for _ in range(600):
        telemetry.tracer.start_span("kvlease.turn").end()
    assert kept.began.wait(20)
    for _ in range(3000):
        telemetry.tracer.start_span("kvlease.turn").end()
    assert not kept.spans  # the collector has not answered yet, and all of them have ended
    kept.gate.set()
    await telemetry.close()
    assert len(kept.spans) <= 600 + 2048


async def test_closing_waits_for_no_collector_and_holds_up_nothing_else(kept: Kept) -> None:
    telemetry = made(kept)
    telemetry.tracer.start_span("kvlease.turn").end()
    went_on = asyncio.get_running_loop().create_task(asyncio.sleep(0))
    async with asyncio.timeout(10 * CLOSE_S):
        await telemetry.close()
    assert went_on.done()
    assert not telemetry.enabled
    await telemetry.close()  # a second time changes nothing


async def test_closing_sends_what_is_left(kept: Kept) -> None:
    assert len(await ended(made(kept), kept, spans=3)) == 3


@pytest.mark.parametrize("header", ["traceparent", "Traceparent", "TRACEPARENT"])
def test_a_callers_context_is_found_under_any_case_of_its_header(header: str) -> None:
    found = trace.get_current_span(context_from({header: SAMPLED})).get_span_context()
    assert f"{found.trace_id:032x}" == TRACE_ID


@pytest.mark.parametrize("value", ["", "x", f"00-{TRACE_ID}-{'0' * 16}-01", f"00-{TRACE_ID}-{SPAN_ID}"])
def test_a_malformed_context_is_none(value: str) -> None:
    assert not trace.get_current_span(context_of(value)).get_span_context().is_valid


def test_the_headers_of_a_leg_carry_one_context_which_is_the_legs() -> None:
    headers = {"Traceparent": NOT_SAMPLED, "TraceState": "a=b", "Accept": "x"}
    assert with_trace_headers(headers, context_of(SAMPLED)) == {"Accept": "x", "traceparent": SAMPLED}


def test_without_a_context_the_headers_stay_as_they_are() -> None:
    assert with_trace_headers({"Traceparent": "nonsense"}, context_of("")) == {"Traceparent": "nonsense"}


def test_telemetry_that_is_off_passes_the_callers_context_on() -> None:
    with NO_TELEMETRY.tracer.start_as_current_span("kvlease.turn", context=context_of(SAMPLED)):
        assert current_traceparent() == SAMPLED
    assert current_traceparent() == ""


async def test_a_message_without_a_context_makes_no_span(kept: Kept) -> None:
    telemetry = made(kept)
    with joined_span(telemetry.tracer, "kvlease.holder.pin", "") as span:
        assert not span.is_recording()
    with joined_span(telemetry.tracer, "kvlease.holder.pin", SAMPLED) as span:
        assert current_traceparent().startswith(f"00-{TRACE_ID}-")
    kept.gate.set()
    await telemetry.close()
    assert [one.parent.span_id for one in kept.spans if one.parent] == [int(SPAN_ID, 16)]
