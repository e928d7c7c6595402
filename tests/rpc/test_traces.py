"""One trace per turn, from the client's span to the holder's table, over the real services' sockets."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from kvlease.core.holding import PinAsk
from kvlease.core.records import EngineRole
from kvlease.runtime.telemetry import TracingSettings, make_telemetry
from kvlease.testing.otlp_sink import OtlpSink, ReceivedSpan
from kvlease.v1 import registry_pb2
from kvlease.wire import attributes

from .conftest import Fleet
from .test_router import LONG, MESSAGES, Stack, said, stack, start_pair

__all__ = ["stack"]  # the fixture

TRACE_ID, CLIENT_SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-01", f"00-{TRACE_ID}-{CLIENT_SPAN_ID}-00"
PIN = "kvlease.v1.RegistryService/PinLease"
SIDECAR_PIN = "kvlease.v1.SidecarService/Pin"


@pytest.fixture(autouse=True)
async def sink(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OtlpSink]:
    async with OtlpSink() as sink:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", sink.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield sink


async def chat(stack: Stack, messages: list[dict[str, str]], traceparent: str = "", **body: object) -> None:
    request = {"model": "tiny", "messages": messages, "conversation_id": "c", **body}
    headers = {"traceparent": traceparent} if traceparent else {}
    url = stack.router.url + "/v1/chat/completions"
    async with stack.session.post(url, json=request, headers=headers) as response:
        assert response.status == 200
        await response.read()


def turns(sink: OtlpSink) -> list[ReceivedSpan]:
    return sink.named(attributes.TURN)


async def test_a_pin_is_one_trace_from_the_client_to_the_holder(
    fleet: Fleet, sink: OtlpSink, stack: Stack
) -> None:
    holder = make_telemetry("kvlease-holder", TracingSettings())
    fleet.stack.push_async_callback(holder.close)
    stack.decode.connector.tracer = holder.tracer
    await chat(stack, MESSAGES)
    await chat(stack, said(LONG), SAMPLED)
    await sink.until(lambda sink: len(turns(sink)) == 2 and sink.named(attributes.HOLDER_PIN))
    await sink.until(lambda sink: sink.named(PIN, "kvlease-registry"))
    await sink.until(lambda sink: sink.named(SIDECAR_PIN, "kvlease-sidecar"))
    router, registry, sidecar = "kvlease-router", "kvlease-registry", "kvlease-sidecar"
    edges = sink.edges(TRACE_ID)
    for parent, child in [
        (f"{router}: kvlease.turn", f"{router}: kvlease.plan"),
        (f"{router}: kvlease.turn", f"{router}: kvlease.lease.pin"),
        (f"{router}: kvlease.turn", f"{router}: kvlease.prefill"),
        (f"{router}: kvlease.turn", f"{router}: kvlease.decode"),
        (f"{router}: kvlease.lease.pin", f"{router}: {PIN}"),
        (f"{router}: {PIN}", f"{registry}: {PIN}"),
        (f"{registry}: {PIN}", f"{registry}: {SIDECAR_PIN}"),
        (f"{registry}: {SIDECAR_PIN}", f"{sidecar}: {SIDECAR_PIN}"),
        (f"{sidecar}: {SIDECAR_PIN}", "kvlease-holder: kvlease.holder.pin"),
    ]:
        assert (parent, child) in edges
    (turn,) = [span for span in turns(sink) if span.trace_id == TRACE_ID]
    assert turn.parent_id == CLIENT_SPAN_ID


async def test_each_leg_hands_its_own_context_to_its_engine(sink: OtlpSink, stack: Stack) -> None:
    await chat(stack, MESSAGES, SAMPLED)
    await sink.until(turns)
    for pair, leg in ((stack.prefill, attributes.PREFILL), (stack.decode, attributes.DECODE)):
        (span,) = sink.named(leg)
        assert pair.http.received[0].headers.getall("traceparent") == [f"00-{TRACE_ID}-{span.span_id}-01"]


async def test_a_turn_is_linked_to_the_one_that_granted_its_lease(sink: OtlpSink, stack: Stack) -> None:
    await chat(stack, MESSAGES)
    await chat(stack, said(LONG), stream=True)
    await chat(stack, [*said(LONG), *said("x")[1:]])
    await sink.until(lambda sink: len(turns(sink)) == 3)
    first, second, third = turns(sink)
    assert first.links == ()
    assert second.links == ((first.trace_id, first.span_id),)
    assert third.links == ((second.trace_id, second.span_id),)


async def test_the_span_of_a_turn_says_how_it_went_and_nothing_of_what_was_said(
    sink: OtlpSink, stack: Stack
) -> None:
    await chat(stack, MESSAGES)
    await sink.until(turns)
    (turn,) = turns(sink)
    lease_id, _ = await stack.lease()
    assert turn.service == "kvlease-router"
    known = dict(turn.attributes)
    assert known.pop(attributes.GEN_AI_TIME_TO_FIRST_CHUNK) > 0
    assert known == {
        "kvlease.path": "recompute",
        "kvlease.reason": "first_turn",
        "kvlease.ended": "well",
        "kvlease.read.outcome": "none",
        "kvlease.read.tokens": 0,
        "kvlease.local.tokens": 0,
        "kvlease.verified.tokens": 0,
        "kvlease.lease.id": f"{lease_id:016x}",
        "kvlease.prefill.engine_id": "prefill-1",
        "kvlease.decode.engine_id": "decode-1",
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.conversation.id": "c",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": 200,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert not turn.failed


@pytest.mark.parametrize(
    "traceparent",
    ["nonsense", f"00-{'0' * 32}-{CLIENT_SPAN_ID}-01", f"ff-{TRACE_ID}-{CLIENT_SPAN_ID}-01", "00--01"],
)
async def test_a_malformed_traceparent_begins_a_trace_of_its_own(
    sink: OtlpSink, stack: Stack, traceparent: str
) -> None:
    await chat(stack, MESSAGES, traceparent)
    await sink.until(turns)
    (turn,) = turns(sink)
    assert turn.parent_id == ""
    assert turn.trace_id != TRACE_ID
    assert turn.trace_id in stack.decode.http.received[0].headers["traceparent"]


async def test_a_caller_that_does_not_sample_is_not_traced_and_the_engines_hear_of_it(
    sink: OtlpSink, stack: Stack
) -> None:
    await chat(stack, MESSAGES, NOT_SAMPLED)
    await chat(stack, said(LONG), SAMPLED.replace(TRACE_ID, "1" * 32))
    await sink.until(turns)
    assert {span.trace_id for span in sink.spans} == {"1" * 32}
    handed = stack.decode.http.received[0].headers["traceparent"]
    assert handed.startswith(f"00-{TRACE_ID}-")
    assert handed.endswith("-00")


async def test_an_engine_that_refuses_marks_its_leg_and_the_turn(sink: OtlpSink, stack: Stack) -> None:
    async def refuse(request: web.Request, received: object) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    stack.prefill.http.script = refuse
    body = {"model": "tiny", "messages": MESSAGES}
    async with stack.session.post(stack.router.url + "/v1/chat/completions", json=body) as response:
        assert response.status == 400
    await sink.until(turns)
    (leg,), (turn,) = sink.named(attributes.PREFILL), turns(sink)
    assert leg.attributes["http.response.status_code"] == 400
    assert leg.failed
    assert turn.failed


async def test_a_client_that_leaves_ends_its_turns_spans_without_an_error(
    sink: OtlpSink, stack: Stack
) -> None:
    reached = asyncio.Event()

    async def hang(request: web.Request, received: object) -> web.StreamResponse:
        reached.set()
        await asyncio.Event().wait()
        raise AssertionError

    stack.decode.http.script = hang
    turn = asyncio.create_task(chat(stack, MESSAGES, SAMPLED))
    await asyncio.wait_for(reached.wait(), 20)
    turn.cancel()
    await sink.until(turns)
    (span,), (leg,) = turns(sink), sink.named(attributes.DECODE)
    assert span.attributes[attributes.ENDED] == "aborted"
    assert leg.attributes[attributes.ERROR_TYPE] == "cancelled"
    assert not span.failed
    assert not leg.failed


async def test_a_second_try_of_a_leg_is_a_span_of_its_own(fleet: Fleet, sink: OtlpSink, stack: Stack) -> None:
    another = await start_pair(fleet, "prefill-2", EngineRole.PREFILL)
    url = stack.router.url + "/health"
    async with asyncio.timeout(20):
        known = 2
        while known < 3:
            async with stack.session.get(url) as response:
                known = sum((await response.json())["engines"].values())

    async def fail(request: web.Request, received: object) -> web.StreamResponse:
        return web.json_response({"error": {"message": "down"}}, status=503)

    stack.prefill.http.script = another.http.script = fail
    await chat(stack, MESSAGES, SAMPLED)
    await sink.until(turns)
    tries = sink.named(attributes.PREFILL)
    assert [span.failed for span in tries] == [True, True]
    assert {span.parent_id for span in tries} == {turns(sink)[0].span_id}
    assert turns(sink)[0].attributes[attributes.REASON] == "prefill_failed"
    assert not turns(sink)[0].failed


async def test_a_reader_continues_its_requests_trace_at_the_other_sidecar(
    fleet: Fleet, sink: OtlpSink, stack: Stack
) -> None:
    await chat(stack, MESSAGES)
    lease_id, _ = await stack.lease()
    ask = PinAsk(lease_id, "pin", stack.decode.connector.facts.holder, "", read_part_s=5.0)
    await stack.prefill.connector.remote_pin(ask, stack.decode.sidecar.address, SAMPLED)
    across = (f"kvlease-sidecar: {SIDECAR_PIN}", f"kvlease-sidecar: {SIDECAR_PIN}")
    await sink.until(lambda sink: across in sink.edges(TRACE_ID))
    await sink.until(lambda sink: sink.named(attributes.LEASE_PIN, "kvlease-sidecar"))
    (pin,) = sink.named(attributes.LEASE_PIN, "kvlease-sidecar")
    assert (pin.trace_id, pin.parent_id) == (TRACE_ID, CLIENT_SPAN_ID)
    assert pin.attributes[attributes.LEASE_ID] == f"{lease_id:016x}"


async def test_calls_without_a_trace_and_background_duties_make_no_spans(
    fleet: Fleet, sink: OtlpSink, stack: Stack
) -> None:
    await (await fleet.registry()).ListEngines(registry_pb2.ListEnginesRequest(), timeout=20)
    await chat(stack, MESSAGES, SAMPLED)
    await stack.lease()
    await sink.until(turns)
    assert {span.trace_id for span in sink.spans} == {TRACE_ID}
    assert not [span for span in sink.spans if "Renew" in span.name or "Watch" in span.name]
