"""What crosses the router between clients and engines, and what does not."""

import json
from typing import Any

import pytest
from aiohttp import web

from kvlease.core.turn import TurnReport
from stubs.engines import MODEL, Received, StubEngine, delta, event, send_chunks
from stubs.router import FIRST, Stack, said


async def test_the_clients_own_parameters_reach_no_engine(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    planted = {"do_remote_prefill": True, "kvlease": {"version": 1}}
    schema = {"type": "object", "properties": {"kv_transfer_params": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    await stack.chat(
        FIRST,
        kv_transfer_params=planted,
        kvlease=planted,
        ec_transfer_params=planted,
        vllm_xargs={"kv_transfer_params": "x"},
        extra_body={"deep": [{"vllm_xargs": planted, "kept": 1}]},
        tools=tools,
    )
    for received in (prefill.received[0], decode.received[0]):
        assert set(received.body["kv_transfer_params"]) == {"kvlease"}
        assert not {"kvlease", "ec_transfer_params", "vllm_xargs"} & set(received.body)
        assert received.body["extra_body"] == {"deep": [{"kept": 1}]}
        assert received.body["tools"] == tools


async def test_the_routers_parameters_never_reach_the_client(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        chunk = {
            "choices": [{"index": 0, "delta": {"content": "x"}, "finish_reason": "stop"}],
            "kv_transfer_params": {"kvlease": {"secret": 1}},
        }
        return await send_chunks(request, [event(chunk), b"data: [DONE]\n\n"])

    whole = await stack.chat(FIRST)
    assert set(whole.json) == {"id", "choices", "usage"}
    decode.script = answer
    streamed = await stack.chat(FIRST, stream=True)
    assert b"secret" not in streamed.raw
    assert b'"content":"x"' in streamed.raw


async def test_the_prefill_leg_is_valid_whatever_the_client_asked_for(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    asked = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 700,
        "max_completion_tokens": 700,
        "min_tokens": 50,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 5,
        "tool_choice": "required",
        "seed": 7,
        "unknown_field": {"kept": True},
    }
    await stack.chat(FIRST, **asked)
    body = prefill.received[0].body
    assert (body["stream"], body["max_tokens"], body["max_completion_tokens"]) == (False, 1, 1)
    assert (body["min_tokens"], body["n"], body["tool_choice"]) == (1, 1, "none")
    assert not {"stream_options", "logprobs", "top_logprobs"} & set(body)
    assert (body["seed"], body["unknown_field"]) == (7, {"kept": True})
    got = decode.received[0].body
    assert {name: got[name] for name in asked} == asked


async def test_a_prompt_whose_logprobs_are_wanted_is_computed_by_the_decode_engine_alone_and_kept(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    answer = await stack.chat(FIRST, conversation_id="c", prompt_logprobs=1)
    assert answer.route == "recompute; prompt_logprobs"
    assert (len(prefill.received), len(decode.received)) == (0, 1)
    again = await stack.chat(said(FIRST, "hello", "more"), conversation_id="c")
    assert again.route == "append; short_suffix"


async def test_usage_that_the_client_did_not_ask_for_is_learnt_and_kept_back(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    answer = await stack.chat(FIRST, conversation_id="c", stream=True)
    assert decode.received[0].body["stream_options"] == {"include_usage": True}
    expected = decode.stream(Received("/v1/chat/completions", {}, {}))
    assert answer.raw == expected
    assert (await stack.turns("c"))[0]["prompt_tokens"] == 200


async def test_usage_that_the_client_asked_for_is_passed(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    answer = await stack.chat(FIRST, stream=True, stream_options={"include_usage": True})
    assert answer.raw == decode.stream(decode.received[0])


SAID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": FIRST, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": "once upon a time", "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": FIRST},
    "/v1/messages": {"messages": FIRST, "max_tokens": 8},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", SAID)
@pytest.mark.parametrize(("counted", "told"), [(200, 64), (10, 10)], ids=["handed over", "computed again"])
async def test_what_was_only_handed_over_is_not_counted_as_cached(
    stack: Stack, prefill: StubEngine, decode: StubEngine, path: str, counted: int, told: int, *, stream: bool
) -> None:
    prefill.report = TurnReport(200, 16, 48, 48, "read", kept_tokens=200)
    decode.cached_tokens = counted
    body = {"model": MODEL, "stream": stream, **SAID[path]}
    if not stream:
        body.pop("stream_options", None)
    answer = await stack.send("POST", path, json=body)
    if path == "/v1/messages":
        split = {"input_tokens": 200 - told, "output_tokens": 5, "cache_read_input_tokens": told}
        assert json.dumps(split)[1:-1].replace(" ", "") in answer.raw.decode().replace(" ", "")
    else:
        assert f'"cached_tokens":{told}' in answer.raw.decode().replace(" ", "")
        assert answer.raw.count(b'"cached_tokens"') == 1


async def test_what_an_engine_had_cached_itself_is_counted_as_it_says(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    decode.cached_tokens = 192
    answer = await stack.chat(said(FIRST, "hello", "and then?"), conversation_id="c")
    assert answer.route == "append; short_suffix"
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 192


@pytest.mark.parametrize("size", [1, 2, 3, 7])
async def test_a_stream_split_anywhere_arrives_byte_by_byte_as_it_was(
    stack: Stack, prefill: StubEngine, decode: StubEngine, size: int
) -> None:
    text = (
        b": a comment\n\nevent: note\ndata: {\ndata: }\n\n"
        + delta("grüße \U0001f600")
        + event({"choices": [{"index": 0, "delta": {"content": None}, "finish_reason": "length"}]})
        + b"data: [DONE]\r\n\r\n"
    )

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [text[i : i + size] for i in range(0, len(text), size)])

    decode.script = answer
    assert (await stack.chat(FIRST, conversation_id="c", stream=True)).raw == text
    assert (await stack.turns("c"))[0]["ended"] == "well"


async def test_connections_to_engines_are_used_again(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    for stream in (True, False, True):
        await stack.chat(FIRST, stream=stream)
    assert (len(prefill.connections), len(decode.connections)) == (1, 1)


async def test_request_ids_are_echoed_and_unique_at_the_engines(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    headers = {"X-Request-Id": "mine"}
    answers = [await stack.chat(FIRST, headers=headers) for _ in range(2)]
    assert [answer.headers["X-Request-Id"] for answer in answers] == ["mine", "mine"]
    sent = [received.headers["X-Request-Id"] for received in decode.received]
    assert len(set(sent)) == 2
    assert all(name.startswith("mine-") for name in sent)
    assert len((await stack.chat(FIRST)).headers["X-Request-Id"]) == 32
