"""The connector's spans: below the leg that reads, one per pin, verification and READ, and none left open."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, MissReason
from kvlease.core.records import Pinned
from kvlease.core.turn import ReadOrder
from kvlease_vllm import tracing
from kvlease_vllm.tracing import RequestTraces, note_pin, note_verified

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"
HOLDER = Holder("decode-1", "boot", 1)
ORDER = ReadOrder(7, "pin", LeaseKind.CONVERSATION, HOLDER, "a:1")


@dataclass
class Bench:
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.traces = RequestTraces(self.provider.get_tracer("test"))

    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def only(self) -> ReadableSpan:
        (span,) = self.spans()
        return span


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.provider.shutdown()


def below_the_leg(span: ReadableSpan) -> bool:
    parent = span.parent
    return parent is not None and (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE_ID, SPAN_ID)


def test_a_question_for_a_pin_is_a_span_whose_context_goes_to_the_sidecar(bench: Bench) -> None:
    bench.traces.begin({"traceparent": SAMPLED}, ORDER)
    sent = bench.traces.asked(1, "pin")
    bench.traces.answered(1, Pinned(HOLDER, 64))
    span = bench.only()
    assert below_the_leg(span)
    assert sent == f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
    assert dict(span.attributes or {}) == {
        "kvlease.lease.id": f"{7:016x}",
        "kvlease.lease.kind": "conversation",
        "kvlease.holder.engine_id": "decode-1",
        "kvlease.pin.outcome": "pinned",
    }


def test_a_miss_is_the_outcome_of_its_question(bench: Bench) -> None:
    bench.traces.begin({"traceparent": SAMPLED}, ORDER)
    bench.traces.asked(1, "pin")
    bench.traces.answered(1, MissReason.EXPIRED)
    assert (bench.only().attributes or {})["kvlease.pin.outcome"] == "expired"


def test_a_question_that_nobody_answers_ends_with_its_request(bench: Bench) -> None:
    bench.traces.begin({"traceparent": SAMPLED}, ORDER)
    bench.traces.asked(1, "pin")
    bench.traces.forget("pin")
    bench.traces.answered(1, MissReason.UNREACHABLE)
    assert (bench.only().attributes or {})["kvlease.pin.outcome"] == "unanswered"


def test_a_read_part_that_is_asked_for_again_is_another_question(bench: Bench) -> None:
    bench.traces.begin({"traceparent": SAMPLED}, ORDER)
    for _ in range(2):
        bench.traces.asked(1, "pin")
        bench.traces.answered(1, Pinned(HOLDER, 64))
    assert len(bench.spans()) == 2


def test_a_read_says_what_moved_and_what_became_of_it(bench: Bench) -> None:
    bench.traces.begin({"traceparent": SAMPLED}, ORDER)
    bench.traces.posted("r", "pin", 3, 1000)
    assert not bench.spans()
    bench.traces.ended("r", "read", 96)
    attributes = dict(bench.only().attributes or {})
    assert below_the_leg(bench.only())
    assert attributes["kvlease.read.blocks"] == 3
    assert attributes["kvlease.read.bytes"] == 3000
    assert attributes["kvlease.read.tokens"] == 96
    assert attributes["kvlease.read.outcome"] == "read"
    assert bench.only().status.is_unset


@pytest.mark.parametrize("outcome", ["fence", "failed"])
def test_a_read_that_was_not_used_is_an_error_also_when_its_request_ended_before(
    bench: Bench, outcome: str
) -> None:
    bench.traces.begin({"traceparent": SAMPLED}, ORDER)
    bench.traces.posted("r", "pin", 3, 1000)
    bench.traces.forget("pin")
    bench.traces.ended("r", outcome, 96)
    assert not bench.only().status.is_ok
    assert not bench.only().status.is_unset
    assert (bench.only().attributes or {})["kvlease.read.tokens"] == 0


def test_verification_and_the_holders_answer_are_spans_too(bench: Bench) -> None:
    bench.traces.begin({"traceparent": SAMPLED}, ORDER)
    with bench.traces.verifying("pin") as span:
        note_verified(span, 64)
    with bench.traces.pinning(SAMPLED) as span:
        note_pin(span, PinAsk(7, "pin", HOLDER, "tenant"), MissReason.LOST)
    verify, pin = bench.spans()
    assert (verify.name, pin.name) == ("kvlease.verify", "kvlease.holder.pin")
    assert below_the_leg(verify)
    assert below_the_leg(pin)
    assert (verify.attributes or {})["kvlease.verified.tokens"] == 64
    assert (pin.attributes or {})["kvlease.pin.outcome"] == "lost"


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}, {"traceparent": NOT_SAMPLED}])
def test_requests_that_belong_to_no_sampled_trace_make_no_span(
    bench: Bench, headers: dict[str, str] | None
) -> None:
    bench.traces.begin(headers, ORDER)
    sent = bench.traces.asked(1, "pin")
    bench.traces.answered(1, Pinned(HOLDER, 64))
    with bench.traces.verifying("pin") as span:
        note_verified(span, 64)
    bench.traces.posted("r", "pin", 3, 1000)
    bench.traces.ended("r", "read", 96)
    with bench.traces.pinning((headers or {}).get("traceparent", "")) as span:
        note_pin(span, PinAsk(7, "pin", HOLDER, "tenant"), MissReason.LOST)
    assert not bench.spans()
    assert sent == "" or sent.endswith("-00")


def test_without_opentelemetry_nothing_is_traced_and_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    traces = RequestTraces()
    traces.begin({"traceparent": SAMPLED}, ORDER)
    assert traces.asked(1, "pin") == ""
    with traces.pinning(SAMPLED) as span:
        assert span is None


def test_what_is_traced_at_once_is_bounded(bench: Bench) -> None:
    for number in range(tracing.REQUESTS_MAX + 10):
        bench.traces.begin({"traceparent": SAMPLED}, ReadOrder(7, f"pin-{number}", ORDER.kind, HOLDER, "a:1"))
    assert bench.traces.asked(1, f"pin-{tracing.REQUESTS_MAX - 1}")
    assert not bench.traces.asked(1, f"pin-{tracing.REQUESTS_MAX}")
