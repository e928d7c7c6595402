"""What is no turn: other paths, models, spellings of paths, CORS, and odd bodies."""

import asyncio
import gzip
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import FormData, web
from yarl import URL

from kvlease.core.records import EngineRole
from kvlease.router.passing import FORM_MODEL
from stubs.engines import MODEL, Received, StubEngine, send_chunks
from stubs.router import FIRST, Answer, Stack


def received(stack: Stack) -> list[Received]:
    return [one for engine in stack.engines for one in engine.received]


async def send_as_it_is(stack: Stack, target: str) -> Answer:
    """A request whose target no client library makes plainer."""
    url = URL(stack.router.url + target, encoded=True)
    async with stack.session.post(url, json={}) as response:
        return Answer(response.status, response.headers, await response.read())


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ("/v1/embeddings", "/v1/embeddings"),
        ("/embeddings/", "/v1/embeddings"),
        ("/tokenize", "/tokenize"),
        ("/v1/tokenize", "/tokenize"),
        ("/detokenize", "/detokenize"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/rerank", "/rerank"),
        ("/v1/something/new?x=1", "/v1/something/new?x=1"),
    ],
)
async def test_other_paths_are_passed_to_an_engine(
    stack: Stack, decode: StubEngine, asked: str, served: str
) -> None:
    planted = {"kv_transfer_params": {"x": 1}, "deep": [{"kvlease": 1, "kept": 2}]}
    answer = await stack.send("POST", asked, json={"model": MODEL, "input": "a", **planted})
    assert (answer.status, answer.json["served"]) == (200, served)
    (got,) = received(stack)
    assert got.body["deep"] == [{"kept": 2}]
    assert "kv_transfer_params" not in got.body
    assert len(got.body["cache_salt"]) == 32


@pytest.mark.parametrize(
    "path",
    [
        "/sleep",
        "/reset_prefix_cache",
        "/collective_rpc",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter/",
        "/v1/chat/completions/batch",
        "/v1/kvlease/anything",
        "/v1/../sleep",
        "/v1/%2e%2e/sleep",
        "/v1/load%255Flora_adapter",
        "/v1/chat%252Fcompletions%252Fbatch",
        "/v1//load_lora_adapter",
        "/v1/embeddings%20HTTP/1.1",
        "/v1/embeddings%3Fx",
        "/inference/v1/generate",
        "/docs",
    ],
)
async def test_what_operates_an_engine_or_goes_past_the_salt_is_served_to_nobody(
    stack: Stack, decode: StubEngine, path: str
) -> None:
    answer = await send_as_it_is(stack, path)
    assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")
    assert received(stack) == []


async def test_a_query_reaches_an_engine_as_it_came(stack: Stack, decode: StubEngine) -> None:
    answer = await send_as_it_is(stack, "/v1/embeddings?a=%0d%0aX:%20y&b=%26")
    assert answer.status == 200
    assert answer.json["served"] == "/v1/embeddings?a=%0d%0aX:%20y&b=%26"


async def test_a_request_goes_to_an_engine_that_serves_its_model(stack: Stack) -> None:
    for name, model in (("decode-1", "chat"), ("decode-2", "embedder")):
        await stack.add(StubEngine(name, EngineRole.DECODE, model=model))
    for _ in range(3):
        answer = await stack.send("POST", "/v1/embeddings", json={"model": "embedder", "input": "a"})
        assert answer.json["by"] == "decode-2"


