"""Streams that go on at another engine, over what a simulated engine says: the rest is what it would have said."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kvlease.core.decisions import Decision
from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import EngineRole, KvLocation, PinOutcome
from kvlease.router.dialect import Api
from kvlease.router.resume import memory_of
from kvlease.router.sse import EventSplitter
from kvlease.runtime.clock import LoopClock
from kvlease.sim.engine import EngineSettings, SimEngine
from kvlease.sim.http import EngineApi
from kvlease.sim.side_channel import SideChannel
from stubs.engines import MODEL, Received, StubEngine, send_chunks
from stubs.router import FIRST, Answer, Stack, orders

TOKENS = 12


class NobodyElse:
    """No other holder answers."""

    async def pin(self, ask: PinAsk, sidecar_address: str) -> PinOutcome:
        return MissReason.UNREACHABLE

    def unpin(self, holder: Holder, lease_id: int, pin_id: str, sidecar_address: str) -> None:
        pass


class Model:
    """What all engines of a test say, from one simulated engine."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def events(self, received: Received) -> list[bytes]:
        body = {name: value for name, value in received.body.items() if name != "kv_transfer_params"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self._url + received.path, json=body) as answer,
        ):
            assert answer.status == 200
            return EventSplitter().feed(await answer.read())

    def engine(self, engine_id: str, *, events_max: int | None = None) -> StubEngine:
        """A decode engine; it dies after so many events of its first stream."""
        built = StubEngine(engine_id, EngineRole.DECODE)

        async def script(request: web.Request, received: Received) -> web.StreamResponse:
            events = await self.events(received)
            if events_max is None or len(built.received) > 1:
                return await send_chunks(request, events)
            return await send_chunks(request, events[:events_max], close=True)

        built.script = script
        return built


@pytest.fixture
async def model() -> AsyncIterator[Model]:
    settings = EngineSettings(total_blocks=256, model=MODEL, decode_step_s=0.0)
    engine = SimEngine(
        settings, Holder("e", "b"), KvLocation("127.0.0.1", 1), LoopClock(), NobodyElse(), SideChannel(0.0)
    )
    async with TestServer(EngineApi(engine).app()) as server:
        yield Model(str(server.make_url("")).rstrip("/"))
    await engine.close()


@pytest.fixture
def router_settings() -> dict[str, Any]:
    return {"resume_streams": True}


def told(answer: Answer) -> list[Any]:
    """The events that a client gets, without what differs between any two requests."""
    payloads = [event.decode().removeprefix("data: ").strip() for event in EventSplitter().feed(answer.raw)]
    events = [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]
    for event in events:
        if isinstance(event, dict):
            event.pop("id", None)
            event.pop("created", None)
            (event.get("usage") or {}).pop("prompt_tokens_details", None)
    return events


async def ask(stack: Stack, api: Api, **fields: Any) -> Answer:
    prompt = {"messages": FIRST} if api is Api.CHAT else {"prompt": FIRST[0]["content"]}
    body = {"model": MODEL, "stream": True, "max_tokens": TOKENS, "temperature": 0, **prompt, **fields}
    return await stack.send("POST", api.value, json=body)


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("events_max", [1, 5, TOKENS - 1])
@pytest.mark.parametrize("api", [Api.CHAT, Api.COMPLETIONS])
async def test_a_stream_that_breaks_off_goes_on_as_if_nothing_had_happened(
    stack: Stack, model: Model, api: Api, events_max: int, *, usage: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    await stack.add(model.engine("decode-1", events_max=events_max))
    other = await stack.add(model.engine("decode-2"))
    broken = await ask(stack, api, **options)
    assert broken.status == 200
    assert len(other.received) == 1
    whole = await ask(stack, api, **options)
    assert told(broken) == told(whole)
    ids = {json.loads(line[6:])["id"] for line in broken.raw.splitlines() if line.startswith(b"data: {")}
    assert len(ids) == 1
    assert b"token_ids" not in broken.raw
    assert other.received[0].path == "/v1/completions"
    assert other.received[0].body["max_tokens"] == TOKENS - events_max


async def test_the_lease_of_a_resumed_turn_is_the_second_engines(stack: Stack, model: Model) -> None:
    await stack.add(model.engine("decode-1", events_max=4))
    other = await stack.add(model.engine("decode-2"))
    assert (await ask(stack, Api.CHAT, conversation_id="c")).status == 200
    keep = orders(other.received[0]).keep
    assert keep is not None
    conversation = await stack.conversation("c")
    assert conversation["lease"]["engine_id"] == "decode-2"
    assert int(conversation["lease"]["lease_id"], 16) == keep.lease_id
    assert [turn["ended"] for turn in conversation["turns"]] == ["well"]


async def test_the_rest_of_a_stream_does_not_count_as_a_prompt_to_compute(stack: Stack, model: Model) -> None:
    asked, go_on = asyncio.Event(), asyncio.Event()
    await stack.add(model.engine("decode-1", events_max=4))
    other = model.engine("decode-2")

    async def hold_the_rest(request: web.Request, received: Received) -> web.StreamResponse:
        events = await model.events(received)
        if received.path != Api.COMPLETIONS.value:
            return await send_chunks(request, events)
        response = await send_chunks(request, events[:1])
        asked.set()
        await go_on.wait()
        for event in events[1:]:
            await response.write(event)
        return response

    other.script = hold_the_rest
    await stack.add(other)
    turn = asyncio.create_task(ask(stack, Api.CHAT))
    await asked.wait()
    seen = await ask(stack, Api.CHAT, conversation_id="other")
    read = await stack.send("GET", f"/v1/kvlease/decisions/{seen.headers['X-Request-Id']}")
    signals = Decision.from_json(read.json).signals.engines
    assert {one.engine_id: one.backlog_tokens for one in signals} == {"decode-1": 0, "decode-2": 0}
    go_on.set()
    assert (await turn).raw.endswith(b"data: [DONE]\n\n")


async def test_where_nobody_can_go_on_the_stream_ends_in_an_error_event(stack: Stack, model: Model) -> None:
    await stack.add(model.engine("decode-1", events_max=4))
    answer = await ask(stack, Api.CHAT)
    assert told(answer)[-1]["error"]["code"] == "engine_failed"


async def test_a_stream_is_resumed_once(stack: Stack, model: Model) -> None:
    await stack.add(model.engine("decode-1", events_max=4))
    await stack.add(model.engine("decode-2", events_max=3))
    third = await stack.add(model.engine("decode-3"))
    answer = await ask(stack, Api.CHAT)
    assert told(answer)[-1]["error"]["code"] == "engine_failed"
    assert len(told(answer)) == 4 + 3 + 1
    assert not third.received


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"seed": 1},
        {"stop": ["x"]},
        {"frequency_penalty": 0.5},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"n": 2},
        {"some_new_field": 1},
    ],
)
async def test_an_answer_whose_rest_depends_on_its_beginning_is_not_resumed(
    stack: Stack, model: Model, fields: dict[str, Any]
) -> None:
    first = await stack.add(model.engine("decode-1", events_max=4))
    other = await stack.add(model.engine("decode-2"))
    answer = await ask(stack, Api.CHAT, **fields)
    assert told(answer)[-1]["error"]["code"] == "engine_failed"
    assert not other.received
    assert "return_token_ids" not in first.received[0].body


def test_without_a_stream_there_is_nothing_to_resume() -> None:
    body = {"messages": FIRST, "max_tokens": 5}
    assert memory_of(Api.CHAT, {**body, "stream": True}) is not None
    assert memory_of(Api.CHAT, body) is None
    assert memory_of(Api.MESSAGES, {**body, "stream": True}) is None
