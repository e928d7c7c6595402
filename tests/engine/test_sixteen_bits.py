"""A second turn on engines that compute in 16 bits: with the attention kernels of GPUs, and with latent attention.

Latent attention (MLA) is what the models of DeepSeek and GLM have. In 16 bits long answers drift by themselves: what
is compared is the first token.
"""

import pytest
from tests.engine.mla_model import POSITIONS_MAX, write_mla_model
from tests.engine.pair import Message, Pair, PairPlan, common_tokens, needs_gpus

from kvlease.core.records import EngineRole
from kvlease.dev.check import EDITED, FIRST, SYSTEM, THIRD
from kvlease.dev.completion import Completion

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    needs_gpus("with MLA the CPU build's own prefill and decode differ by up to 0.4 in a logprob"),
]

BLOCK = 64
LOGPROB_TOLERANCE = 0.1


@pytest.fixture(scope="module", params=["FLASH_ATTN", "TRITON_MLA"])
def pair_plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PairPlan:
    backend: str = request.param
    model = write_mla_model(tmp_path_factory.mktemp("mla")) if backend == "TRITON_MLA" else None
    own = (
        *("--block-size", str(BLOCK), "--max-model-len", str(POSITIONS_MAX)),
        *("--dtype", "bfloat16", "--attention-backend", backend),
    )
    return PairPlan(arguments={EngineRole.PREFILL: own, EngineRole.DECODE: own}, model=model)


async def begins_like_a_cold_run(pair: Pair, history: list[Message], reply: Completion) -> bool:
    cold = await pair.cold(history)
    return (
        reply.tokens[0] == cold.tokens[0] and abs(reply.logprobs[0] - cold.logprobs[0]) <= LOGPROB_TOLERANCE
    )


@pytest.mark.parametrize("opening", [FIRST, EDITED], ids=["continued", "edited"])
async def test_a_second_turn_reads_back_what_it_shares_and_begins_like_a_cold_run(
    pair: Pair, opening: str
) -> None:
    name = f"conversation {opening[:24]}"
    history: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
    first = await pair.turn(history, name)
    assert await begins_like_a_cold_run(pair, history, first.reply)
    kept = await pair.tokens(history) + first.reply.token_ids
    history += [{"role": "assistant", "content": first.reply.text}, {"role": "user", "content": THIRD}]
    history[1]["content"] = opening
    await pair.reset_cache(EngineRole.PREFILL)  # What is reused comes from the decode engine.
    second = await pair.turn(history, name)
    prompt = await pair.tokens(history)
    shared = min(common_tokens(kept[:-1], prompt), len(prompt) - 1) // BLOCK * BLOCK
    assert (second.path, second.record["outcome"]) == ("readback", "read")
    assert second.reused_tokens == shared > 0
    assert await begins_like_a_cold_run(pair, history, second.reply)