async def test_a_request_that_no_engine_got_is_sent_to_another(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await prefill.stop()
    for _ in range(3):
        assert (await stack.send("POST", "/tokenize", json={"prompt": "a"})).json["by"] == "decode-1"
    await decode.stop()
    answer = await stack.send("POST", "/tokenize", json={"prompt": "a"})
    assert (answer.status, answer.json["error"]["code"]) == (503, "unavailable")


async def test_an_engines_page_of_html_becomes_an_error_in_json(stack: Stack, decode: StubEngine) -> None:
    async def answer(request: web.Request, _: Received) -> web.StreamResponse:
        return web.Response(status=502, text="<html>", content_type="text/html")

    for engine in stack.engines:
        engine.script = answer
    for path in ("/v1/embeddings", "/v1/chat/completions"):
        body = {"model": MODEL, "messages": FIRST}
        got = await stack.send("POST", path, json=body)
        assert (got.status, got.json["error"]["code"]) == (502, "engine_error")


async def test_a_stream_of_another_path_is_passed_as_it_comes(stack: Stack, decode: StubEngine) -> None:
    sent = [b": hi\n\n", b"data: 1\r\n\r\n", b"data: [DONE]\n\n"]

    async def answer(request: web.Request, _: Received) -> web.StreamResponse:
        return await send_chunks(request, sent)

    for engine in stack.engines:
        engine.script = answer
    assert (await stack.send("POST", "/v1/new", json={})).raw == b"".join(sent)


async def test_a_stream_of_another_path_that_breaks_is_no_whole_answer(
    stack: Stack, decode: StubEngine
) -> None:
    async def answer(request: web.Request, _: Received) -> web.StreamResponse:
        return await send_chunks(request, [b"data: 1\n\n"], close=True)

    for engine in stack.engines:
        engine.script = answer
    with pytest.raises(aiohttp.ClientError):
        await stack.send("POST", "/v1/new", json={})


async def test_a_form_is_passed_unless_it_names_what_is_the_routers(stack: Stack, decode: StubEngine) -> None:
    form = FormData(default_to_multipart=True)
    form.add_field("file", b"\x00\xff", filename="a.wav")
    assert (await stack.send("POST", "/v1/audio/transcriptions", data=form)).status == 200
    assert b"\x00\xff" in received(stack)[0].raw
    planted = FormData(default_to_multipart=True)
    planted.add_field("vllm_xargs", "{}")
    assert (await stack.send("POST", "/v1/audio/transcriptions", data=planted)).status == 400
    assert len(received(stack)) == 1


@pytest.mark.parametrize(
    "name", ["name*=utf-8''vllm%5Fxargs", 'name*0="vllm_"; name*1="xargs"', "NAME *=us-ascii'en'vllm%5Fxargs"]
)
async def test_a_form_whose_names_have_to_be_decoded_is_not_passed(
    stack: Stack, decode: StubEngine, name: str
) -> None:
    form = f"--b\r\nContent-Disposition: form-data; {name}\r\n\r\n{{}}\r\n--b--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    answer = await stack.send("POST", "/v1/audio/transcriptions", data=form.encode(), headers=headers)
    assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_request")
    assert received(stack) == []


async def test_a_form_goes_to_an_engine_that_serves_its_model(stack: Stack, decode: StubEngine) -> None:
    other = await stack.add(StubEngine("speech", EngineRole.DECODE, model="whisper"))
    for model in ("whisper", MODEL, "whisper", MODEL):
        form = FormData(default_to_multipart=True)
        form.add_field("file", b"\x00\xff", filename="a.wav")
        form.add_field("model", model)
        assert (await stack.send("POST", "/v1/audio/transcriptions", data=form)).status == 200
    assert (len(other.received), len(received(stack))) == (2, 4)


def test_a_forms_model_is_looked_for_in_time_that_grows_with_the_form_only() -> None:
    def form(head_lines: int) -> bytes:
        return (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n'
            + b"A: b\r\n" * head_lines
            + b"\r\nm\r\n"
        )

    named = FORM_MODEL.search(form(4))
    assert named is not None
    assert named.group(1) == b"m"
    # A head of any length would be read anew from every line of a form that begins its fields so.
    assert FORM_MODEL.search(form(5)) is None
    for line in (b";name=model\r\n", b" \r\n"):
        assert FORM_MODEL.search(b";name=model\r\n" + line * 10_000) is None


# --- models --------------------------------------------------------------------------------------------------------


async def test_models_are_merged_over_engines_and_one_is_read_by_its_name(stack: Stack) -> None:
    for name, model in (("decode-1", "org/a"), ("decode-2", "org/b"), ("decode-3", "org/a")):
        await stack.add(StubEngine(name, EngineRole.DECODE, model=model))
    for path in ("/v1/models", "/models", "/v1/models/"):
        assert [model["id"] for model in (await stack.send("GET", path)).json["data"]] == ["org/a", "org/b"]
    for path in ("/v1/models/org/b", "/models/org/b", "/v1/v1/models/org/b"):
        assert (await stack.send("GET", path)).json["id"] == "org/b"
    missing = await stack.send("GET", "/v1/models/org/c")
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


# --- the surface ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/chat/completions/", "/chat/completions", "/v1/v1/chat/completions"],
)
async def test_a_path_is_served_as_clients_write_it(stack: Stack, decode: StubEngine, path: str) -> None:
    answer = await stack.send("POST", path, json={"model": MODEL, "messages": FIRST})
    assert answer.status == 200
    assert decode.received[0].path == "/v1/chat/completions"


async def test_a_browser_may_ask_first_and_read_the_answer(stack: Stack, decode: StubEngine) -> None:
    origin = {"Origin": "https://app.example"}
    asked = {**origin, "Access-Control-Request-Headers": "authorization, x-stainless-os"}
    preflight = await stack.send("OPTIONS", "/v1/chat/completions", headers=asked)
    assert preflight.status == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == "*"
    assert preflight.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    for stream in (False, True):
        answer = await stack.chat(FIRST, stream=stream, headers=origin)
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert "X-Kvlease-Route" in answer.headers["Access-Control-Expose-Headers"]
    assert "Access-Control-Allow-Origin" not in (await stack.chat(FIRST)).headers


class TestOneOrigin:
    @pytest.fixture
    def router_settings(self) -> dict[str, Any]:
        return {"cors_origins": "https://app.example, https://b.example", "pass_unknown_paths": False}

    async def test_an_origin_that_is_not_listed_reads_nothing(self, stack: Stack, decode: StubEngine) -> None:
        allowed = await stack.chat(FIRST, headers={"Origin": "https://b.example"})
        assert allowed.headers["Access-Control-Allow-Origin"] == "https://b.example"
        assert allowed.headers["Vary"] == "Origin"
        other = await stack.chat(FIRST, headers={"Origin": "https://evil.example"})
        assert "Access-Control-Allow-Origin" not in other.headers

    async def test_unknown_paths_stay_here_when_told_so(self, stack: Stack, decode: StubEngine) -> None:
        assert (await stack.send("POST", "/v1/something", json={})).status == 404
        assert (await stack.send("POST", "/v1/embeddings", json={})).status == 200


