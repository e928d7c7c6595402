"""Lengths at the edges of blocks, and every way to end: reuse is exact, and nothing leaks.

Engines compute long prompts in chunks of `CHUNK_TOKENS`.
"""

import asyncio
import random
import string
from typing import Any

import pytest
from tests.engine.pair import (
    Message,
    Pair,
    PairPlan,
    eventually,
    reusable_tokens,
    text_body,
)

from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SECOND, SYSTEM, THIRD
from kvlease.dev.completion import Completion
from kvlease.dev.engine_process import BLOCK_TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPLY_TOKENS = BLOCK_TOKENS
"""A reply of one block leaves a turn as far from a block's end as its prompt was."""

CHUNK_TOKENS = 256
ABORTS_MAX = 20


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    """Steps of few tokens."""
    chunked = ("--max-num-batched-tokens", str(CHUNK_TOKENS))
    return PairPlan(arguments=dict.fromkeys(EngineRole, chunked))


def prose(name: str, length: int) -> str:
    """Text of exactly `length` tokens that nothing else begins with."""
    generator = random.Random(name)
    return "".join(generator.choices(string.ascii_lowercase + " ", k=length))


def token_ids(text: str) -> list[int]:
    """The tokens of a plain text: its bytes."""
    return list(text.encode())


@pytest.mark.parametrize("offset", [-1, 0, 1])
async def test_prompts_at_the_edge_of_a_block_reuse_whole_blocks_on_every_path(
    pair: Pair, offset: int
) -> None:
    conversation_id = f"edge{offset}"
    text, kept = "", list[int]()
    for blocks, path in ((10, "recompute"), (13, "append"), (34, "readback")):
        text += prose(f"{conversation_id}-{blocks}", blocks * BLOCK_TOKENS + offset - len(text))
        assert len(text) % BLOCK_TOKENS == offset % BLOCK_TOKENS
        await pair.reset_cache(EngineRole.PREFILL)
        turn = await pair.text_turn(text, conversation_id, max_tokens=REPLY_TOKENS)
        assert turn.path == path
        assert turn.record["prompt_tokens"] == len(text)
        assert turn.reused_tokens == reusable_tokens(kept, token_ids(text))
        assert turn.reply.equals(await pair.text_cold(text, max_tokens=REPLY_TOKENS))
        kept = token_ids(text) + turn.reply.token_ids
        text += turn.reply.text


async def test_prompts_of_many_chunks_are_right_on_every_path(pair: Pair) -> None:
    text, kept = "", list[int]()
    for chunks, path in ((5, "recompute"), (6, "append"), (12, "readback")):
        text += prose(f"chunks-{chunks}", chunks * CHUNK_TOKENS - len(text))
        await pair.reset_cache(EngineRole.PREFILL)
        turn = await pair.text_turn(text, "chunks")
        assert turn.path == path
        assert turn.reused_tokens == reusable_tokens(kept, token_ids(text))
        assert turn.reply.equals(await pair.text_cold(text))
        kept = token_ids(text) + turn.reply.token_ids
        text += turn.reply.text
    for seat in pair.stack.seats:
        assert (
            f"Chunked prefill is enabled with max_num_batched_tokens={CHUNK_TOKENS}"
            in seat.log_file.read_text()
        )


async def test_a_turn_that_is_aborted_between_the_chunks_of_its_prefill_is_right_when_it_comes_again(
    pair: Pair,
) -> None:
    text = prose("aborted", 10 * BLOCK_TOKENS)
    first = await pair.text_turn(text, "aborted")
    kept = token_ids(text) + first.reply.token_ids
    for attempt in range(ABORTS_MAX):
        again = text + first.reply.text + prose(f"aborted-{attempt}", 24 * CHUNK_TOKENS)
        if await abort_between_chunks(pair, again):
            break
    else:
        raise AssertionError(f"none of {ABORTS_MAX} aborts came between the chunks of a prefill")
    await pair.settles(EngineRole.PREFILL)
    await pair.reset_cache(EngineRole.PREFILL)
    second = await pair.text_turn(again, "aborted")
    assert (second.path, second.record["outcome"]) == ("readback", "read")
    assert second.reused_tokens == reusable_tokens(kept, token_ids(again))
    assert second.reply.equals(await pair.text_cold(again))


