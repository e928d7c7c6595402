"""Anthropic's Messages API through the router: both legs, its conversations, errors in its shape."""

import json
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from kvlease.core.records import EngineRole
from stubs.answers import Counts, message, message_stream, named_event
from stubs.engines import MODEL, Received, StubEngine, send_chunks
from stubs.router import LONG, Answer, Stack, orders
from stubs.waiting import eventually

PATH = "/v1/messages"
TEXT = "tell me something about lighthouses " * 8
FIRST = [{"role": "user", "content": TEXT}]
COUNTS = Counts(200, 5, 64)
BILLING = "x-anthropic-billing-header: cc_version=2.1.{}; cch={};"


async def ask(
    stack: Stack, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **fields: Any
) -> Answer:
    body = {"model": MODEL, "max_tokens": 100, "messages": messages, **fields}
    return await stack.send("POST", PATH, json=body, headers=headers)


def said(text: str, reply: str = "hello") -> list[dict[str, Any]]:
    return [*FIRST, {"role": "assistant", "content": reply}, {"role": "user", "content": text}]


async def test_a_message_is_prefilled_elsewhere_with_one_token(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    answer = await ask(
        stack,
        FIRST,
        thinking={"type": "enabled", "budget_tokens": 1024},
        stop_sequences=["x"],
        tools=[{"name": "f", "input_schema": {"type": "object"}}],
        tool_choice={"type": "any"},
    )
    assert answer.status == 200
    assert answer.route == "recompute; first_turn"
    (first,), (second,) = prefill.received, decode.received
    assert (first.path, second.path) == (PATH, PATH)
    assert (first.body["max_tokens"], first.body["tool_choice"]) == (1, {"type": "none"})
    assert not {"thinking", "stop_sequences"} & set(first.body)
    assert second.body["thinking"] == {"type": "enabled", "budget_tokens": 1024}
    assert first.body["cache_salt"] == second.body["cache_salt"]
    assert orders(second).read is not None
    assert "kv_transfer_params" not in answer.json


@pytest.mark.parametrize("kind", ["disabled", "adaptive"])
async def test_thinking_that_shapes_the_prompt_reaches_both_legs(
    stack: Stack, prefill: StubEngine, decode: StubEngine, kind: str
) -> None:
    await ask(stack, FIRST, thinking={"type": kind})
    assert prefill.received[0].body["thinking"] == decode.received[0].body["thinking"] == {"type": kind}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_next_turn_finds_its_conversation_by_what_was_said(
    stack: Stack, prefill: StubEngine, decode: StubEngine, stream: bool
) -> None:
    await ask(stack, FIRST, stream=stream)
    assert (await ask(stack, said(LONG), stream=stream)).route == "readback; long_suffix"


async def test_blocks_markers_and_attribution_that_change_do_not_hide_a_history(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    def system(turn: int) -> list[dict[str, Any]]:
        return [
            {"type": "text", "text": BILLING.format(turn, turn)},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ]

    tools = [{"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}]
    marked = [
        {"role": "user", "content": [{"type": "text", "text": TEXT, "cache_control": {"type": "ephemeral"}}]}
    ]
    await ask(stack, marked, system=system(1), tools=tools)
    bare = [{"name": "f", "input_schema": {"type": "object"}}]
    second = await ask(stack, said("more?"), system=system(2), tools=bare)
    assert second.route == "append; short_suffix"


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_of_tools_go_on_with_their_results(
    stack: Stack, prefill: StubEngine, decode: StubEngine, stream: bool
) -> None:
    text = {"type": "text", "text": "let me see"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"path": "a", "n": 1}}
    whole = message("", COUNTS, content=[text, call], stop_reason="tool_use")
    events = [
        {"type": "message_start", "message": {**whole, "content": []}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "let me see"}},
        {"type": "content_block_start", "index": 2, "content_block": {**call, "input": {}}},
        {
            "type": "content_block_delta",
            "index": 2,
            "delta": {"type": "input_json_delta", "partial_json": '{"path"'},
        },
        {
            "type": "content_block_delta",
            "index": 2,
            "delta": {"type": "input_json_delta", "partial_json": ': "a", "n": 1}'},
        },
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 3}},
        {"type": "message_stop"},
    ]

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        if received.body.get("stream"):
            return await send_chunks(request, [named_event(str(one["type"]), one) for one in events])
        return web.json_response(whole)

    decode.script = answer
    await ask(stack, FIRST, stream=stream)
    decode.script = None
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "done"}]}
    history = [*FIRST, {"role": "assistant", "content": [text, call]}, {"role": "user", "content": [result]}]
    assert (await ask(stack, history)).route == "append; short_suffix"


