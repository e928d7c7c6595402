"""An engine that cannot serve a turn, in whatever way it says so, is replaced by one that can."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from kvlease.core.records import EngineRole
from stubs.engines import MODEL, Received, Script, StubEngine, event, send_chunks
from stubs.router import FIRST, Answer, Stack


def answers(status: int, body: bytes, kind: str = "application/json") -> Script:
    async def script(request: web.Request, received: Received) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"Content-Type": kind})

    return script


def failed_choice(field: str) -> bytes:
    said = {"role": "assistant", "content": ""}
    choice = {"index": 0, field: said, "finish_reason": "error"}
    return json.dumps({"id": "x", "choices": [choice]}).encode()


def streams(*events: bytes) -> Script:
    async def script(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [b"".join(events)])

    return script


async def changes_protocol(request: web.Request, received: Received) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    )
    await asyncio.Event().wait()  # until the router leaves
    raise AssertionError


BUSY = b'{"error": {"message": "too busy", "code": 429}}'
WHOLE: dict[str, Script] = {
    "429": answers(429, BUSY),
    "408": answers(408, b'{"error": {"message": "too slow", "code": 408}}'),
    "503": answers(503, b'{"error": {"message": "going down", "code": 503}}'),
    "101": changes_protocol,
    "no JSON": answers(200, b"<html>", "text/html"),
    "no object": answers(200, b"[]"),
    "empty": answers(200, b""),
    "finish_reason error": answers(200, failed_choice("message")),
    "error object": answers(200, b'{"error": {"message": "out of memory"}}'),
}
ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
STREAMED: dict[str, Script] = {
    "429": WHOLE["429"],
    "408": WHOLE["408"],
    "503": WHOLE["503"],
    "101": changes_protocol,
    "no stream": answers(200, b"<html>", "text/html"),
    "empty": streams(),
    "finish_reason error": streams(ROLE, b"data: " + failed_choice("delta") + b"\n\n", b"data: [DONE]\n\n"),
    "error object": streams(ROLE, event({"error": {"message": "out of memory", "code": 500}})),
}


async def chat(stack: Stack, *, stream: bool) -> Answer:
    answer = await stack.chat(FIRST, conversation_id="c", stream=stream)
    assert answer.status == 200, answer.raw
    assert b"error" not in answer.raw
    return answer


@pytest.mark.parametrize("how", WHOLE)
async def test_a_prefill_engine_that_cannot_serve_is_replaced_and_then_done_without(
    stack: Stack, prefill: StubEngine, decode: StubEngine, how: str
) -> None:
    prefill.script = WHOLE[how]
    answer = await chat(stack, stream=False)
    assert answer.route == "recompute; prefill_failed"
    assert answer.json["choices"][0]["message"]["content"] == "hello"
    other = await stack.add(StubEngine("prefill-2", EngineRole.PREFILL))
    for number in range(2):
        assert (await stack.chat(FIRST, conversation_id=f"d{number}")).status == 200
    assert len(other.received) == 2


@pytest.mark.parametrize("how", WHOLE)
async def test_a_decode_engine_whose_whole_answer_is_none_is_replaced(
    stack: Stack, decode: StubEngine, how: str
) -> None:
    decode.script = WHOLE[how]
    other = await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    await chat(stack, stream=False)
    assert (len(decode.received), len(other.received)) == (1, 1)


@pytest.mark.parametrize("how", STREAMED)
async def test_a_decode_engine_that_fails_before_its_first_byte_is_replaced(
    stack: Stack, decode: StubEngine, how: str
) -> None:
    decode.script = STREAMED[how]
    other = await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    answer = await chat(stack, stream=True)
    assert answer.raw.endswith(b"data: [DONE]\n\n")
    assert (len(decode.received), len(other.received)) == (1, 1)


async def test_a_stream_in_which_an_engine_refuses_the_request_is_the_clients_and_says_nothing_of_the_engine(
    stack: Stack, decode: StubEngine
) -> None:
    decode.script = streams(
        event({"error": {"message": "no such grammar", "code": 400}}), b"data: [DONE]\n\n"
    )
    other = await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    answers = [await stack.chat(FIRST, conversation_id="c", stream=True) for _ in range(2)]
    assert all(b"no such grammar" in answer.raw for answer in answers)
    assert (len(decode.received), len(other.received)) == (2, 0)
    assert [turn["ended"] for turn in await stack.turns("c")] == ["refused", "refused"]


async def test_what_a_prefill_engine_computed_is_read_by_the_engine_that_is_less_busy(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    decode.script = WHOLE["429"]
    other = await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    await chat(stack, stream=True)
    assert len(prefill.received) == 1
    read = (other.received[0].orders or {})["read"]
    assert read == (decode.received[0].orders or {})["read"]


@pytest.mark.parametrize(
    ("how", "status", "told"),
    [("429", 429, "too busy"), ("408", 408, "too slow"), ("503", 503, "going down"), ("empty", 502, "")],
)
async def test_where_nobody_else_can_serve_the_client_gets_the_engines_own_answer(
    stack: Stack, decode: StubEngine, how: str, status: int, told: str
) -> None:
    decode.script = WHOLE[how]
    answer = await stack.chat(FIRST)
    assert answer.status == status
    assert told in answer.json["error"]["message"]
    await stack.add(StubEngine("decode-2", EngineRole.DECODE, script=WHOLE[how]))
    assert (await stack.chat(FIRST)).status == status


async def test_a_stream_that_fails_where_nobody_else_can_serve_says_so(
    stack: Stack, decode: StubEngine
) -> None:
    decode.script = STREAMED["finish_reason error"]
    answer = await stack.chat(FIRST, stream=True)
    events: list[Any] = [
        json.loads(line[6:]) for line in answer.raw.split(b"\n\n") if line.startswith(b"data: {")
    ]
    assert events[-2]["choices"][0]["finish_reason"] == "error"
    assert events[-1]["error"]["code"] == "engine_failed"


async def test_a_failed_message_of_the_anthropic_api_is_served_by_another_engine(
    stack: Stack, decode: StubEngine
) -> None:
    decode.script = answers(200, b'{"type": "error", "error": {"type": "api_error", "message": "no"}}')
    await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    body = {"model": MODEL, "max_tokens": 5, "messages": FIRST}
    answer = await stack.send("POST", "/v1/messages", json=body)
    assert (answer.status, answer.json["type"]) == (200, "message")
