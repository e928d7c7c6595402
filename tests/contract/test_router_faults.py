"""Fleets that change under load: engines that hang, join and leave, serve other models, or only some adapters."""

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvlease.core.records import Engine, EngineRole
from stubs.engines import MODEL, Received, StubEngine
from stubs.router import FIRST, Stack, orders, said

BOUND_S = 60.0
STALLING: dict[str, Any] = {
    "stall_s": 3.0,
    "probe_interval_s": 0.02,
    "probe_timeout_s": 0.5,
    "suspect_s": 0.0,
}


class Hanging:
    """An engine whose health says yes while it serves nobody; `wake` ends that."""

    def __init__(self, engine: StubEngine) -> None:
        self.engine = engine
        self.hung = 0
        self._awake = asyncio.Event()
        engine.script = self._script

    def wake(self) -> None:
        self._awake.set()

    async def _script(self, request: web.Request, received: Received) -> web.StreamResponse:
        if not self._awake.is_set():
            self.hung += 1
            await self._awake.wait()
        return await self.engine.answer(request, received)


@pytest.mark.parametrize("router_settings", [STALLING], ids=["engines stall"])
@pytest.mark.parametrize("role", [EngineRole.PREFILL, EngineRole.DECODE])
async def test_turns_that_a_hung_engine_keeps_waiting_are_served_by_another(
    stack: Stack, prefill: StubEngine, decode: StubEngine, role: EngineRole
) -> None:
    hanging = Hanging(prefill if role is EngineRole.PREFILL else decode)
    other = await stack.add(StubEngine(f"{role.value}-2", role))
    async with asyncio.timeout(BOUND_S):
        answers = await asyncio.gather(*(stack.chat(FIRST, conversation_id=f"c{i}") for i in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        assert hanging.hung
        # Out of rotation: what comes now never waits for it.
        asked = len(hanging.engine.received)
        for number in range(6):
            assert (await stack.chat(FIRST, conversation_id=f"d{number}")).status == 200
        turns = [one for one in hanging.engine.received[asked:] if one.body.get("prompt") != "x"]
        assert not turns
        assert other.received
        # Back by a probe.
        hanging.wake()
        served = asked
        numbers = itertools.count()

        async def served_again() -> bool:
            # Of new conversations: one that was served elsewhere stays there.
            answers = [stack.chat(FIRST, conversation_id=f"e{next(numbers)}") for _ in range(4)]
            assert {answer.status for answer in await asyncio.gather(*answers)} == {200}
            turns = [one for one in hanging.engine.received[served:] if one.orders is not None]
            return bool(turns)

        while not await served_again():
            pass


async def test_engines_join_and_leave_without_a_turn_lost(stack: Stack, decode: StubEngine) -> None:
    asked = [asyncio.create_task(stack.chat(FIRST, conversation_id=f"c{i}")) for i in range(8)]
    joining = await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    stack.registry.unregister(decode.engine)
    assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
    stack.engines.remove(decode)
    await stack.know(2)
    before = len(decode.received)
    for number in range(4):
        assert (await stack.chat(FIRST, conversation_id=f"d{number}")).status == 200
    assert len(decode.received) == before
    assert joining.received
    await decode.stop()


async def test_a_decode_engine_that_comes_back_after_all_were_gone_serves_without_a_restart(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await decode.stop()
    stack.registry.unregister(decode.engine)
    stack.engines.remove(decode)
    await stack.know(1)
    assert (await stack.chat(FIRST)).status == 503
    await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    assert (await stack.chat(FIRST)).status == 200


async def test_each_model_is_served_by_its_own_engines(stack: Stack) -> None:
    class Other(StubEngine):
        @property
        def engine(self) -> Engine:
            return replace(super().engine, model="other")

    engines = [
        await stack.add(kind(f"{role.value}-{kind.__name__}", role))
        for kind in (StubEngine, Other)
        for role in (EngineRole.PREFILL, EngineRole.DECODE)
    ]
    for model, (prefill, decode) in ((MODEL, engines[:2]), ("other", engines[2:])):
        before = [len(engine.received) for engine in engines]
        body = {"model": model, "messages": FIRST}
        assert (await stack.send("POST", "/v1/chat/completions", json=body)).status == 200
        grown = [
            engine for engine, count in zip(engines, before, strict=True) if len(engine.received) > count
        ]
        assert grown == [prefill, decode]


async def test_an_adapter_that_only_one_decode_engine_has_is_served_there(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    async def base_only(request: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)

    prefill.script = decode.script = base_only
    adapted = await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    messages: list[dict[str, Any]] = list(FIRST)
    for _ in range(2):
        body = {"model": "adapter", "messages": messages, "conversation_id": "c"}
        answer = await stack.send("POST", "/v1/chat/completions", json=body)
        assert answer.status == 200
        messages = said(messages, "hello", "and then?")
    assert [received.body["model"] for received in adapted.received] == ["adapter"] * 2
    assert answer.route == "append; short_suffix"


async def test_a_model_that_nobody_has_is_the_engines_404_and_makes_no_engine_suspect(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    async def unknown(request: web.Request, received: Received) -> web.StreamResponse:
        if received.body["model"] == "nobody":
            return web.json_response({"error": {"message": "no such model", "code": 404}}, status=404)
        return await decode.answer(request, received)

    decode.script = prefill.script = unknown
    other = await stack.add(StubEngine("decode-2", EngineRole.DECODE, script=unknown))
    first = await stack.chat(FIRST, conversation_id="c")
    assert first.status == 200
    lost = await stack.send("POST", "/v1/chat/completions", json={"model": "nobody", "messages": FIRST})
    assert (lost.status, lost.json["error"]["message"]) == (404, "no such model")
    again = await stack.chat(said(FIRST, "hello", "and then?"), conversation_id="c")
    assert again.route == "append; short_suffix"
    assert len(decode.received) + len(other.received) == 1 + 2 + 1


@pytest.mark.parametrize("router_settings", [{"slow_start_s": 0.001}], ids=["no slow start"])
async def test_ranks_behind_one_url_are_told_apart_by_their_header(stack: Stack) -> None:
    class Rank(StubEngine):
        rank = 0

        @property
        def engine(self) -> Engine:
            return replace(super().engine, data_parallel_rank=self.rank)

    first = Rank("decode-1", EngineRole.DECODE)
    await stack.add(first)
    second = Rank("decode-2", EngineRole.DECODE)
    second.url, second.rank = first.url, 1
    stack.registry.register(second.engine)
    await stack.know(2)
    ranks: set[str] = set()
    async with asyncio.timeout(BOUND_S):
        while ranks != {"0", "1"}:
            answers = await asyncio.gather(*(stack.chat(FIRST) for _ in range(4)))
            assert {answer.status for answer in answers} == {200}
            ranks = {received.headers["X-data-parallel-rank"] for received in first.received}
    leased = {orders(received).keep for received in first.received}
    assert len(leased) == len(first.received)
