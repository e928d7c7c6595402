"""Spans of a request that reads, in vLLM's real scheduler."""

from typing import Any

import pytest
from engine_harness import BLOCK, Harness, keep, make_harness, make_request, read, turn
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvlease_vllm.tracing import RequestTraces

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
PROMPT = list(range(1000, 1000 + 4 * BLOCK + 1))


class Traced:
    def __init__(self, engine: Harness) -> None:
        self.engine = engine
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        engine.half._traces = RequestTraces(provider.get_tracer("test"))

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self._exporter.get_finished_spans()}

    def run(self, **request: Any) -> None:
        self.engine.add(make_request("a", PROMPT, turn(read(), keep(1)), **request))
        self.engine.answer(self.engine.pinned([*PROMPT[: 3 * BLOCK], *range(BLOCK)]))
        self.engine.step()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Traced:
    return Traced(make_harness(monkeypatch))


def test_a_read_is_verified_and_measured_below_the_leg(traced: Traced) -> None:
    traced.run(trace_headers=HEADERS)
    traced.engine.finish_reads()
    traced.engine.run()
    assert traced.engine.reports["a"]["outcome"] == "read"
    spans = traced.spans()
    assert set(spans) == {"kvlease.verify", "kvlease.read"}
    for span in spans.values():
        assert span.parent is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert spans["kvlease.verify"].attributes["kvlease.verified.tokens"] == 3 * BLOCK
    attributes = spans["kvlease.read"].attributes
    assert attributes["kvlease.read.outcome"] == "read"
    assert attributes["kvlease.read.blocks"] == 3
    assert attributes["kvlease.read.tokens"] == 3 * BLOCK
    assert attributes["kvlease.read.bytes"] == 3 * traced.engine.half._facts.layout.block_bytes


def test_a_read_that_came_too_late_ends_its_span_with_the_fence(traced: Traced) -> None:
    traced.run(trace_headers=HEADERS)
    traced.engine.clock.advance(60.0)
    traced.engine.run()
    traced.engine.finish_reads()
    assert traced.engine.reports["a"]["outcome"] == "fence"
    span = traced.spans()["kvlease.read"]
    assert span.attributes["kvlease.read.outcome"] == "fence"
    assert not span.status.is_ok


def test_a_request_without_trace_headers_leaves_no_span(traced: Traced) -> None:
    traced.run()
    traced.engine.finish_reads()
    traced.engine.run()
    assert traced.engine.reports["a"]["outcome"] == "read"
    assert not traced.spans()
