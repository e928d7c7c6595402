"""What agents send, as tables: each kind is served, and its next turn reuses what the one before left."""

import json
from typing import Any

import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kvlease.core.records import EngineRole
from stubs.answers import Counts, message_stream, response_stream
from stubs.engines import MODEL, Received, StubEngine, delta, event, send_chunks
from stubs.router import FIRST, LONG, Stack, running_stack, said

BILLING = "x-anthropic-billing-header: cc_version=2.1.88; cch={};"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
USER = FIRST[0]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/a.png"}}]},
        {
            "role": "user",
            "content": [{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}],
        },
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [CALL]},
        {"role": "assistant", "content": "a", "tool_calls": None, "function_call": None},
        {"role": "developer", "content": "a"},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "function", "name": "f", "content": "done"},
        {"role": "user", "content": ""},
        {"role": "user", "content": []},
        {"role": "user", "content": "a", "name": "somebody", "unknown": {"kept": [1]}},
    ],
)
async def test_messages_of_every_kind_reach_both_engines_and_are_recognized_again(
    stack: Stack, prefill: StubEngine, decode: StubEngine, message: dict[str, Any]
) -> None:
    history = [USER, message, {"role": "user", "content": "and?"}]
    assert (await stack.chat(history)).status == 200
    assert prefill.received[0].body["messages"] == decode.received[0].body["messages"] == history
    assert (await stack.chat(said(history, "hello", "more?"))).route == "append; short_suffix"


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"max_tokens": 10**9, "max_completion_tokens": 5},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 5},
        {"seed": 7, "logit_bias": {"1": 2.5}, "user": "u"},
        {"stop": "x"},
        {"stop": ["a", "b"]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"kvlease": 1}}}},
        {"metadata": {"kvlease": "mine"}, "prompt_cache_key": "k", "store": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
        {"unknown_field": {"deep": [None, 1.5, "x"]}},
        {"stream": True, "stream_options": {"include_usage": True}},
    ],
)
async def test_what_a_client_asks_for_reaches_the_decode_engine_as_it_is(
    stack: Stack, prefill: StubEngine, decode: StubEngine, fields: dict[str, Any]
) -> None:
    assert (await stack.chat(FIRST, **fields)).status == 200
    got = decode.received[0].body
    assert {name: got[name] for name in fields} == fields
    assert prefill.received[0].body["stream"] is False


@pytest.mark.parametrize(
    "tools", [["a", "b"], ["b", "a"], ["a", "b", "c"]], ids=["same", "reordered", "extended"]
)
async def test_tools_that_change_between_turns_cost_a_miss_and_nothing_else(
    stack: Stack, prefill: StubEngine, decode: StubEngine, tools: list[str]
) -> None:
    def defined(names: list[str]) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": name}} for name in names]

    await stack.chat(FIRST, tools=defined(["a", "b"]))
    second = await stack.chat(said(FIRST, "hello", "more?"), tools=defined(tools))
    assert second.status == 200
    assert (second.route == "append; short_suffix") == (tools == ["a", "b"])


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Claude-Code-Session-Id": "s"},
        {"X-Claude-Code-Session-Id": "s", "X-Claude-Code-Agent-Id": "a"},
        {"session_id": "s"},
        {"Session-Id": "s", "Thread-Id": "t"},
        {"X-Session-Affinity": "ses", "X-Session-Id": "ses"},
        {"X-Opencode-Session": "ses"},
    ],
)
async def test_sessions_of_agents_name_their_conversations(
    stack: Stack, prefill: StubEngine, decode: StubEngine, headers: dict[str, str]
) -> None:
    first = await stack.chat(FIRST, headers)
    second = await stack.chat(said(FIRST, "hello", LONG), headers)
    assert second.headers["X-Conversation-Id"] == first.headers["X-Conversation-Id"]
    assert next(iter(headers.values())) in second.headers["X-Conversation-Id"] or "Thread-Id" in headers
    assert second.route == "readback; long_suffix"


