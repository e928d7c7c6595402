"""One trace per turn on real engines: vLLM's own spans join it, and the READs are in it."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.engine.pair import Message, Pair, PairPlan

from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SYSTEM, THIRD
from kvlease.testing.otlp_sink import OtlpSink
from kvlease.wire import attributes

pytestmark = pytest.mark.asyncio(loop_scope="module")

FIRST_TRACE, SECOND_TRACE, CLIENT_SPAN = "1" * 32, "2" * 32, "b7ad6b7169203331"
WAIT_S = 60.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sink() -> AsyncIterator[OtlpSink]:
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "50"
    async with OtlpSink() as sink:
        yield sink
    del os.environ["OTEL_BSP_SCHEDULE_DELAY"]


@pytest.fixture(scope="module")
def pair_plan(sink: OtlpSink) -> PairPlan:
    """Every part sends its spans to the sink."""
    return PairPlan(otlp_endpoint=sink.endpoint)


def names(edges: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """The edges without the names of services."""
    return {(parent.partition(": ")[2], child.partition(": ")[2]) for parent, child in edges}


async def found(sink: OtlpSink, trace_id: str, expected: set[tuple[str, str]]) -> None:
    """Waits for edges of a trace."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not expected <= names(sink.edges(trace_id)):
                await asyncio.sleep(0.1)
    except TimeoutError:
        edges = sink.edges(trace_id)
        raise AssertionError(f"missing: {expected - names(edges)}; found: {sorted(edges)}") from None


def traceparent(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CLIENT_SPAN}-01"}


async def test_a_turn_that_reads_back_is_one_trace_with_the_engines_own_spans(
    pair: Pair, sink: OtlpSink
) -> None:
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
    first = await pair.turn(messages, "traced", headers=traceparent(FIRST_TRACE))
    messages += [{"role": "assistant", "content": first.reply.text}, {"role": "user", "content": THIRD}]
    await pair.reset_cache(EngineRole.PREFILL)
    second = await pair.turn(messages, "traced", headers=traceparent(SECOND_TRACE))
    assert second.path == "readback"
    legs = {
        (attributes.TURN, attributes.PREFILL),
        (attributes.TURN, attributes.DECODE),
        (attributes.PREFILL, attributes.LLM_REQUEST),
        (attributes.DECODE, attributes.LLM_REQUEST),
        (attributes.DECODE, attributes.READ),
    }
    await found(sink, FIRST_TRACE, legs)
    await found(sink, SECOND_TRACE, legs | {(attributes.PREFILL, attributes.READ)})
    (turn,) = [span for span in sink.named(attributes.TURN) if span.trace_id == SECOND_TRACE]
    (granting,) = [span for span in sink.named(attributes.TURN) if span.trace_id == FIRST_TRACE]
    assert turn.parent_id == CLIENT_SPAN
    assert (FIRST_TRACE, granting.span_id) in turn.links
    reads = [span for span in sink.named(attributes.READ) if span.trace_id == SECOND_TRACE]
    moved = sum(span.attributes[attributes.READ_BYTES] for span in reads)
    assert moved == second.read_bytes
