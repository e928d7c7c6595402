"""Engines that fail, and clients that leave."""

import asyncio
import json

import pytest
from aiohttp import web

from kvlease.core.records import EngineRole
from stubs.engines import MODEL, Received, StubEngine, delta, event, send_chunks
from stubs.router import FIRST, LONG, Stack, orders, said
from stubs.waiting import eventually


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("leg", "status"), [("prefill", 422), ("decode", 401), ("decode", 422), ("decode", 429)]
)
async def test_an_engines_refusal_keeps_status_body_and_retry_after(
    stack: Stack, prefill: StubEngine, decode: StubEngine, leg: str, status: int, *, stream: bool
) -> None:
    async def refuse(request: web.Request, received: Received) -> web.StreamResponse:
        return web.Response(status=status, headers={"Retry-After": "7"}, body=b'{"error":{"message":"busy"}}')

    (prefill if leg == "prefill" else decode).script = refuse
    answer = await stack.chat(FIRST, conversation_id="c", stream=stream)
    assert (answer.status, answer.headers["Retry-After"]) == (status, "7")
    assert answer.raw == b'{"error":{"message":"busy"}}'
    assert len(decode.received) == (0 if leg == "prefill" else 1)
    assert stack.registry.confirmed == []
    assert (await stack.turns("c"))[0]["ended"] == ("refused" if status == 422 else "badly")
    if leg == "decode":
        keep = orders(prefill.received[0]).keep
        assert keep is not None
        await eventually(lambda: stack.registry.unpinned == [keep.pin_id])