async def test_two_agents_of_one_session_have_conversations_of_their_own(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    session = {"X-Claude-Code-Session-Id": "s"}
    parent = await stack.chat(FIRST, session)
    agent = await stack.chat(FIRST, {**session, "X-Claude-Code-Agent-Id": "a"})
    assert parent.headers["X-Conversation-Id"] != agent.headers["X-Conversation-Id"]


async def test_a_nonce_before_the_prompt_is_told_wherever_turns_are_told(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    def system(turn: int) -> list[dict[str, Any]]:
        return [{"role": "system", "content": f"{BILLING.format(turn)}\nYou code."}, *FIRST]

    await stack.chat(system(1), conversation_id="c")
    answer = await stack.chat(said(system(2), "hello", "more?"), conversation_id="c")
    assert answer.route.endswith("; prompt_nonce")
    assert [turn["prompt_nonce"] for turn in await stack.turns("c")] == [True, True]
    assert decode.received[1].body["messages"][0] == system(2)[0]


class TestStripped:
    @pytest.fixture
    def router_settings(self) -> dict[str, Any]:
        return {"strip_prompt_nonces": True}

    async def test_without_its_nonce_a_prompt_is_reused(
        self, stack: Stack, prefill: StubEngine, decode: StubEngine
    ) -> None:
        def system(turn: int) -> list[dict[str, Any]]:
            return [{"role": "system", "content": f"{BILLING.format(turn)}\nYou code."}, *FIRST]

        await stack.chat(system(1))
        assert (await stack.chat(said(system(2), "hello", "more?"))).route == "append; short_suffix"
        assert decode.received[1].body["messages"][0]["content"] == "You code."


STREAMS = {
    "/v1/chat/completions": (
        b": comment\n\n"
        + b'data: {"choices": [{"index": 0,\ndata: "delta": {"role": "assistant", "content": null}}]}\r\n\r\n'
        + delta("grüße \U0001f600")
        + event(
            {"choices": [{"index": 1, "delta": {"content": "x"}}, {"index": 0, "delta": {"content": "y"}}]}
        )
        + event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        + b"data: [DONE]\n\n"
    ),
    "/v1/messages": b": ping\r\n\r\n" + message_stream("grüße", Counts(9, 2, 0)),
    "/v1/responses": response_stream("hi", Counts(9, 2, 0)),
}


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_cut_at_every_byte_arrives_the_same(
    stack: Stack, prefill: StubEngine, decode: StubEngine, path: str
) -> None:
    """One stream has a cut before every one of its bytes; another has all of it at once."""
    sent, body = STREAMS[path], {"model": MODEL, "messages": FIRST, "input": "x", "max_tokens": 9}
    pieces = [[sent[place : place + 1] for place in range(len(sent))], [sent]]

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, pieces.pop(0))

    decode.script = answer
    got = [(await stack.send("POST", path, json={**body, "stream": True})).raw for _ in range(2)]
    assert got[0] == got[1]
    if path != "/v1/responses":
        assert got[0] == sent


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "model", "messages", "input", "prompt", "system", "instructions", "tools", "tool_choice", "n", "stream",
    "stream_options", "max_tokens", "metadata", "previous_response_id", "thinking", "cache_salt", "store",
)  # fmt: skip


async def test_no_body_breaks_the_router() -> None:
    """Every answer is JSON, or a stream, with a status below 500; the router serves afterwards."""
    async with running_stack() as stack:
        await stack.add(StubEngine("prefill-1", EngineRole.PREFILL))
        await stack.add(StubEngine("decode-1", EngineRole.DECODE))
        bodies: list[tuple[str, dict[str, Any]]] = []

        @seed(4)
        @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(tuple(STREAMS)), st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
        def collect(path: str, body: dict[str, Any]) -> None:
            bodies.append((path, body))

        collect()
        for path, body in bodies:
            raw = json.dumps(body).encode()
            answer = await stack.send("POST", path, data=raw)
            assert answer.status < 500, (path, body)
            kind = answer.headers["Content-Type"]
            assert kind.startswith(("application/json", "text/event-stream")), (path, body)
        assert (await stack.chat(FIRST)).status == 200
