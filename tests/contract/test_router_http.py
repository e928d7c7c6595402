"""The router's HTTP surface beside turns: bodies, ids, conversations, health."""

import asyncio
import io
import json
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import grpc.aio
import pytest

from stubs.engines import MODEL, StubEngine
from stubs.router import FIRST, Stack, said
from stubs.waiting import eventually


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b"a=b&c=d",
        b'{"messages": [], "conversation_id": []}',
        b'{"messages": [], "conversation_id": {"a": 1}}',
        b'{"messages": [], "conversation_id": "' + b"x" * 10_000 + b'"}',
    ],
)
async def test_a_body_that_is_none_is_a_400_in_openais_shape(
    stack: Stack, prefill: StubEngine, decode: StubEngine, raw: bytes
) -> None:
    answer = await stack.send("POST", "/v1/chat/completions", data=raw)
    assert answer.status == 400
    assert answer.json["error"]["type"] == "invalid_request_error"
    assert decode.received == []


@pytest.mark.parametrize("conversation_id", [None, "", 0, 17, "x" * 512])
async def test_any_reasonable_conversation_id_is_served(
    stack: Stack, prefill: StubEngine, decode: StubEngine, conversation_id: object
) -> None:
    answer = await stack.chat(FIRST, conversation_id=conversation_id)
    assert answer.status == 200
    assert "conversation_id" not in decode.received[0].body
    if conversation_id not in (None, ""):
        assert answer.headers["X-Conversation-Id"] == str(conversation_id)


@pytest.mark.parametrize("conversation_id", ["a\r\nX-Evil: 1", "größe", "\u0000"])
async def test_an_id_that_fits_no_header_is_served_and_not_echoed(
    stack: Stack, prefill: StubEngine, decode: StubEngine, conversation_id: str
) -> None:
    answer = await stack.chat(FIRST, conversation_id=conversation_id)
    assert answer.status == 200
    assert "X-Conversation-Id" not in answer.headers
    assert "X-Evil" not in answer.headers


@pytest.mark.parametrize("value", ["x" * 7000, "\udcff"], ids=["too long", "no text"])
async def test_a_session_header_that_is_no_id_costs_no_turn(
    stack: Stack, prefill: StubEngine, decode: StubEngine, value: str
) -> None:
    answer = await stack.chat(FIRST, headers={"X-Session-Id": value})
    assert answer.status == 200
    assert answer.headers["X-Conversation-Id"] != value


async def test_a_header_names_the_conversation(stack: Stack, prefill: StubEngine, decode: StubEngine) -> None:
    headers = {"x-conversation-id": "h"}
    await stack.chat(FIRST, headers=headers)
    answer = await stack.chat(said(FIRST, "hello", "more"), headers=headers)
    assert answer.route == "append; short_suffix"
    assert len(await stack.turns("h")) == 2


