"""A conversation's turns on real engines: what is reused, and that it equals a cold run."""

from typing import Any

import pytest
from tests.engine.pair import Pair, common_tokens, whole_blocks

from kvlease.core.records import EngineRole
from kvlease.dev.check import EDITED, FIRST, SECOND, SYSTEM, THIRD
from kvlease.dev.engine_process import BLOCK_TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="module")


def opening(text: str = FIRST) -> list[dict[str, Any]]:
    """A conversation's first request."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_long_second_turn_reads_the_verified_prefix_back(pair: Pair, stream: bool) -> None:
    conversation = f"second-turn-{stream}"
    history = opening(FIRST + conversation)
    first = await pair.turn(history, conversation, stream=stream)
    assert first.path == "recompute"
    kept = await pair.tokens(history) + first.reply.token_ids
    history += [{"role": "assistant", "content": first.reply.text}, {"role": "user", "content": THIRD}]
    # What P computed for the first turn is forgotten, so that all reuse comes from D.
    assert await pair.reset_cache(EngineRole.PREFILL) == 200
    before = await pair.bytes_read(EngineRole.PREFILL)
    second = await pair.turn(history, conversation, stream=stream)
    read = await pair.bytes_read(EngineRole.PREFILL) - before
    assert second.path == "readback"
    shared = whole_blocks(common_tokens(kept[:-1], await pair.tokens(history)))
    assert second.reused_tokens == shared
    assert read == shared // BLOCK_TOKENS * await pair.block_bytes()
    assert second.reply.equals(await pair.cold(history, stream=stream))


async def test_an_edited_history_reuses_its_true_prefix_only(pair: Pair) -> None:
    history = opening(FIRST + " edited")
    first = await pair.turn(history, "edited")
    kept = await pair.tokens(history) + first.reply.token_ids
    edited = [
        *opening(EDITED + " edited"),
        {"role": "assistant", "content": first.reply.text},
        {"role": "user", "content": SECOND},
    ]
    second = await pair.turn(edited, "edited")
    assert second.record["reason"] == "history_edited"
    assert second.reused_tokens <= whole_blocks(common_tokens(kept, await pair.tokens(edited)))
    cold = await pair.cold(edited)
    assert second.reply.equals(cold)
    assert (await pair.turn(edited, "edited-afresh")).reply.equals(cold)
