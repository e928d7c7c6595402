"""OpenAI's Responses API through the router: both legs, its conversations, and the responses that it keeps."""

import json
from typing import Any

import pytest
from aiohttp import web

from stubs.answers import Counts, named_event, response, response_stream
from stubs.engines import MODEL, Received, StubEngine, send_chunks
from stubs.router import LONG, Answer, Stack, orders
from stubs.waiting import eventually

PATH = "/v1/responses"
FIRST = "tell me something about lighthouses " * 8
COUNTS = Counts(200, 5, 0)


async def ask(
    stack: Stack, said: object = FIRST, headers: dict[str, str] | None = None, **fields: Any
) -> Answer:
    body = {"model": MODEL, "input": said, **fields}
    return await stack.send("POST", PATH, json=body, headers=headers)


def events(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in raw.splitlines() if line.startswith(b"data: ")]


async def test_a_response_is_prefilled_elsewhere_with_one_token(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {}}]
    answer = await ask(
        stack,
        max_output_tokens=99,
        tools=tools,
        tool_choice="required",
        stop="x",
        top_logprobs=3,
        stream=False,
    )
    assert answer.status == 200
    assert answer.route == "recompute; first_turn"
    (first,), (second,) = prefill.received, decode.received
    assert (first.path, second.path) == (PATH, PATH)
    assert (first.body["max_output_tokens"], first.body["tool_choice"]) == (1, "none")
    assert not {"stop", "top_logprobs"} & set(first.body)
    assert (second.body["max_output_tokens"], second.body["stop"]) == (99, "x")
    assert first.body["cache_salt"] == second.body["cache_salt"]
    read, keep = orders(second).read, orders(first).keep
    assert read is not None
    assert keep is not None
    assert read.lease_id == keep.lease_id