async def test_a_byte_order_mark_is_no_obstacle(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    raw = b"\xef\xbb\xbf" + json.dumps({"model": MODEL, "messages": FIRST}).encode()
    assert (await stack.send("POST", "/v1/chat/completions", data=raw)).status == 200


async def test_a_client_keeps_its_conversation_and_is_heard_at_once(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    beats = len(stack.registry.beats)
    answer = await stack.send("POST", "/v1/kvlease/conversations/c/renew", json={"duration_s": 120})
    assert (answer.status, answer.json) == (200, {"conversation_id": "c", "live": True})
    await eventually(lambda: len(stack.registry.beats) > beats)
    without_body = await stack.send("POST", "/v1/kvlease/conversations/c/renew")
    assert without_body.json["live"]


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"duration_s": 0}', b'{"duration_s": "1"}', b'{"duration_s": NaN}']
)
async def test_a_renewal_for_no_time_is_a_400(
    stack: Stack, prefill: StubEngine, decode: StubEngine, body: bytes
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    answer = await stack.send("POST", "/v1/kvlease/conversations/c/renew", data=body)
    assert answer.status == 400
    assert "error" in answer.json


async def test_a_client_lets_its_conversation_go_once(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    lease_id = int((await stack.chat(FIRST, conversation_id="c")).headers["X-Kvlease-Lease"], 16)
    release = "/v1/kvlease/conversations/c/release"
    assert (await stack.send("POST", release)).json == {"conversation_id": "c", "released": True}
    assert stack.registry.released == [lease_id]
    assert not (await stack.send("POST", release)).json["released"]
    assert not (await stack.send("POST", "/v1/kvlease/conversations/c/renew")).json["live"]


async def test_another_tenants_conversation_is_neither_kept_nor_let_go(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    stranger = {"Authorization": "Bearer stranger"}
    for verb in ("renew", "release"):
        answer = await stack.send("POST", f"/v1/kvlease/conversations/c/{verb}", headers=stranger)
        assert answer.status == 404
    assert stack.registry.released == []


async def test_paths_that_are_not_served_get_a_json_404(stack: Stack) -> None:
    answer = await stack.send("POST", "/sleep", json={})
    assert answer.status == 404
    assert answer.headers["Content-Type"].startswith("application/json")
    assert "error" in answer.json
    wrong = await stack.send("GET", "/v1/chat/completions")
    assert (wrong.status, wrong.headers["Allow"]) == (405, "POST")
    assert "error" in wrong.json
    assert (await stack.send("OPTIONS", "/v1/chat/completions")).status == 204


async def test_a_body_of_8_mb_is_served(stack: Stack, prefill: StubEngine, decode: StubEngine) -> None:
    content = "x" * (8 << 20)
    raw = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}]}).encode()
    answer = await stack.send("POST", "/v1/chat/completions", data=io.BytesIO(raw))
    assert answer.status == 200
    assert decode.received[0].body["messages"][0]["content"] == content