async def abort_between_chunks(pair: Pair, prompt: str) -> bool:
    """Leaves a turn while the prefill engine computes its prompt; whether that was before the prompt's end."""
    finished = await pair.metric(EngineRole.PREFILL, "vllm:prompt_tokens_total")
    body = {**text_body(prompt), "conversation_id": "aborted"}
    client = asyncio.create_task(pair.post(f"{pair.stack.router_url}/v1/completions", body))

    async def computes() -> bool:
        running = await pair.metric(EngineRole.PREFILL, "vllm:num_requests_running")
        return bool(running) or client.done()

    await eventually(computes, "the prefill engine computes the prompt")
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)

    async def is_idle() -> bool:
        return await pair.is_idle(EngineRole.PREFILL)

    await eventually(is_idle, "the prefill engine has ended the turn")
    return await pair.metric(EngineRole.PREFILL, "vllm:prompt_tokens_total") == finished


@pytest.mark.parametrize("path", ["append", "readback", "recompute"])
@pytest.mark.parametrize("suffix", ["", "x"])
async def test_a_suffix_of_no_or_one_token_is_right_on_every_path(pair: Pair, suffix: str, path: str) -> None:
    conversation_id = f"suffix-{len(suffix)}-{path}"
    # Prompt and reply fill their last block: without a suffix a block less can be used than was kept.
    text = prose(conversation_id, 10 * BLOCK_TOKENS + 1)
    first = await pair.text_turn(text, conversation_id, max_tokens=REPLY_TOKENS - 1)
    kept = token_ids(text) + first.reply.token_ids
    text += first.reply.text + suffix
    await pair.reset_cache(EngineRole.PREFILL)
    # The router cannot see that token ids go on from a text: it lets the engines compare.
    prompt = token_ids(text) if path == "readback" else text
    second = await pair.text_turn(prompt, conversation_id + ("-2" if path == "recompute" else ""))
    assert second.path == path
    reusable = 0 if path == "recompute" else reusable_tokens(kept, token_ids(text))
    assert second.reused_tokens == reusable
    assert second.reply.equals(await pair.text_cold(text))


@pytest.mark.parametrize("ending", ["length", "stop_token", "stop_string"])
async def test_the_turn_after_any_ending_reuses_all_and_is_right(pair: Pair, ending: str) -> None:
    conversation_id = f"ending-{ending}"
    history: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": FIRST + conversation_id},
    ]
    kept, paths = list[int](), list[str]()
    for text in (SECOND, THIRD, ""):
        whole = await pair.cold(history)
        stop = stop_of(ending, whole)
        turn = await pair.turn(history, conversation_id, **stop)
        prompt = await pair.tokens(history)
        paths.append(turn.path)
        assert turn.reply.finish_reason == ("length" if ending == "length" else "stop")
        assert turn.reply.equals(await pair.cold(history, **stop))
        if kept:
            assert turn.reused_tokens == reusable_tokens(kept, prompt)
        # The engine computed at least what the reply shows; the next prompt differs right after it.
        kept = prompt + whole.token_ids
        history = [
            *history,
            {"role": "assistant", "content": turn.reply.text},
            {"role": "user", "content": text},
        ]
        await pair.reset_cache(EngineRole.PREFILL)
    assert paths == ["recompute", "append", "readback"]


def stop_of(ending: str, reply: Completion) -> dict[str, Any]:
    """Fields that end this reply early, at a place where what ends it occurs first."""
    if ending == "length":
        return {}
    length = 1 if ending == "stop_token" else 2
    firsts = (p for p in range(len(reply.text)) if reply.text.find(reply.text[p : p + length]) == p)
    place = max(p for p in firsts if p + length <= len(reply.text))
    if ending == "stop_token":
        return {"stop_token_ids": [reply.token_ids[place]]}
    return {"stop": [reply.text[place : place + length]]}
