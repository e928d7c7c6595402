"""A conversation's turns on real engines: what is reused, by how many readers, and that it equals a cold run."""

import asyncio
import math
import uuid

import pytest
from tests.engine.by_hand import read_order, reading, send
from tests.engine.pair import (
    MODEL,
    PROVISIONAL_S,
    Message,
    Outcome,
    Pair,
    PairPlan,
    request_body,
    reusable_tokens,
    whole_blocks,
)

from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SECOND, SYSTEM, THIRD
from kvlease.dev.completion import Completion, complete
from kvlease.dev.engine_process import BLOCK_TOKENS
from kvlease.router.config import RouterConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCKS = 640
"""Few enough for a test to fill the cache of an engine, more than all conversations of this module keep."""
QUICK_TURNS = 10
APPEND_TOKENS_MAX = 128


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    """Small caches, and leases that outlive a machine that is slow to fill them."""
    override = ("--num-gpu-blocks-override", str(BLOCKS))
    return PairPlan(
        arguments={EngineRole.PREFILL: override, EngineRole.DECODE: override},
        router=RouterConfig(
            gap_floor_s=300.0,
            append_tokens_max=APPEND_TOKENS_MAX,
            rate_samples_min=0,
            provisional_s=PROVISIONAL_S,
        ),
    )


def opening(text: str) -> list[Message]:
    """A conversation's first request."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def continued(history: list[Message], reply: Completion, text: str) -> list[Message]:
    """The next request of a conversation."""
    return [*history, {"role": "assistant", "content": reply.text}, {"role": "user", "content": text}]


async def kept_tokens(pair: Pair, history: list[Message], reply: Completion) -> list[int]:
    """The tokens of a turn that has ended."""
    return await pair.tokens(history) + reply.token_ids


@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_second_turn_reads_the_verified_prefix_back(pair: Pair, stream: bool) -> None:
    conversation = f"second-turn-{stream}"
    history = opening(FIRST + conversation)
    first = await pair.turn(history, conversation, stream=stream)
    assert first.path == "recompute"
    kept = await kept_tokens(pair, history, first.reply)
    history = continued(history, first.reply, THIRD)
    # What P computed for the first turn is forgotten, so that all reuse comes from D.
    await pair.reset_cache(EngineRole.PREFILL)
    before = await pair.bytes_read(EngineRole.PREFILL)
    second = await pair.turn(history, conversation, stream=stream)
    read = await pair.bytes_read(EngineRole.PREFILL) - before
    assert second.path == "readback"
    prompt = await pair.tokens(history)
    shared = reusable_tokens(kept, prompt)
    assert second.reused_tokens == shared
    block_bytes = await pair.block_bytes()
    assert read == shared // BLOCK_TOKENS * block_bytes
    # Both READs of the turn together move every block of the prompt once: back to P, and the rest to D.
    assert second.read_bytes == math.ceil(len(prompt) / BLOCK_TOKENS) * block_bytes
    assert second.reply.equals(await pair.cold(history, stream=stream))


async def test_a_readback_after_appends_reuses_all_turns(pair: Pair) -> None:
    history, kept, paths = opening(FIRST + " four turns"), list[int](), list[str]()
    for text in (SECOND, "And which after that one?", THIRD, ""):
        if text == "":
            await pair.reset_cache(EngineRole.PREFILL)
        turn = await pair.turn(history, "four-turns")
        paths.append(turn.path)
        if kept:
            assert turn.reused_tokens == reusable_tokens(kept, await pair.tokens(history))
        assert turn.reply.equals(await pair.cold(history))
        kept = await kept_tokens(pair, history, turn.reply)
        history = continued(history, turn.reply, text)
    assert paths == ["recompute", "append", "append", "readback"]


async def test_branches_read_one_lease_at_the_same_time(pair: Pair) -> None:
    history = opening(FIRST + " branches")
    first = await pair.turn(history)
    kept = await kept_tokens(pair, history, first.reply)
    branches = [continued(history, first.reply, f"{name}: {THIRD}") for name in ("a", "b", "c")]
    await pair.reset_cache(EngineRole.PREFILL)
    turns = await asyncio.gather(*(branch_off(pair, branch) for branch in branches))
    assert len({turn.record["lease_id"] for turn in turns}) == 3
    for branch, turn in zip(branches, turns, strict=True):
        await assert_read_back(pair, turn, kept, branch)


async def branch_off(pair: Pair, history: list[Message]) -> Outcome:
    """A turn that asks no engine anything before: the first of several branches supersedes what they all read."""
    reply, headers = await complete(pair.session, pair.stack.router_url, request_body(history))
    conversation = await pair.conversation(headers["X-Conversation-Id"])
    return Outcome(reply, conversation["turns"][-1], 0, headers)


async def test_readers_share_a_lease_that_survived_the_churn_of_its_engine(pair: Pair) -> None:
    history = opening(FIRST + " churned")
    first = await pair.turn(history)
    shared = reusable_tokens(
        await kept_tokens(pair, history, first.reply),
        await pair.tokens(continued(history, first.reply, THIRD)),
    )
    branches = [continued(history, first.reply, f"{name}: {THIRD}") for name in ("a", "b", "c")]
    bytes_a_reader = shared // BLOCK_TOKENS * await pair.block_bytes()
    await read_alone(pair, first, branches[0], bytes_a_reader)
    await churn(pair)
    for branch in branches[1:]:
        await read_alone(pair, first, branch, bytes_a_reader)


async def read_alone(pair: Pair, turn: Outcome, history: list[Message], read_bytes: int) -> None:
    """P, which has forgotten all, READs a turn's lease under a pin of its own, and answers as a cold run does."""
    await pair.reset_cache(EngineRole.PREFILL)
    before = await pair.bytes_read(EngineRole.PREFILL)
    order = await read_order(pair, turn, f"reader-{uuid.uuid4().hex}")
    reply = await send(pair, EngineRole.PREFILL, history, reading(order))
    assert await pair.bytes_read(EngineRole.PREFILL) - before == read_bytes
    assert reply.equals(await pair.cold(history))


