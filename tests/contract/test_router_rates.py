"""Once every rate has been measured, predicted times choose the path."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvlease.core.decisions import Decision
from kvlease.core.records import Engine, EngineRole
from kvlease.core.turn import TurnReport
from stubs.engines import Received, StubEngine
from stubs.router import FIRST, LONG, Stack, orders, said
from stubs.waiting import eventually


@pytest.fixture
def router_settings() -> dict[str, Any]:
    return {"rate_samples_min": 1}


async def test_streamed_turns_teach_every_rate_and_then_predicted_times_decide(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    prefill.report = TurnReport(200, 0, 100, 100, "read", kept_tokens=200, read_s=0.01)
    routes: list[str] = []
    messages = FIRST
    for text in ("more", LONG, "more"):
        answer = await stack.chat(messages, conversation_id="c", stream=True)
        routes.append(answer.route)
        messages = said(messages, "hello", text)
    assert routes == ["recompute; first_turn", "append; short_suffix", "readback; long_suffix"]
    last = await stack.chat(messages, conversation_id="c", stream=True)
    assert last.route.split("; ")[1] in ("fastest", "steady")
    read = await stack.send("GET", f"/v1/kvlease/decisions/{last.headers['X-Request-Id']}")
    plan = Decision.from_json(read.json).plan
    assert plan is not None
    assert len(plan.prices) == 3


async def test_what_a_decode_engine_reads_or_computes_counts_until_its_first_byte(
    stack: Stack, prefill: StubEngine, decode: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlease.router.loads.READ_COUNTED_S", 3600.0)
    asked: asyncio.Queue[asyncio.Event] = asyncio.Queue()

    async def answer_when_told(request: web.Request, received: Received) -> web.StreamResponse:
        go_on = asyncio.Event()
        asked.put_nowait(go_on)
        await go_on.wait()
        return await decode.answer(request, received)

    async def loads() -> dict[str, tuple[int, bool]]:
        """READs of each engine, and whether it has prompts to compute, as a turn's plan saw them."""
        other = asyncio.create_task(stack.chat(FIRST, conversation_id="other"))
        (await asked.get()).set()
        request_id = (await other).headers["X-Request-Id"]
        read = await stack.send("GET", f"/v1/kvlease/decisions/{request_id}")
        signals = Decision.from_json(read.json).signals.engines
        return {one.engine_id: (one.reads, one.backlog_tokens > 0) for one in signals}

    decode.script = answer_when_told
    messages = FIRST
    for text, expected in (
        ("more", {"prefill-1": (1, False), "decode-1": (1, False)}),
        ("and more", {"prefill-1": (0, False), "decode-1": (0, True)}),
    ):
        turn = asyncio.create_task(stack.chat(messages, conversation_id="c", stream=True))
        go_on = await asked.get()
        assert await loads() == expected
        go_on.set()
        await turn
        assert await loads() == dict.fromkeys(expected, (0, False))
        messages = said(messages, "hello", text)


async def test_a_decode_engine_has_all_of_a_prompt_to_compute_whose_log_probabilities_are_wanted(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    told = asyncio.Event()

    async def answer_when_told(request: web.Request, received: Received) -> web.StreamResponse:
        if "prompt_logprobs" in received.body:
            await told.wait()
        return await decode.answer(request, received)

    decode.script = answer_when_told
    messages = said(FIRST, "hello", "more")
    turn = asyncio.create_task(stack.chat(messages, conversation_id="c", prompt_logprobs=1))
    await eventually(lambda: len(decode.received) == 2)
    other = await stack.chat(FIRST, conversation_id="other")
    told.set()
    planned = [
        Decision.from_json(
            (await stack.send("GET", f"/v1/kvlease/decisions/{answer.headers['X-Request-Id']}")).json
        ).signals
        for answer in (await turn, other)
    ]
    backlogs = {engine.engine_id: engine.backlog_tokens for engine in planned[1].engines}
    assert backlogs["decode-1"] == planned[0].prompt_tokens > 0


async def test_a_prompt_that_is_computed_is_handed_to_the_engine_with_most_room_by_then(
    stack: Stack, prefill: StubEngine, decode: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlease.router.runner.ANEW_AFTER_S", 0.0)
    other = await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    computed, decoded = asyncio.Event(), asyncio.Event()

    async def compute(request: web.Request, received: Received) -> web.StreamResponse:
        if received.body["messages"] == FIRST:
            await computed.wait()
        return await prefill.answer(request, received)

    async def decode_when_told(request: web.Request, received: Received) -> web.StreamResponse:
        await decoded.wait()
        return await decode.answer(request, received)

    prefill.script, decode.script = compute, decode_when_told
    waits = asyncio.create_task(stack.chat(FIRST))
    await eventually(lambda: len(prefill.received) == 1)
    longer = asyncio.create_task(stack.chat([{"role": "user", "content": LONG}]))
    await eventually(lambda: len(decode.received) == 1)
    computed.set()
    answer = await waits
    assert answer.status == 200
    assert [received.body["messages"] for received in other.received] == [FIRST]
    read = await stack.send("GET", f"/v1/kvlease/decisions/{answer.headers['X-Request-Id']}")
    decision = Decision.from_json(read.json)
    assert decision.plan is not None
    assert decision.plan.decode_engine_id == "decode-1"
    assert (decision.decode_anew_id, decision.served_by_id) == ("decode-2", "decode-2")
    decoded.set()
    await longer


class Roomy(StubEngine):
    """Says how much KV it has room for."""

    @property
    def engine(self) -> Engine:
        return replace(super().engine, total_blocks=10_000)


async def test_a_decode_engine_computes_a_prompt_alone_while_the_prefill_engine_has_long_ones_to_compute(
    stack: Stack, prefill: StubEngine
) -> None:
    decode = await stack.add(Roomy("decode-1", EngineRole.DECODE))
    assert (await stack.chat(FIRST)).route == "recompute; first_turn"
    computed = asyncio.Event()

    async def compute(request: web.Request, received: Received) -> web.StreamResponse:
        await computed.wait()
        return await prefill.answer(request, received)

    prefill.script = compute
    queued = [
        asyncio.create_task(stack.chat([{"role": "user", "content": f"{number} {LONG}"}]))
        for number in range(2)
    ]
    await eventually(lambda: len(prefill.received) == 3)
    alone = await stack.chat(FIRST)
    assert (alone.status, alone.route) == (200, "recompute; prefill_overloaded")
    assert len(prefill.received) == 3
    params = orders(decode.received[-1])
    assert (params.read, params.keep is not None) == (None, True)
    computed.set()
    assert [answer.status for answer in await asyncio.gather(*queued)] == [200, 200]