async def test_no_engine_is_asked_to_store_anything(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await ask(stack, store=True, request_id="resp_mine")
    for received in (*prefill.received, *decode.received):
        assert received.body["store"] is False
        assert "request_id" not in received.body


@pytest.mark.parametrize("stream", [False, True])
async def test_a_previous_response_is_resolved_to_its_items(
    stack: Stack, prefill: StubEngine, decode: StubEngine, stream: bool
) -> None:
    first = await ask(stack, stream=stream)
    first_id = events(first.raw)[-1]["response"]["id"] if stream else first.json["id"]
    second = await ask(stack, LONG, previous_response_id=first_id, stream=stream)
    assert second.route == "readback; long_suffix"
    sent = decode.received[1].body
    assert "previous_response_id" not in sent
    assert [item["role"] for item in sent["input"]] == ["user", "assistant", "user"]
    assert sent["input"][1]["content"][0]["text"] == "hello"
    told = events(second.raw)[-1]["response"] if stream else second.json
    assert told["previous_response_id"] == first_id


async def test_a_chain_of_previous_responses_keeps_the_whole_history(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    last = (await ask(stack)).json["id"]
    for turn in range(3):
        last = (await ask(stack, f"and {turn}?", previous_response_id=last)).json["id"]
    said = decode.received[-1].body["input"]
    assert [item["content"] for item in said if item["role"] == "user"] == [
        FIRST,
        "and 0?",
        "and 1?",
        "and 2?",
    ]
    assert len(said) == 7


async def test_a_response_with_the_id_of_the_one_before_it_has_no_history(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    first = await ask(stack)

    async def answer_under_its_id(request: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response({**response("again", COUNTS), "id": first.json["id"]})

    decode.script = answer_under_its_id
    assert (await ask(stack, previous_response_id=first.json["id"])).status == 200
    assert (await ask(stack, previous_response_id=first.json["id"])).status == 404


async def test_an_unknown_previous_response_is_a_404_that_says_what_to_do(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    answer = await ask(stack, previous_response_id="resp_of_another_router")
    assert answer.status == 404
    error = answer.json["error"]
    assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
    assert prefill.received == decode.received == []


async def test_another_tenants_response_is_as_unknown_as_any(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    response_id = (await ask(stack, headers={"Authorization": "Bearer a"})).json["id"]
    other = {"Authorization": "Bearer b"}
    assert (await ask(stack, headers=other, previous_response_id=response_id)).status == 404
    for method in ("GET", "DELETE"):
        assert (await stack.send(method, f"{PATH}/{response_id}", headers=other)).status == 404


async def test_a_response_that_must_not_be_stored_is_not(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    response_id = (await ask(stack, store=False)).json["id"]
    assert (await ask(stack, previous_response_id=response_id)).status == 404


async def test_a_response_is_read_with_its_items_and_deleted_once(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    answer = await ask(stack)
    path = f"{PATH}/{answer.json['id']}"
    for spelled in (path, path.removeprefix("/v1"), "/v1" + path):
        assert (await stack.send("GET", spelled)).json == answer.json
    items = (await stack.send("GET", path + "/input_items")).json["data"]
    assert items == [{"role": "user", "content": FIRST}]
    assert (await stack.send("POST", path + "/cancel")).json["error"]["code"] == "not_in_background"
    assert (await stack.send("DELETE", path)).json["deleted"] is True
    assert (await stack.send("DELETE", path)).status == 404
    assert (await ask(stack, previous_response_id=answer.json["id"])).status == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_half_of_a_surrogate_pair_in_a_response_is_kept_and_goes_back_as_it_came(
    stack: Stack, prefill: StubEngine, decode: StubEngine, *, stream: bool
) -> None:
    decode.reply = "half \ud83d"
    first = await ask(stack, stream=stream)
    assert (first.status, rb"half \ud83d" in first.raw) == (200, True)
    whole = events(first.raw)[-1]["response"] if stream else first.json
    path = f"{PATH}/{whole['id']}"
    assert (await stack.send("GET", path)).json["output"] == whole["output"]
    second = await ask(stack, previous_response_id=whole["id"])
    assert second.status == 200
    assert decode.received[-1].body["input"][1] == whole["output"][0]
    items = await stack.send("GET", f"{PATH}/{second.json['id']}/input_items")
    assert items.json["data"][1] == whole["output"][0]


@pytest.mark.parametrize("field", ["background", "conversation"])
async def test_what_needs_a_store_at_the_engine_is_a_400(
    stack: Stack, prefill: StubEngine, decode: StubEngine, field: str
) -> None:
    answer = await ask(stack, **{field: True})
    assert answer.status == 400
    assert field in answer.json["error"]["message"]


async def test_a_client_that_sends_its_history_goes_on_without_an_id(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    first = await ask(stack, [{"role": "user", "content": [{"type": "input_text", "text": FIRST}]}])
    history = [
        {"role": "user", "content": FIRST},
        *first.json["output"],
        {"role": "user", "content": "more?"},
    ]
    second = await ask(stack, history)
    assert second.route == "append; short_suffix"
    assert second.headers["X-Conversation-Id"] == first.headers["X-Conversation-Id"]


async def test_calls_of_tools_go_on_with_their_results(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": '{"a": 1}'}
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return web.json_response(response("", COUNTS, output=[reasoning, call]))

    decode.script = answer
    await ask(stack)
    decode.script = None
    echoed = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": '{"a":1}'}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "done"}
    second = await ask(stack, [{"role": "user", "content": FIRST}, echoed, result])
    assert second.route == "append; short_suffix"


async def test_usage_is_learnt_in_the_apis_own_terms(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await ask(stack, headers={"X-Conversation-Id": "c"}, stream=True)
    (turn,) = await stack.turns("c")
    assert (turn["prompt_tokens"], turn["completion_tokens"], turn["ended"]) == (200, 5, "well")


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_a_stream_arrives_as_it_was_but_for_what_is_the_routers(
    stack: Stack, prefill: StubEngine, decode: StubEngine, size: int
) -> None:
    sent = response_stream("grüße", COUNTS)

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [sent[i : i + size] for i in range(0, len(sent), size)])

    decode.script = answer
    got = (await ask(stack, stream=True)).raw
    expected = events(sent)
    for one in expected:
        one.get("response", {}).pop("kv_transfer_params", None)
    assert events(got) == expected
    plain = [one for one in sent.split(b"\n\n") if b"kv_transfer_params" not in one]
    assert all(one in got.split(b"\n\n") for one in plain)


async def test_a_stream_that_breaks_ends_in_an_error_event_and_confirms_nothing(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    sent = response_stream("hello", COUNTS)

    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [sent[: len(sent) // 2]], close=True)

    decode.script = answer
    got = await ask(stack, headers={"X-Conversation-Id": "c"}, stream=True)
    assert b"event: error\n" in got.raw
    last = events(got.raw)[-1]
    assert (last["type"], last["code"]) == ("error", "engine_failed")
    assert stack.registry.confirmed == []


@pytest.mark.parametrize(("status", "confirmed"), [("completed", 1), ("incomplete", 1), ("failed", 0)])
async def test_a_response_is_confirmed_by_how_it_ends(
    stack: Stack, prefill: StubEngine, decode: StubEngine, status: str, confirmed: int
) -> None:
    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        whole = response("hello", COUNTS, status=status)
        begun = named_event(
            "response.created", {"type": "response.created", "response": {**whole, "output": []}}
        )
        return await send_chunks(
            request,
            [begun, named_event("response." + status, {"type": "response." + status, "response": whole})],
        )

    decode.script = answer
    assert (await ask(stack, headers={"X-Conversation-Id": "c"}, stream=True)).status == 200
    ended = (await stack.turns("c"))[0]["ended"]
    assert ended == ("well" if confirmed else "badly")
    await eventually(lambda: len(stack.registry.confirmed) == confirmed)