async def test_a_body_over_the_limit_is_a_json_413(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    answer = await stack.send("POST", "/v1/chat/completions", data=io.BytesIO(b" " * ((32 << 20) + 1)))
    assert answer.status == 413
    assert answer.json["error"]["code"] == "body_too_long"


async def test_models_come_from_an_engine_and_survive_its_death(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    assert (await stack.send("GET", "/v1/models")).json["data"][0]["id"] == MODEL
    await decode.stop()
    assert (await stack.send("GET", "/v1/models")).json["data"][0]["id"] == MODEL


async def test_health_follows_the_engines(stack: Stack, prefill: StubEngine, decode: StubEngine) -> None:
    assert (await stack.send("GET", "/health")).status == 200
    stack.registry.unregister(decode.engine)
    await stack.know(1)
    assert (await stack.send("GET", "/health")).status == 503


async def test_health_says_whose_it_is(stack: Stack, decode: StubEngine) -> None:
    assert (await stack.send("GET", "/health")).json["service"] == "kvlease-router"


async def test_turns_are_refused_with_a_reason_of_its_own_while_every_decode_engine_drains(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    async def refusal() -> tuple[int, str, str]:
        answer = await stack.chat(FIRST)
        error = answer.json.get("error", {})
        return answer.status, error.get("code", ""), error.get("message", "")

    stack.registry.register(replace(decode.engine, draining=True))
    draining = (503, "decode_engines_draining", "every decode engine is draining")
    async with asyncio.timeout(30):
        while await refusal() != draining:
            pass
    health = await stack.send("GET", "/health")
    assert (health.status, health.json["status"]) == (503, "every decode engine is draining")
    stack.registry.register(decode.engine)
    async with asyncio.timeout(30):
        while (await refusal())[0] != 200:
            pass


async def test_without_a_decode_engine_turns_are_refused_as_unavailable(
    stack: Stack, prefill: StubEngine
) -> None:
    answer = await stack.chat(FIRST)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["message"]) == (
        503,
        "unavailable",
        "no decode engine is registered",
    )
    assert answer.headers["Retry-After"] == "1"


async def test_a_grpc_client_at_the_http_address_is_one_line_in_the_log(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(stack.router.url.removeprefix("http://")) as channel:
        call = channel.unary_unary("/kvlease.v1.RoutingService/GetConversation")
        with pytest.raises(grpc.aio.AioRpcError):
            await call(b"", timeout=30.0)
    told = [record for record in caplog.records if record.name == "kvlease.http"]
    assert {(record.levelname, record.exc_info) for record in told} == {("WARNING", None)}
    assert all("gRPC has its own address" in record.getMessage() for record in told)
    assert "Traceback" not in caplog.text


UNREADABLE = {
    "no header": b"GET / HTTP/1.1\r\nno header\r\n\r\n",
    "no method": b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    "two lengths": b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-secret%s\r\n\r\n"
    % (b"a" * 70_000),
    "unknown encoding": b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    b"Content-Encoding: gzip\r\nContent-Length: 7\r\n\r\nno gzip",
}


@asynccontextmanager
async def sent_raw(stack: Stack, sent: bytes) -> AsyncGenerator[tuple[StreamReader, StreamWriter]]:
    """A connection on which bytes went out that no client library would send."""
    host, _, port = stack.router.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    async with asyncio.timeout(30):
        yield reader, writer
    writer.close()


@pytest.mark.parametrize("sent", UNREADABLE.values(), ids=UNREADABLE)
async def test_a_request_that_cannot_be_read_is_refused_in_json_and_its_keys_are_not_logged(
    stack: Stack, caplog: pytest.LogCaptureFixture, sent: bytes
) -> None:
    async with sent_raw(stack, sent) as (reader, _):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert head.split(b" ")[1] == b"400"
    assert json.loads(body)["error"]["code"] == "invalid_request"
    assert b"Content-Type: application/json" in head
    told = [record for record in caplog.records if record.name == "kvlease.http"]
    assert not [record for record in told if record.exc_info or "sk-secret" in record.getMessage()]


async def test_a_body_that_says_it_is_too_long_is_not_waited_for(stack: Stack) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    async with sent_raw(stack, head % (1 << 40)) as (reader, _):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413 ")


async def one_answer(reader: StreamReader) -> bytes:
    """An answer up to its length: the server may read on for a while before it closes."""
    head = await reader.readuntil(b"\r\n\r\n")
    _, _, length = head.lower().partition(b"content-length:")
    return head + await reader.readexactly(int(length.partition(b"\r\n")[0]))


BEGUN = b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 1000000\r\n\r\n{"
PATHS = [b"/v1/chat/completions", b"/v1/embeddings"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("router_settings", [{"body_idle_s": 0.05}], ids=["idle"])
async def test_a_client_that_stops_in_the_middle_of_its_body_is_given_up(
    stack: Stack, decode: StubEngine, path: bytes
) -> None:
    async with sent_raw(stack, BEGUN % path) as (reader, _):
        answer = await one_answer(reader)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"nothing of the body came for 0.05 s" in answer
    assert decode.received == []


@pytest.mark.parametrize("router_settings", [{"body_idle_s": 1.0}], ids=["idle"])
async def test_so_is_one_that_stops_in_the_middle_of_a_renewal_of_its_conversation(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    async with sent_raw(stack, BEGUN % b"/v1/kvlease/conversations/c/renew") as (reader, _):
        assert (await one_answer(reader)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("router_settings", [{"body_idle_s": 30.0, "body_timeout_s": 0.2}], ids=["whole"])
async def test_a_client_whose_body_trickles_in_is_given_up_when_its_time_is_over(
    stack: Stack, decode: StubEngine, path: bytes
) -> None:
    async with sent_raw(stack, BEGUN % path) as (reader, writer):

        async def trickle() -> None:
            with suppress(ConnectionError):
                while True:
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.01)

        trickling = asyncio.create_task(trickle())
        answer = await one_answer(reader)
        trickling.cancel()
        await asyncio.wait((trickling,))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"the body did not come in full within 0.2 s" in answer
    assert decode.received == []


async def test_metrics_count_turns_by_path_and_reason(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST)
    async with stack.session.get(stack.router.admin_url + "/metrics") as response:
        text = await response.text()
    assert 'kvlease_turns_total{ended="well",path="recompute",reason="first_turn"} 1.0' in text
