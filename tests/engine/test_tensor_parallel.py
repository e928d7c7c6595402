"""A second turn on engines of two ranks: each rank READs its part, and one lease stands for both."""

import math

import pytest
from tests.engine.pair import Message, Pair, PairPlan, reusable_tokens

from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SYSTEM, THIRD
from kvlease.dev.engine_process import BLOCK_TOKENS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PARALLEL = ("--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    both_gpus = {
        "CUDA_VISIBLE_DEVICES": "0,1"
    }  # Where there are any: the ranks of both engines lie on the same two.
    return PairPlan(
        arguments={EngineRole.PREFILL: PARALLEL, EngineRole.DECODE: PARALLEL}, environment=both_gpus
    )


async def test_a_second_turn_reads_back_and_equals_a_cold_run(pair: Pair) -> None:
    history: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
    first = await pair.turn(history, "ranks")
    assert first.path == "recompute"
    kept = await pair.tokens(history) + first.reply.token_ids
    history += [{"role": "assistant", "content": first.reply.text}, {"role": "user", "content": THIRD}]
    await pair.reset_cache(EngineRole.PREFILL)
    second = await pair.turn(history, "ranks")
    prompt = await pair.tokens(history)
    assert (second.path, second.record["outcome"]) == ("readback", "read")
    assert second.reused_tokens == reusable_tokens(kept, prompt)
    assert second.read_bytes == math.ceil(len(prompt) / BLOCK_TOKENS) * await pair.block_bytes()
    assert second.reply.equals(await pair.cold(history))