async def test_a_stream_arrives_byte_by_byte_as_it_was(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    sent = b": ping\n\n" + message_stream("grüße", COUNTS)

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [sent[i : i + 3] for i in range(0, len(sent), 3)])

    decode.script = answer
    prefill.report = replace(prefill.report, local_tokens=COUNTS.cached_tokens)
    answered = await ask(stack, FIRST, {"X-Conversation-Id": "c"}, stream=True)
    assert answered.raw == sent
    (turn,) = await stack.turns("c")
    assert (turn["prompt_tokens"], turn["completion_tokens"], turn["ended"]) == (200, 5, "well")


async def test_a_stream_that_breaks_ends_in_an_error_event_of_the_api(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    sent = message_stream("hello", COUNTS)

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [sent[: len(sent) // 2]], close=True)

    decode.script = answer
    got = (await ask(stack, FIRST, stream=True)).raw
    _, _, last = got.rpartition(b"event: error\ndata: ")
    assert json.loads(last) == {
        "type": "error",
        "error": {
            "type": "api_error",
            "message": "the decode engine broke off its answer",
            "code": "engine_failed",
        },
    }


@pytest.mark.parametrize(
    ("reason", "ended"),
    [("end_turn", "well"), ("max_tokens", "well"), ("stop_sequence", "well"), (None, "badly")],
)
async def test_a_message_is_confirmed_by_its_stop_reason(
    stack: Stack, prefill: StubEngine, decode: StubEngine, reason: str | None, ended: str
) -> None:
    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response(message("hello", COUNTS, stop_reason=reason))

    decode.script = answer
    await ask(stack, FIRST, {"X-Conversation-Id": "c"})
    assert (await stack.turns("c"))[0]["ended"] == ended
    await eventually(lambda: len(stack.registry.confirmed) == (ended == "well"))


async def test_errors_have_anthropics_shape_wherever_they_come_from(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    async def refuse(request: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}, status=400
        )

    bad = await stack.send("POST", PATH, data=b"{")
    assert (bad.status, bad.json["type"], bad.json["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    prefill.script = refuse
    refused = await ask(stack, FIRST)
    assert refused.status == 400
    assert refused.json["error"] == {
        "type": "invalid_request_error",
        "message": "too long",
        "code": "engine_error",
    }
    wrong = await stack.send("GET", PATH)
    assert (wrong.status, wrong.json["type"]) == (405, "error")
    assert refused.headers["Request-Id"] == refused.headers["X-Request-Id"]


async def test_without_an_engine_a_client_of_this_api_is_told_to_come_back(stack: Stack) -> None:
    answer = await ask(stack, FIRST)
    assert (answer.status, answer.json["error"]["type"]) == (503, "overloaded_error")
    assert answer.headers["Retry-After"] == "1"


async def test_tokens_are_counted_by_an_engine_and_not_in_a_turn(stack: Stack, decode: StubEngine) -> None:
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "context-1m"}
    answer = await stack.send(
        "POST", PATH + "/count_tokens?beta=true", json={"model": MODEL, "messages": FIRST}, headers=headers
    )
    assert answer.status == 200
    (received,) = [one for engine in stack.engines for one in engine.received]
    assert received.path == PATH + "/count_tokens?beta=true"
    assert received.headers["anthropic-beta"] == "context-1m"
    assert "X-Kvlease-Route" not in answer.headers


async def test_a_query_like_betas_is_no_obstacle(stack: Stack) -> None:
    await stack.add(StubEngine("decode-1", EngineRole.DECODE))
    body = {"model": MODEL, "max_tokens": 9, "messages": FIRST}
    assert (await stack.send("POST", PATH + "?beta=true", json=body)).status == 200
