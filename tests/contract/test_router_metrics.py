"""What a router's metrics say of turns that went another way than planned."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from kvlease.core.lease import MissReason
from kvlease.core.records import EngineRole
from stubs.engines import StubEngine
from stubs.router import FIRST, LONG, Stack, running_stack, said


async def series_of(stack: Stack, series: str) -> list[tuple[dict[str, str], float]]:
    async with stack.session.get(stack.router.admin_url + "/metrics") as response:
        text = await response.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return [(sample.labels, sample.value) for sample in samples if sample.name == series]


async def scraped(stack: Stack, series: str, **labels: str) -> float:
    """The sum of a series' values whose labels have these values."""
    return sum(value for told, value in await series_of(stack, series) if labels.items() <= told.items())


async def test_a_leg_that_is_tried_again_counts_as_failed_and_as_a_retry(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    await decode.stop()
    assert (await stack.chat(FIRST)).status == 200
    assert await scraped(stack, "kvlease_leg_retries_total", leg="decode") == 1
    assert await scraped(stack, "kvlease_leg_retries_total", leg="prefill") == 0
    assert await scraped(stack, "kvlease_leg_seconds_count", leg="decode", outcome="failed") == 1
    assert await scraped(stack, "kvlease_leg_seconds_count", leg="decode", outcome="2xx") == 1


async def test_tenants_past_the_bound_are_counted_together() -> None:
    async with running_stack(tenant_metrics_max=2) as stack:
        await stack.add(StubEngine("decode-1", EngineRole.DECODE))
        for key in ("one", "two", "three", "four"):
            await stack.chat(FIRST, headers={"Authorization": f"Bearer {key}"})
        told = await series_of(stack, "kvlease_tenant_prompt_tokens_total")
    names = {labels["tenant"] for labels, _ in told}
    assert len(names) == 3
    assert "other" in names


async def test_requests_are_counted_by_route_and_status_whatever_clients_ask_for(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST)
    await stack.send("POST", "/v1/chat/completions/", data=b"no JSON")
    for path in ("/nowhere", "/nowhere/else", "/v1/kvlease/conversations/unknown"):
        await stack.send("GET", path)
    told = await series_of(stack, "kvlease_http_requests_total")
    counts = {(labels["path"], labels["status"]): value for labels, value in told}
    assert counts["/v1/chat/completions", "200"] == 1
    assert counts["/v1/chat/completions", "400"] == 1
    assert counts["/v1/kvlease/conversations/{conversation_id}", "404"] == 1
    assert counts["other", "404"] == 2


async def test_metrics_are_apart_from_what_clients_reach(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    assert (await stack.send("GET", "/metrics")).status == 404


async def test_pins_are_told_by_outcome_and_heartbeats_by_how_long_their_answers_took(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    stack.registry.pin_outcome = MissReason.EVICTED
    await stack.chat(said(FIRST, "hello", LONG), conversation_id="c")
    assert await scraped(stack, "kvlease_registry_call_seconds_count", call="pin", outcome="evicted") == 1
    async with asyncio.timeout(30):
        while not await scraped(stack, "kvlease_renewal_ack_seconds_count"):
            await asyncio.sleep(0.005)
