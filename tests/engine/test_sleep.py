"""Engines that may sleep: NIXL would go on reading the memory that a sleep takes away, so nothing is kept or READ."""

import pytest
from tests.engine.pair import Message, Pair, PairPlan, needs_gpus

from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SYSTEM, THIRD

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.slow,
    needs_gpus("vLLM's CPU build cannot sleep"),
]


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    return PairPlan(arguments=dict.fromkeys(EngineRole, ("--enable-sleep-mode",)))


async def post(pair: Pair, role: EngineRole, path: str) -> None:
    async with pair.session.post(f"{pair.url(role)}{path}") as response:
        assert response.status == 200, await response.text()


async def test_turns_before_and_after_a_sleep_are_right_and_reuse_nothing_of_another_engine(
    pair: Pair,
) -> None:
    history: list[Message] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
    for _ in range(2):
        turn = await pair.turn(history, "sleeper")
        assert turn.path == "recompute"
        assert turn.read_bytes == 0
        assert turn.reply.equals(await pair.cold(history))
        history += [{"role": "assistant", "content": turn.reply.text}, {"role": "user", "content": THIRD}]
        for role in EngineRole:
            await post(pair, role, "/sleep?level=1")
            await post(pair, role, "/wake_up")
    for engine in await pair.stack.store.list_engines():
        assert not engine.retain
