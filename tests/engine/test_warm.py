"""Engines that have just met: the first READ finds that they shook hands when the peer joined."""

import math
import re

import pytest
from tests.engine.pair import Message, Pair, PairPlan, eventually, reusable_tokens

from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SYSTEM, THIRD
from kvlease.dev.engine_process import BLOCK_TOKENS

pytestmark = pytest.mark.asyncio(loop_scope="module")

DONE = re.compile(r'^kvlease_handshake_seconds_count\{outcome="done"\} (\S+)$', re.MULTILINE)


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    """READs of these engines fail where they would have to shake hands first."""
    return PairPlan(connector_module="tests.engine.planted.warm_only")


async def handshakes(pair: Pair) -> list[int]:
    """Per sidecar, the handshakes that were done before a turn needed them."""
    counts: list[int] = []
    for sidecar in pair.stack.sidecars:
        async with pair.session.get(f"{sidecar.admin_url}/metrics") as response:
            counts.append(sum(int(float(count)) for count in DONE.findall(await response.text())))
    return counts


async def test_the_first_reads_in_both_directions_begin_no_handshake(pair: Pair) -> None:
    async def have_met() -> bool:
        return await handshakes(pair) == [1, 1]

    await eventually(have_met, "each engine has shaken hands with the other")
    history: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
    first = await pair.turn(history, "met")
    block_bytes = await pair.block_bytes()
    prompt = await pair.tokens(history)
    assert first.read_bytes == math.ceil(len(prompt) / BLOCK_TOKENS) * block_bytes
    kept = prompt + first.reply.token_ids
    history += [{"role": "assistant", "content": first.reply.text}, {"role": "user", "content": THIRD}]
    await pair.reset_cache(EngineRole.PREFILL)
    second = await pair.turn(history, "met")
    assert (second.path, second.record["outcome"]) == ("readback", "read")
    assert second.reused_tokens == reusable_tokens(kept, await pair.tokens(history))
    assert second.reply.equals(await pair.cold(history))
    assert await handshakes(pair) == [1, 1]