async def test_head_answers_without_a_body(stack: Stack, decode: StubEngine) -> None:
    for path, status in (("/", 200), ("/v1/models", 200), ("/health", 200), ("/v1/chat/completions", 405)):
        answer = await stack.send("HEAD", path)
        assert (answer.status, answer.raw) == (status, b"")


async def test_the_process_lives_before_it_is_ready(stack: Stack) -> None:
    assert (await stack.send("GET", "/live")).status == 200
    assert (await stack.send("GET", "/ready")).status == 503
    await stack.add(StubEngine("decode-1", EngineRole.DECODE))
    assert (await stack.send("GET", "/ready")).status == 200


async def test_every_answer_has_the_requests_id(stack: Stack, decode: StubEngine) -> None:
    named = {"X-Request-Id": "mine"}
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/nothing"),
        ("POST", "/v1/embeddings"),
        ("GET", "/health"),
    ):
        assert (await stack.send(method, path, headers=named)).headers["X-Request-Id"] == "mine"
    assert len((await stack.send("GET", "/health")).headers["X-Request-Id"]) == 32


async def test_a_compressed_body_is_read(stack: Stack, decode: StubEngine) -> None:
    raw = json.dumps({"model": MODEL, "messages": FIRST}).encode()
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    answer = await stack.send("POST", "/v1/chat/completions", data=gzip.compress(raw), headers=headers)
    assert answer.status == 200
    assert decode.received[0].body["messages"] == FIRST
    broken = await stack.send("POST", "/v1/chat/completions", data=b"no gzip", headers=headers)
    assert (broken.status, "error" in broken.json) == (400, True)


async def test_a_compressed_body_does_not_grow_past_the_limit(stack: Stack, decode: StubEngine) -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    headers = {"Content-Encoding": "gzip"}
    answer = await stack.send("POST", "/v1/chat/completions", data=bomb, headers=headers)
    assert answer.status == 413


async def test_a_client_may_wait_for_leave_to_send_its_body(stack: Stack, decode: StubEngine) -> None:
    body = {"model": MODEL, "messages": FIRST}
    assert (await stack.send("POST", "/v1/chat/completions", json=body, expect100=True)).status == 200


@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "text/plain", "", "application/json; charset=utf-8"]
)
async def test_json_is_json_whatever_a_client_calls_it(
    stack: Stack, decode: StubEngine, content_type: str
) -> None:
    raw = json.dumps({"model": MODEL, "messages": FIRST}).encode()
    headers = {"Content-Type": content_type}
    assert (await stack.send("POST", "/v1/chat/completions", data=raw, headers=headers)).status == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"a=b&c=d",
        b"",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b'{"messages": [{"content": "\\ud800"}]}',
        b'{"cache_salt": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"a":' * 1000 + b"1" + b"}" * 1000,
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
)
async def test_a_body_that_is_none_is_a_400_in_the_shape_of_its_api(
    stack: Stack, decode: StubEngine, path: str, raw: bytes
) -> None:
    answer = await stack.send("POST", path, data=raw, headers={"Content-Type": "application/json"})
    if raw == b"" and path == "/v1/embeddings":
        assert answer.status == 200  # nothing is said of bodies that a path does not need
        return
    assert answer.status == 400
    assert answer.json["error"]["message"]
    assert (answer.json.get("type") == "error") == (path == "/v1/messages")
    assert received(stack) == []


async def test_of_two_fields_of_one_name_one_reaches_the_engines(stack: Stack, decode: StubEngine) -> None:
    raw = b'{"model":"tiny","messages":%s,"n":1,"n":2,"conversation_id":"a","conversation_id":"b"}'
    answer = await stack.send("POST", "/v1/chat/completions", data=raw % json.dumps(FIRST).encode())
    assert answer.headers["X-Conversation-Id"] == "b"
    assert decode.received[0].raw.count(b'"n"') == 1


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
async def test_a_client_that_closes_gets_its_whole_answer(
    stack: Stack, decode: StubEngine, version: bytes
) -> None:
    """HTTP/1.0, and a connection for one request only."""
    raw = json.dumps({"model": MODEL, "messages": FIRST, "stream": True}).encode()
    host, _, port = stack.router.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/%s\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % (version, len(raw))
        + raw
    )
    await writer.drain()
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    assert b" 200 " in answer.partition(b"\r\n")[0]
    assert b"data: [DONE]" in answer


async def test_pipelined_requests_are_answered_in_order(stack: Stack, decode: StubEngine) -> None:
    host, _, port = stack.router.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for number in range(3):
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: r%d\r\n\r\n" % number)
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    places = [answer.index(b"r%d\r\n" % number) for number in range(3)]
    assert places == sorted(places)
