"""The router's HTTP surface, through its real server: stub engines behind it, a registry in the test's process."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvlease.core.conversation import tenant_digest
from kvlease.core.lease import MissReason
from kvlease.core.records import EngineRole
from kvlease.core.turn import TurnParams, TurnReport
from kvlease.router.config import RouterConfig
from kvlease.router.server import RouterServer
from kvlease.runtime.clock import LoopClock
from stubs.engines import MODEL, Received, StubEngine, delta, event, send_chunks
from stubs.registry import StubRegistry
from stubs.waiting import eventually

LONG = "a long tool result " * 300
FIRST = [{"role": "user", "content": "tell me something about lighthouses " * 8}]


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.raw)

    @property
    def route(self) -> str:
        return self.headers["X-Kvlease-Route"]


@dataclass
class Stack:
    registry: StubRegistry
    router: RouterServer
    session: aiohttp.ClientSession
    engines: list[StubEngine] = field(default_factory=list[StubEngine])

    async def add(self, engine: StubEngine) -> StubEngine:
        await engine.start()
        self.engines.append(engine)
        self.registry.register(engine.engine)
        await self.know(len(self.engines))
        return engine

    async def know(self, count: int) -> None:
        async with asyncio.timeout(10):
            while True:
                async with self.session.get(self.router.url + "/health") as response:
                    if sum((await response.json())["engines"].values()) == count:
                        return

    async def send(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, self.router.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def chat(
        self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **fields: Any
    ) -> Answer:
        body = {"model": MODEL, "messages": messages, **fields}
        return await self.send("POST", "/v1/chat/completions", json=body, headers=headers)

    async def turns(
        self, conversation_id: str, headers: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        return (await self.conversation(conversation_id, headers))["turns"]

    async def conversation(
        self, conversation_id: str, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        answer = await self.send("GET", f"/v1/kvlease/conversations/{conversation_id}", headers=headers)
        assert answer.status == 200
        return answer.json


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    registry = StubRegistry()
    config = RouterConfig(
        listen="127.0.0.1:0",
        grpc_listen="127.0.0.1:0",
        stop_grace_s=0.1,
        prefill_timeout_s=5.0,
        # No beat comes by itself: what is confirmed was confirmed at once.
        heartbeat_interval_s=600.0,
        lease_duration_s=1800.0,
        reservation_s=700.0,
    )
    router = RouterServer(config, LoopClock(), registry)
    await router.start()
    async with aiohttp.ClientSession() as session:
        built = Stack(registry, router, session)
        yield built
        for engine in built.engines:
            await engine.stop()
        await router.stop()


@pytest.fixture
async def prefill(stack: Stack) -> StubEngine:
    return await stack.add(StubEngine("prefill-1", EngineRole.PREFILL))


@pytest.fixture
async def decode(stack: Stack, prefill: StubEngine) -> StubEngine:
    return await stack.add(StubEngine("decode-1", EngineRole.DECODE))


def said(messages: list[dict[str, Any]], reply: str, text: str) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": text}]


def orders(received: Received) -> TurnParams:
    return TurnParams.from_json(received.orders)


# --- paths ---------------------------------------------------------------------------------------------------


async def test_a_first_turn_is_prefilled_elsewhere_and_handed_over(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    answer = await stack.chat(FIRST, conversation_id="c")
    assert answer.status == 200
    assert answer.route == "recompute; first_turn"
    asked, given = orders(prefill.received[0]), orders(decode.received[0])
    assert asked.read is None
    assert asked.keep is not None
    assert given.read is not None
    assert (given.read.lease_id, given.read.pin_id) == (asked.keep.lease_id, asked.keep.pin_id)
    # A reset of P before this turn, of which the router's watch may not have told yet, does not lose its lease.
    assert given.read.holder == replace(prefill.engine.holder, epoch=0)
    assert given.read.sidecar_address == prefill.engine.sidecar_address
    assert given.keep is not None
    assert f"{given.keep.lease_id:016x}" == answer.headers["X-Kvlease-Lease"]
    assert given.keep.supersedes == 0


async def test_a_short_next_turn_goes_to_the_decode_engine_alone(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    decode.cached_tokens = 192
    answer = await stack.chat(said(FIRST, "hello", "and more?"), conversation_id="c")
    assert answer.route == "append; short_suffix"
    assert len(prefill.received) == 1
    first, second = (orders(received).keep for received in decode.received)
    assert first is not None
    assert second is not None
    assert orders(decode.received[1]).read is None
    assert second.supersedes == first.lease_id
    turn = (await stack.turns("c"))[1]
    assert (turn["prompt_tokens"], turn["reused_tokens"]) == (200, 192)


async def test_a_long_next_turn_reads_the_lease_back_under_a_pin(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    lease = orders(decode.received[0]).keep
    prefill.report = TurnReport(2000, 16, 176, 192, "read", kept_tokens=2000)
    answer = await stack.chat(said(FIRST, "hello", LONG), conversation_id="c")
    assert answer.route == "readback; long_suffix"
    read = orders(prefill.received[1]).read
    assert read is not None
    assert lease is not None
    assert read.lease_id == lease.lease_id == stack.registry.pins[0].lease_id
    assert read.pin_id == stack.registry.pins[0].pin_id
    assert read.sidecar_address == decode.engine.sidecar_address
    assert stack.registry.pins[0].tenant == tenant_digest("anonymous")
    turn = (await stack.turns("c"))[1]
    assert (turn["reused_tokens"], turn["read_tokens"], turn["outcome"]) == (192, 176, "read")
    assert stack.registry.unpinned == []


async def test_an_edited_history_reads_back_what_is_still_true_and_never_appends(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    edited = [{"role": "user", "content": "tell me something about windmills"}]
    answer = await stack.chat(said(edited, "hello", "why?"), conversation_id="c")
    assert answer.route == "readback; history_edited"
    assert orders(prefill.received[1]).read is not None


@pytest.mark.parametrize(
    ("miss", "reason"),
    [
        (MissReason.EXPIRED, "lease_expired"),
        (MissReason.EVICTED, "lease_evicted"),
        (MissReason.LOST, "lease_lost"),
        (MissReason.UNKNOWN, "lease_missing"),
        (MissReason.READING_CAP, "reading_cap"),
        (MissReason.UNREACHABLE, "holder_unreachable"),
    ],
)
async def test_a_refused_pin_becomes_a_recompute_with_its_reason(
    stack: Stack, prefill: StubEngine, decode: StubEngine, miss: MissReason, reason: str
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    stack.registry.pin_outcome = miss
    answer = await stack.chat(said(FIRST, "hello", LONG), conversation_id="c")
    assert answer.route == f"recompute; {reason}"
    assert orders(prefill.received[1]).read is None


async def test_a_lease_is_confirmed_when_its_turn_ended_well(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    keep = orders(decode.received[0]).keep
    assert keep is not None
    await eventually(lambda: keep.lease_id in stack.registry.confirmed)
    assert (await stack.conversation("c"))["lease"]["state"] in ("pending", "held")


async def test_the_next_turn_reuses_the_lease_though_it_comes_with_the_last_byte(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    first = await stack.chat(FIRST, conversation_id="c", stream=True)
    assert first.raw.endswith(b"data: [DONE]\n\n")
    second = await stack.chat(said(FIRST, "hello", LONG), conversation_id="c", stream=True)
    assert second.route == "readback; long_suffix"
    assert len(stack.registry.pins) == 1


@pytest.mark.parametrize("finish", ["content_filter", "abort"])
async def test_the_lease_of_a_turn_that_ended_badly_is_never_confirmed(
    stack: Stack, prefill: StubEngine, decode: StubEngine, finish: str
) -> None:
    async def answer(request: web.Request, received: Received) -> web.StreamResponse:
        whole = decode.whole(received)
        whole["choices"][0]["finish_reason"] = finish
        return web.json_response(whole)

    decode.script = answer
    assert (await stack.chat(FIRST, conversation_id="c")).status == 200
    conversation = await stack.conversation("c")
    assert conversation["lease"]["state"] == "none"
    assert conversation["turns"][0]["ended"] == "badly"
    assert stack.registry.confirmed == []


async def test_without_an_id_the_chain_of_messages_finds_the_conversation(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    first = await stack.chat(FIRST)
    second = await stack.chat(said(FIRST, " hello\n", "and more?"))
    assert second.route == "append; short_suffix"
    assert first.headers["X-Conversation-Id"] == second.headers["X-Conversation-Id"]


async def test_runs_that_begin_alike_are_different_conversations(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    first = await stack.chat(FIRST)
    second = await stack.chat(FIRST)
    assert second.route == "recompute; first_turn"
    assert first.headers["X-Conversation-Id"] != second.headers["X-Conversation-Id"]


async def test_a_branch_reads_the_lease_it_left_and_supersedes_nothing(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    first = await stack.chat(FIRST)
    await stack.chat(said(FIRST, "hello", "one way"))
    branch = await stack.chat(said(FIRST, "hello", "another way"))
    assert branch.route == "append; short_suffix"
    assert branch.headers["X-Conversation-Id"] != first.headers["X-Conversation-Id"]
    keep = orders(decode.received[2]).keep
    assert keep is not None
    assert keep.supersedes == 0


async def test_the_same_turn_twice_at_once_leaves_one_lease(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    together = await asyncio.gather(
        stack.chat(said(FIRST, "hello", "one"), conversation_id="c"),
        stack.chat(said(FIRST, "hello", "one"), conversation_id="c"),
    )
    assert [answer.status for answer in together] == [200, 200]
    current = (await stack.conversation("c"))["lease"]["lease_id"]
    leases = {answer.headers["X-Kvlease-Lease"] for answer in together}
    (left,) = leases - {current}
    await eventually(lambda: stack.registry.released == [int(left, 16)])


async def test_tenants_share_neither_conversations_nor_salts(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    alice, bob = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
    await stack.chat(FIRST, conversation_id="c", headers=alice)
    answer = await stack.chat(said(FIRST, "hello", "and?"), conversation_id="c", headers=bob)
    assert answer.route == "recompute; first_turn"
    salts = [received.body["cache_salt"] for received in decode.received]
    assert salts[0] != salts[1]
    assert prefill.received[0].body["cache_salt"] == salts[0]
    assert decode.received[0].headers["Authorization"] == "Bearer alice"
    assert len(await stack.turns("c", alice)) == 1
    stranger = await stack.send("GET", "/v1/kvlease/conversations/c")
    assert stranger.status == 404


async def test_completions_are_conversations_too(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    text = "once upon a time " * 30
    await stack.send("POST", "/v1/completions", json={"model": MODEL, "prompt": text})
    answer = await stack.send(
        "POST", "/v1/completions", json={"model": MODEL, "prompt": text + "hello and then"}
    )
    assert answer.route == "append; short_suffix"
    assert answer.json["choices"][0]["text"] == "hello"


async def test_a_batch_of_prompts_is_served_by_the_decode_engine_without_orders(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    answer = await stack.send("POST", "/v1/completions", json={"model": MODEL, "prompt": ["a", "b"]})
    assert answer.route == "recompute; batch"
    assert prefill.received == []
    assert decode.received[0].orders is None


# --- what crosses, and what does not ---------------------------------------------------------------------------


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


# --- what fails --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_engines_refusal_keeps_status_body_and_retry_after(
    stack: Stack, prefill: StubEngine, decode: StubEngine, leg: str, *, stream: bool
) -> None:
    async def refuse(request: web.Request, received: Received) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "7"}, body=b'{"error":{"message":"busy"}}')

    (prefill if leg == "prefill" else decode).script = refuse
    answer = await stack.chat(FIRST, conversation_id="c", stream=stream)
    assert (answer.status, answer.headers["Retry-After"]) == (429, "7")
    assert answer.raw == b'{"error":{"message":"busy"}}'
    assert len(decode.received) == (0 if leg == "prefill" else 1)
    assert stack.registry.confirmed == []
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
    async with asyncio.timeout(10):
        await prefill.aborted.wait()
    await eventually_turn_ended(stack, "aborted")
    assert len(decode.received) == 1
    assert stack.registry.unpinned == []


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
    async with asyncio.timeout(10):
        await decode.aborted.wait()
    await eventually_turn_ended(stack, "aborted")
    assert stack.registry.confirmed == []


async def eventually_turn_ended(stack: Stack, ended: str) -> None:
    async with asyncio.timeout(10):
        while (await stack.turns("c"))[-1]["ended"] != ended:
            await asyncio.sleep(0.002)


# --- the surface -------------------------------------------------------------------------------------------------


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


async def test_metrics_count_turns_by_path_and_reason(
    stack: Stack, prefill: StubEngine, decode: StubEngine
) -> None:
    await stack.chat(FIRST)
    async with stack.session.get(stack.router.admin_url + "/metrics") as response:
        text = await response.text()
    assert 'kvlease_turns_total{ended="well",path="recompute",reason="first_turn"} 1.0' in text
