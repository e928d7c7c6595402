"""A conversation through the whole stack, and its traces as a collector tells them: a sink, and a real Jaeger.

Jaeger is built from its Go module once, which takes minutes; the sink stands for it where time is short.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest

from kvlease.core.records import EngineRole
from kvlease.dev.jaeger import Jaeger, JaegerError, StoredSpan, edges, ensure_jaeger
from kvlease.dev.main import SERVED_MODEL, simulated_engine
from kvlease.dev.stack import Stack, StackPlan
from kvlease.router.config import RouterConfig
from kvlease.testing.otlp_sink import OtlpSink
from kvlease.wire import attributes

BUILD_S = 1800
TRACE_IDS = {"recompute": "1" * 32, "append": "2" * 32, "readback": "3" * 32}
CLIENT_SPAN_ID = "b7ad6b7169203331"
WAIT_S = 120.0


class Collector(Protocol):
    """Takes spans, and tells those of a trace."""

    otlp_endpoint: str

    async def trace(self, trace_id: str) -> list[StoredSpan]: ...


class SinkCollector:
    def __init__(self, sink: OtlpSink) -> None:
        self._sink = sink
        self.otlp_endpoint = sink.endpoint

    async def trace(self, trace_id: str) -> list[StoredSpan]:
        return [
            StoredSpan(
                span.service,
                span.name,
                span.trace_id,
                span.span_id,
                span.parent_id,
                dict(span.attributes),
                span.links,
            )
            for span in self._sink.spans
            if span.trace_id == trace_id
        ]


REAL = pytest.param(
    "jaeger", marks=[pytest.mark.engine, pytest.mark.jaeger, pytest.mark.timeout(BUILD_S + 120)]
)


@pytest.fixture(params=["sink", REAL])
async def collector(request: pytest.FixtureRequest) -> AsyncIterator[Collector]:
    """Fails, with the reason, where Jaeger cannot be built."""
    if request.param == "sink":
        async with OtlpSink() as sink:
            yield SinkCollector(sink)
    else:
        async with Jaeger(await asyncio.to_thread(ensure_jaeger, print)) as jaeger:
            yield jaeger


@pytest.fixture
async def stack(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    endpoint = collector.otlp_endpoint
    make_engine = partial(simulated_engine, otlp_endpoint=endpoint)
    router = RouterConfig(stop_grace_s=0.1)
    stack = Stack(StackPlan(1, 1, make_engine, router=router, otlp_endpoint=endpoint), print)
    await stack.start()
    yield stack
    await stack.stop()


async def say(stack: Stack, path: str, messages: list[dict[str, Any]], text: str) -> None:
    """One more turn, which takes a path; its reply is appended to the messages."""
    messages.append({"role": "user", "content": text})
    body = {"model": SERVED_MODEL, "messages": messages, "conversation_id": "traced", "max_tokens": 8}
    headers = {"traceparent": f"00-{TRACE_IDS[path]}-{CLIENT_SPAN_ID}-01"}
    url = f"{stack.router_url}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, session.post(url, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        assert response.headers["X-Kvlease-Route"].startswith(path)
        messages.append((await response.json())["choices"][0]["message"])


async def forget_prefixes(engine_url: str) -> None:
    """Empties an engine's own prefix cache, so that what it reuses must be READ."""
    url = f"{engine_url}/reset_prefix_cache"
    async with aiohttp.ClientSession() as session, session.post(url) as response:
        assert response.status == 200


async def found(collector: Collector, path: str, expected: set[tuple[str, str]]) -> list[StoredSpan]:
    """The spans of a turn's trace, once the expected edges are among them."""
    spans: list[StoredSpan] = []
    try:
        async with asyncio.timeout(WAIT_S):
            while not expected <= edges(spans):
                await asyncio.sleep(0.1)
                spans = await collector.trace(TRACE_IDS[path])
    except TimeoutError as error:
        raise AssertionError(f"missing: {expected - edges(spans)}; found: {edges(spans)}") from error
    return spans


