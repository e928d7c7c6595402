"""Retained conversations on an engine with few blocks: live requests go first, also with a silent sidecar."""

import asyncio
import uuid

import pytest
from tests.engine.by_hand import pinned, reading, send
from tests.engine.fronts import FrontedStack
from tests.engine.pair import MODEL, PROVISIONAL_S, Message, Outcome, Pair, PairPlan, eventually

from kvlease.core.records import EngineRole
from kvlease.dev.engine_process import BLOCK_TOKENS
from kvlease.router.config import RouterConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL, DECODE = EngineRole.PREFILL, EngineRole.DECODE
DECODE_BLOCKS = 90
PREFILL_BLOCKS = 100
RETAINED = 8
PREEMPTIONS = "vllm:num_preemptions_total"
PREEMPTIONS_TRIED_MAX = 12


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    """Few blocks, most of which conversations may keep, for longer than the module lasts."""
    length = ("--max-model-len", "2048")
    return PairPlan(
        kvlease_config={"retention_budget": 0.9, "reading_cap": 0.9},
        arguments={
            PREFILL: (*length, "--num-gpu-blocks-override", str(PREFILL_BLOCKS)),
            DECODE: (*length, "--num-gpu-blocks-override", str(DECODE_BLOCKS)),
        },
        router=RouterConfig(
            heartbeat_interval_s=2.0,
            lease_duration_s=600.0,
            gap_floor_s=600.0,
            provisional_s=PROVISIONAL_S,
            rate_samples_min=0,
        ),
        stack=FrontedStack,
    )


def text(blocks: int) -> str:
    """A text of about so many blocks that no other prompt begins with: a token per byte."""
    return (uuid.uuid4().hex * blocks)[: blocks * BLOCK_TOKENS]


async def retain(pair: Pair, name: str) -> list[tuple[str, list[Message], Outcome]]:
    """Conversations that keep most of the decode engine's blocks, and their next requests."""
    kept: list[tuple[str, list[Message], Outcome]] = []
    for number in range(RETAINED):
        messages: list[Message] = [{"role": "user", "content": text(8)}]
        turn = await pair.turn(messages, f"{name} {number}")
        question = {"role": "user", "content": "Go on."}
        again = [*messages, {"role": "assistant", "content": turn.reply.text}, question]
        kept.append((f"{name} {number}", again, turn))
    return kept


async def run(pair: Pair, role: EngineRole, blocks: int, tokens: int) -> None:
    """A request of so many blocks, straight to an engine, that generates so many tokens."""
    body = {"model": MODEL, "prompt": text(blocks), "max_tokens": tokens, "ignore_eos": True}
    async with pair.session.post(f"{pair.url(role)}/v1/completions", json=body) as response:
        response.raise_for_status()
        await response.read()


async def return_right(pair: Pair, kept: list[tuple[str, list[Message], Outcome]]) -> list[str]:
    """Every conversation's next turn is right; the reasons of their paths."""
    reasons: list[str] = []
    for name, again, _ in kept:
        turn = await pair.turn(again, name)
        assert turn.record["ended"] == "well"
        assert turn.reply.equals(await pair.cold(again))
        reasons.append(turn.record["reason"])
    return reasons


async def test_a_request_that_needs_their_blocks_starts_at_once_and_the_evicted_return_right(
    pair: Pair,
) -> None:
    kept = await retain(pair, "retained")
    before = await pair.gauges(DECODE)
    assert before.held_blocks > DECODE_BLOCKS - 1 - 40
    await run(pair, DECODE, 40, 4)
    after = await pair.gauges(DECODE)
    assert after.counters["evictions"] > before.counters["evictions"]
    assert 0 < after.held_blocks < before.held_blocks
    assert await pair.metric(DECODE, PREEMPTIONS) == 0
    reasons = await return_right(pair, kept)
    # Its record goes with the lease, and says no reason.
    assert not {"lease_missing", "lease_evicted"}.isdisjoint(reasons)


async def test_a_silent_sidecar_delays_no_request_that_needs_retained_blocks(pair: Pair) -> None:
    kept = await retain(pair, "retained in silence")
    before = await pair.gauges(DECODE)
    assert isinstance(pair.stack, FrontedStack)
    pair.stack.silence(DECODE)
    try:
        await asyncio.gather(run(pair, DECODE, 40, 64), run(pair, DECODE, 35, 64))
        assert await pair.metric(DECODE, PREEMPTIONS) == 0
        await return_right(pair, kept[:2])
    finally:
        pair.stack.resume(DECODE)
    assert (await pair.gauges(DECODE)).counters["evictions"] > before.counters["evictions"]
    await return_right(pair, kept[2:])
    assert await pair.metric(DECODE, PREEMPTIONS) == 0


async def test_a_preempted_request_that_read_its_prefix_finishes_and_is_right(pair: Pair) -> None:
    await pair.reset_cache(DECODE)
    for attempt in range(PREEMPTIONS_TRIED_MAX):
        if await is_preempted_and_right(pair, f"preempted {attempt}"):
            break
    else:
        raise AssertionError(f"none of {PREEMPTIONS_TRIED_MAX} requests that READ was preempted")
    await pair.settles(PREFILL)


async def is_preempted_and_right(pair: Pair, name: str) -> bool:
    """Whether a request was preempted beside one that READ its prefix; the latter is right in any case."""
    messages: list[Message] = [{"role": "user", "content": text(40)}]
    turn = await pair.turn(messages, name)
    question = {"role": "user", "content": text(2)}
    again = [*messages, {"role": "assistant", "content": turn.reply.text}, question]
    await pair.reset_cache(PREFILL)
    before = (await pair.gauges(PREFILL)).counters
    preemptions = await pair.metric(PREFILL, PREEMPTIONS)
    async with pinned(pair, turn, f"pin of {name}") as order:
        # Together they need more blocks than there are, unless the pin takes so long that both no longer fit.
        other = asyncio.create_task(run(pair, PREFILL, 20, 1400))

        async def other_runs() -> bool:
            return other.done() or await pair.metric(PREFILL, "vllm:num_requests_running") == 1

        await eventually(other_runs, "a request runs before the one that reads")
        reply = await send(pair, PREFILL, again, reading(order), max_tokens=600)
        await other
    counters = (await pair.gauges(PREFILL)).counters
    assert reply.equals(await pair.cold(again, max_tokens=600))
    # An engine that is busy with the other request may also get the answer to its pin too late to use it.
    assert sum(counters[one] - before[one] for one in ("outcome_read", "outcome_unreachable")) == 1
    was_read = counters["outcome_read"] > before["outcome_read"]
    return was_read and await pair.metric(PREFILL, PREEMPTIONS) > preemptions
