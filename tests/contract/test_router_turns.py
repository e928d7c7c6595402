"""Paths of turns through the router: what is reused, and which lease is left."""

import asyncio
from dataclasses import replace

import grpc.aio
import pytest
from aiohttp import web

from kvlease.core.conversation import tenant_digest
from kvlease.core.lease import MissReason
from kvlease.core.turn import TurnReport
from kvlease.v1 import routing_pb2, routing_pb2_grpc
from stubs.engines import MODEL, Received, StubEngine
from stubs.router import FIRST, LONG, Stack, orders, said
from stubs.waiting import eventually


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


async def let_go(stack: Stack, conversation_id: str, way: str) -> bool:
    """Whether a lease of the conversation was held until it was released, over HTTP or gRPC."""
    if way == "http":
        path = f"/v1/kvlease/conversations/{conversation_id}/release"
        return (await stack.send("POST", path)).json["released"]
    async with grpc.aio.insecure_channel(stack.router.grpc_address) as channel:
        stub = routing_pb2_grpc.RoutingServiceStub(channel)
        ask = routing_pb2.ReleaseConversationRequest(
            tenant=tenant_digest("anonymous"), conversation_id=conversation_id
        )
        return (await stub.ReleaseConversation(ask, timeout=60)).released


@pytest.mark.parametrize("way", ["http", "grpc"])
async def test_two_turns_under_one_id_at_once_keep_a_lease_each_until_it_is_let_go(
    stack: Stack, prefill: StubEngine, decode: StubEngine, way: str
) -> None:
    await stack.chat(FIRST, conversation_id="c")
    together = await asyncio.gather(
        stack.chat(said(FIRST, "hello", "one"), conversation_id="c"),
        stack.chat(said(FIRST, "hello", "two"), conversation_id="c"),
    )
    leases = {int(answer.headers["X-Kvlease-Lease"], 16) for answer in together}
    assert len(leases) == 2
    await eventually(lambda: leases <= set(stack.registry.confirmed))
    assert stack.registry.released == []
    assert await let_go(stack, "c", way)
    assert set(stack.registry.released) == leases
    assert not await let_go(stack, "c", way)


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