def legs(*names: str) -> set[tuple[str, str]]:
    turn = "kvlease-router: kvlease.turn"
    sent = {(turn, f"kvlease-router: {name}") for name in names}
    return sent | {(f"kvlease-router: {name}", "kvlease-sim: llm_request") for name in names}


async def test_a_collector_tells_each_turns_path_across_all_processes(
    collector: Collector, stack: Stack
) -> None:
    messages: list[dict[str, Any]] = []
    await say(stack, "recompute", messages, "Tell me something about lighthouses. " * 20)
    await say(stack, "append", messages, "More.")
    await forget_prefixes(stack.engine_urls(EngineRole.PREFILL)[0])
    await say(stack, "readback", messages, "Here is what the tool found. " * 60)

    sidecar_pin = "kvlease.v1.SidecarService/Pin"
    handover = {
        ("kvlease-router: kvlease.decode", "kvlease-sim: kvlease.lease.pin"),
        ("kvlease-sim: kvlease.lease.pin", "kvlease-sidecar: kvlease.lease.pin"),
        ("kvlease-sidecar: kvlease.lease.pin", f"kvlease-sidecar: {sidecar_pin}"),
        (f"kvlease-sidecar: {sidecar_pin}", "kvlease-sim: kvlease.holder.pin"),
        ("kvlease-router: kvlease.decode", "kvlease-sim: kvlease.read"),
    }
    recompute = await found(collector, "recompute", legs(attributes.PREFILL, attributes.DECODE) | handover)
    (turn,) = [span for span in recompute if span.name == attributes.TURN]
    assert turn.tags["gen_ai.conversation.id"] == "traced"
    (read,) = [span for span in recompute if span.name == attributes.READ]
    assert read.tags["kvlease.read.bytes"] > 0

    append = await found(collector, "append", legs(attributes.DECODE))
    assert not {attributes.PREFILL, attributes.READ} & {span.name for span in append}
    (turn,) = [span for span in append if span.name == attributes.TURN]
    granting = next(span.span_id for span in recompute if span.name == attributes.TURN)
    assert (TRACE_IDS["recompute"], granting) in turn.links

    pin = "kvlease.v1.RegistryService/PinLease"
    leased = {
        ("kvlease-router: kvlease.turn", "kvlease-router: kvlease.lease.pin"),
        ("kvlease-router: kvlease.lease.pin", f"kvlease-router: {pin}"),
        (f"kvlease-router: {pin}", f"kvlease-registry: {pin}"),
        (f"kvlease-registry: {pin}", f"kvlease-registry: {sidecar_pin}"),
        (f"kvlease-registry: {sidecar_pin}", f"kvlease-sidecar: {sidecar_pin}"),
        ("kvlease-router: kvlease.prefill", "kvlease-sim: kvlease.read"),
        ("kvlease-router: kvlease.decode", "kvlease-sim: kvlease.read"),
    }
    await found(collector, "readback", legs(attributes.PREFILL, attributes.DECODE) | leased | handover)


def test_a_machine_without_go_is_told_how_to_get_jaeger(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KVLEASE_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JaegerError, match=r"there is no Go here: install Go 1\.2"):
        ensure_jaeger(print)


async def test_kvlease_dev_has_sent_the_traces_of_every_part_when_it_ends() -> None:
    options = ("--engine", "sim", "--store", "memory", "--check", "--output", "json")
    async with OtlpSink() as sink:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvlease.cli", "dev", *options, "--otlp-endpoint", sink.endpoint),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(100):
            _, log = await process.communicate()
        assert process.returncode == 0, log.decode()
        services = {span.service for span in sink.spans}
        assert services == {"kvlease-router", "kvlease-registry", "kvlease-sidecar", "kvlease-sim"}
        assert "readback" in {span.attributes[attributes.PATH] for span in sink.named(attributes.TURN)}
