"""Caches that are cleared while leases are held or pinned: leases are lost, pinned blocks stay, turns are right."""

from typing import Any

import pytest
from tests.engine.by_hand import pinned
from tests.engine.pair import Outcome, Pair, eventually

from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SYSTEM, THIRD

pytestmark = pytest.mark.asyncio(loop_scope="module")

DECODE = EngineRole.DECODE
LOST = {"lease_lost", "lease_missing"}
"""The record of a lost lease may vanish before the router hears of the engine's next epoch, and says no reason."""
Message = dict[str, Any]


async def first_turn(pair: Pair, name: str) -> tuple[list[Message], Outcome]:
    """A conversation that holds a lease, and its next request."""
    messages: list[Message] = [
        {"role": "system", "content": f"{name}. {SYSTEM}"},
        {"role": "user", "content": FIRST},
    ]
    turn = await pair.turn(messages, name)
    question = {"role": "user", "content": THIRD}
    return [*messages, {"role": "assistant", "content": turn.reply.text}, question], turn


async def next_turn_lost_its_lease(pair: Pair, messages: list[Message], name: str) -> None:
    """The turn after a reset recomputes, is right, and leaves a lease that the one after it reads."""
    second = await pair.turn(messages, name)
    assert second.path == "recompute"
    assert second.record["reason"] in LOST
    assert second.reply.equals(await pair.cold(messages))
    third = [
        *messages,
        {"role": "assistant", "content": second.reply.text},
        {"role": "user", "content": THIRD},
    ]
    turn = await pair.turn(third, name)
    assert turn.path == "readback"
    assert turn.reply.equals(await pair.cold(third))


async def reset(pair: Pair, role: EngineRole = DECODE) -> bool:
    """vLLM's answer to a reset of its prefix cache."""
    async with pair.session.post(f"{pair.url(role)}/reset_prefix_cache") as response:
        assert response.status == 200
        answer: dict[str, bool] = await response.json()
        return answer["success"]


async def pause(pair: Pair) -> int:
    """Pauses the decode engine, which clears its caches, and lets it go on; the status of the pause."""
    async with pair.session.post(f"{pair.url(DECODE)}/pause") as response:
        await response.read()
    async with pair.session.post(f"{pair.url(DECODE)}/resume") as resumed:
        assert resumed.status == 200
    return response.status


async def blocks_stay_pinned(pair: Pair) -> None:
    """The engine lives, and still keeps what a reader may be reading."""
    await pair.poke(DECODE)
    gauges = await pair.gauges(DECODE)
    assert gauges.reading_blocks > 0
    assert gauges.free_blocks <= gauges.total_blocks - 1 - gauges.reading_blocks


async def nothing_is_held(pair: Pair) -> None:
    """Every block of the decode engine is free again."""

    async def at_base() -> bool:
        return await pair.is_at_base(DECODE)

    await eventually(at_base, "every block of the decode engine is free")


async def test_a_reset_loses_leases_that_are_held_and_the_next_turn_is_right(pair: Pair) -> None:
    messages, _ = await first_turn(pair, "reset, held")
    assert (await pair.gauges(DECODE)).held_blocks > 0
    assert await reset(pair)
    await nothing_is_held(pair)
    await next_turn_lost_its_lease(pair, messages, "reset, held")


async def test_a_reset_frees_no_block_that_is_pinned_and_says_so(pair: Pair) -> None:
    messages, turn = await first_turn(pair, "reset, pinned")
    async with pinned(pair, turn, "reset-pin"):
        assert not await reset(pair)
        await blocks_stay_pinned(pair)
        await next_turn_lost_its_lease(pair, messages, "reset, pinned")
        assert not await reset(pair)
    await nothing_is_held(pair)
    assert await reset(pair)


async def test_a_pause_loses_leases_that_are_held_and_the_next_turn_is_right(pair: Pair) -> None:
    messages, _ = await first_turn(pair, "pause, held")
    assert await pause(pair) == 200
    await nothing_is_held(pair)
    await next_turn_lost_its_lease(pair, messages, "pause, held")


async def test_a_pause_frees_no_block_that_is_pinned_and_leaves_the_engine_alive(pair: Pair) -> None:
    messages, turn = await first_turn(pair, "pause, pinned")
    async with pinned(pair, turn, "pause-pin"):
        assert await pause(pair) == 500
        await blocks_stay_pinned(pair)
        await next_turn_lost_its_lease(pair, messages, "pause, pinned")
        assert await pause(pair) == 500
    await nothing_is_held(pair)
    assert await pause(pair) == 200