async def assert_read_back(pair: Pair, turn: Outcome, kept: list[int], history: list[Message]) -> None:
    """A branch reused what its conversation kept: what other branches left at P begins with it."""
    shared = reusable_tokens(kept, await pair.tokens(history))
    assert (turn.path, turn.record["reason"]) == ("readback", "long_suffix")
    assert turn.record["verified_tokens"] == shared
    assert turn.reused_tokens >= shared
    assert turn.reply.equals(await pair.cold(history))


async def churn(pair: Pair) -> None:
    """Computes other prompts on D until its cache could have been filled with them."""
    prompt_tokens = 1900
    for number in range(BLOCKS * BLOCK_TOKENS // whole_blocks(prompt_tokens) + 1):
        prompt = f"{number:04d} " + "churn" * prompt_tokens
        body = {"model": MODEL, "prompt": prompt[:prompt_tokens], "max_tokens": 1, "temperature": 0}
        await pair.post(f"{pair.url(EngineRole.DECODE)}/v1/completions", body)


@pytest.mark.parametrize(
    ("route", "text", "reply_tokens"),
    [("append; short_suffix", "Go on.", 24), ("readback; long_suffix", "Go on! " * 20, 100)],
)
async def test_a_turn_sent_the_moment_the_stream_ended_still_hits(
    pair: Pair, route: str, text: str, reply_tokens: int
) -> None:
    conversation_id = route.split(";", maxsplit=1)[0] + "-at-once"
    history, turns, routes = opening(FIRST + conversation_id), list[tuple[list[Message], Completion]](), []
    for _ in range(1 + QUICK_TURNS):
        body = {**request_body(history, max_tokens=reply_tokens), "conversation_id": conversation_id}
        reply, headers = await complete(pair.session, pair.stack.router_url, body)
        routes.append(headers["X-Kvlease-Route"])
        turns.append((history, reply))
        history = continued(history, reply, text)
    assert routes == ["recompute; first_turn", *[route] * QUICK_TURNS]
    records = (await pair.conversation(conversation_id))["turns"]
    for (earlier, said), (now, _), record in zip(turns[:-1], turns[1:], records[1:], strict=True):
        kept = await kept_tokens(pair, earlier, said)
        assert record["reused_tokens"] == reusable_tokens(kept, await pair.tokens(now))
        assert record["outcome"] == ("read" if route.startswith("readback") else "")
    for history, reply in turns:
        assert reply.equals(await pair.cold(history, max_tokens=reply_tokens))


async def test_an_engine_is_registered_by_the_name_that_clients_ask_for(pair: Pair) -> None:
    """A router that knows a lease by its record alone goes by it, and so does one with engines of two models."""
    assert {engine.model for engine in await pair.stack.store.list_engines()} == {MODEL}