async def test_a_dead_prefill_engine_is_replaced_by_another(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    other = await stack.add(StubEngine("prefill-2", EngineRole.PREFILL))
    await prefill.stop()
    answer = await stack.chat(FIRST)
    assert (answer.status, answer.route) == (200, "recompute; first_turn")
    assert len(other.received) == 1


async def test_without_any_prefill_engine_alive_the_decode_engine_does_everything(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await prefill.stop()
    answer = await stack.chat(FIRST)
    assert (answer.status, answer.route) == (200, "recompute; prefill_failed")
    assert orders(decode.received[0]).read is None


async def test_every_reader_gets_a_pin_of_its_own_and_one_that_may_still_read_keeps_it(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    other = await stack.add(StubEngine("prefill-2", EngineRole.PREFILL))

    async def die(request: web.Request, received: Received) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        await asyncio.Event().wait()
        raise AssertionError

    victim, heir = (
        (prefill, other)
        if prefill.engine.holder.engine_id < other.engine.holder.engine_id
        else (other, prefill)
    )
    victim.script = die
    answer = await stack.chat(said(FIRST, "hello", LONG), conversation_id="c")
    assert answer.route == "readback; long_suffix"
    pins = [pin.pin_id for pin in stack.registry.pins]
    assert len(set(pins)) == 2
    read = orders(heir.received[-1]).read
    assert read is not None
    assert read.pin_id == pins[1]
    assert stack.registry.unpinned == []


async def test_a_dead_decode_engine_is_replaced_before_its_first_byte(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    other = await stack.add(StubEngine("decode-2", EngineRole.DECODE))
    await decode.stop()
    answer = await stack.chat(FIRST, stream=True)
    assert (answer.status, answer.route) == (200, "recompute; decode_failed")
    read = orders(other.received[0]).read
    asked = orders(prefill.received[0]).keep
    assert read is not None
    assert asked is not None
    assert read.pin_id == asked.pin_id


async def test_kv_that_a_broken_decode_engine_may_be_reading_is_given_to_no_other(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    other = await stack.add(StubEngine("decode-2", EngineRole.DECODE))

    async def die(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [b"data: {"], close=True)

    decode.script = die
    answer = await stack.chat(FIRST, stream=True)
    assert (answer.status, answer.route) == (200, "recompute; decode_failed")
    assert orders(other.received[0]).read is None
    assert stack.registry.unpinned == []


@pytest.mark.parametrize("status", [408, 500, 504])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_pin_under_which_a_request_may_still_be_read_for_is_not_ended_when_a_fault_is_answered(
    stack: Stack, prefill: StubEngine, decode: StubEngine, leg: str, status: int
) -> None:
    """A proxy that gives up answers 504 while the engine behind it goes on, and caches what it READs."""
    await stack.chat(FIRST, conversation_id="c")

    async def give_up(_request: web.Request, _received: Received) -> web.StreamResponse:
        return web.Response(status=status, body=b"gone")

    async def refuse(_request: web.Request, _received: Received) -> web.StreamResponse:
        return web.Response(status=422, body=b"wrong")

    reader = prefill if leg == "prefill" else decode
    serve, reader.script = reader.script, give_up
    await stack.chat(said(FIRST, "hello", LONG), conversation_id="c")
    assert orders(reader.received[1]).read is not None
    prefill.script, decode.script = serve, refuse
    await stack.chat(FIRST, conversation_id="d")
    keep = orders(prefill.received[-1]).keep
    assert keep is not None
    await eventually(lambda: stack.registry.unpinned == [keep.pin_id])


@pytest.mark.parametrize("others", [0, 1])
async def test_a_decode_engine_that_answers_with_a_fault_is_replaced_where_another_can_serve(
    stack: Stack, prefill: StubEngine, decode: StubEngine, others: int
) -> None:
    async def fault(_request: web.Request, _received: Received) -> web.StreamResponse:
        return web.json_response({"error": {"message": "the engine core is dead"}}, status=500)

    decode.script = fault
    for number in range(others):
        await stack.add(StubEngine(f"decode-{number + 2}", EngineRole.DECODE))
    answer = await stack.chat(FIRST, stream=True)
    if others:
        assert (answer.status, answer.route) == (200, "recompute; decode_failed")
    else:
        assert (answer.status, answer.json["error"]["message"]) == (500, "the engine core is dead")


async def test_without_a_decode_engine_the_client_is_told_to_come_back(stack: Stack) -> None:
    answer = await stack.chat(FIRST)
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    assert answer.json["error"]["type"] == "server_error"


async def test_when_every_decode_engine_is_dead_the_answer_is_503(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await decode.stop()
    answer = await stack.chat(FIRST)
    assert answer.status == 503
    asked = orders(prefill.received[0]).keep
    assert asked is not None
    await eventually(lambda: stack.registry.unpinned == [asked.pin_id])


async def test_a_stream_that_breaks_midway_ends_with_an_error_event(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    async def die(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [delta("a"), delta("b")[:9]], close=True)

    decode.script = die
    answer = await stack.chat(FIRST, conversation_id="c", stream=True)
    assert answer.raw.startswith(delta("a"))
    error = json.loads(answer.raw.removeprefix(delta("a")).removeprefix(b"data: "))
    assert error["error"]["type"] == "server_error"
    assert (await stack.turns("c"))[0]["ended"] == "badly"
    assert stack.registry.confirmed == []


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_stream_of_several_prompts_that_breaks_before_all_of_them_are_answered_is_no_whole_answer(
    stack: Stack, decode: StubEngine, choices: int
) -> None:
    def said_of(index: int, finish: str | None) -> bytes:
        return event({"choices": [{"index": index, "text": "a", "finish_reason": finish}]})

    begun = [said_of(index, None) for index in range(2 * choices)]
    ended = [said_of(index, "stop") for index in range(2 * choices)]

    async def answer_all_but_one(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [*begun, *ended[:-1]], close=True)

    async def answer_all(request: web.Request, received: Received) -> web.StreamResponse:
        return await send_chunks(request, [*begun, *ended], close=True)

    body = {"model": MODEL, "prompt": ["x", "y"], "stream": True, "n": choices, "conversation_id": "c"}
    for script, goes_on in ((answer_all_but_one, b'data: {"error":'), (answer_all, b"")):
        decode.script = script
        raw = (await stack.send("POST", "/v1/completions", json=body)).raw
        told = b"".join(begun + ended[:-1] if goes_on else begun + ended)
        assert raw[: len(told) + len(goes_on)] == told + goes_on
    assert [turn["ended"] for turn in await stack.turns("c")] == ["badly", "well"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_finish_reason_error_is_a_failure(
    stack: Stack, prefill: StubEngine, decode: StubEngine, *, stream: bool
) -> None:
    async def fail(request: web.Request, received: Received) -> web.StreamResponse:
        if stream:
            end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "error"}]}
            return await send_chunks(request, [delta("a"), event(end), b"data: [DONE]\n\n"])
        whole = decode.whole(received)
        whole["choices"][0]["finish_reason"] = "error"
        return web.json_response(whole)

    decode.script = fail
    answer = await stack.chat(FIRST, conversation_id="c", stream=stream)
    assert answer.status == (200 if stream else 502)
    assert b'"server_error"' in answer.raw
    assert stack.registry.confirmed == []


async def test_a_fault_of_the_router_is_a_json_500(
    stack: Stack, prefill: StubEngine, decode: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stack.chat(FIRST, conversation_id="c")

    async def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(stack.registry, "pin", fail)
    answer = await stack.chat(said(FIRST, "hello", LONG), conversation_id="c")
    assert answer.status == 500
    assert answer.json["error"]["type"] == "server_error"
    assert b"a bug" not in answer.raw


async def test_a_client_that_leaves_during_the_prefill_leg_aborts_it(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")

    async def hang(request: web.Request, received: Received) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    prefill.script = hang
    turn = asyncio.create_task(stack.chat(said(FIRST, "hello", LONG), conversation_id="c"))
    await eventually(lambda: len(prefill.received) == 2)
    turn.cancel()
    async with asyncio.timeout(30):
        await prefill.aborted.wait()
    await eventually_turn_ended(stack, "aborted")
    assert len(decode.received) == 1
    assert stack.registry.unpinned == []


async def test_a_client_that_ends_its_side_of_the_connection_has_left(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    """Nobody can tell a half-closed connection from one whose client is gone before something is written to it."""

    async def hang(request: web.Request, received: Received) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    prefill.script = hang
    raw = json.dumps({"model": MODEL, "messages": FIRST, "conversation_id": "c"}).encode()
    host, _, port = stack.router.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw) + raw
    )
    await eventually(lambda: prefill.received)
    writer.write_eof()
    async with asyncio.timeout(30):
        await prefill.aborted.wait()
        assert await reader.read() == b""
    writer.close()
    await eventually_turn_ended(stack, "aborted")


async def test_a_client_that_leaves_while_the_pin_is_asked_for_leaves_no_pin(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    stack.registry.pin_gate = asyncio.Event()
    turn = asyncio.create_task(stack.chat(said(FIRST, "hello", LONG), conversation_id="c"))
    await eventually(lambda: stack.registry.pins)
    turn.cancel()
    await eventually(lambda: stack.registry.unpinned == [stack.registry.pins[0].pin_id])
    assert len(prefill.received) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_during_the_decode_leg_aborts_it_and_confirms_nothing(
    stack: Stack, prefill: StubEngine, decode: StubEngine, *, stream: bool
) -> None:
    async def hang(request: web.Request, received: Received) -> web.StreamResponse:
        if stream:
            await send_chunks(request, [delta("a")])
        await asyncio.Event().wait()
        raise AssertionError

    decode.script = hang
    turn = asyncio.create_task(stack.chat(FIRST, conversation_id="c", stream=stream))
    await eventually(lambda: decode.received)
    turn.cancel()
    async with asyncio.timeout(30):
        await decode.aborted.wait()
    await eventually_turn_ended(stack, "aborted")
    assert stack.registry.confirmed == []


async def eventually_turn_ended(stack: Stack, ended: str) -> None:
    async with asyncio.timeout(30):
        while (await stack.turns("c"))[-1]["ended"] != ended:
            await asyncio.sleep(0.002)
