"""A sidecar that is silent, killed or restarted: turns go on, are right, and leave nothing behind."""

import itertools
from typing import Any

import pytest
from tests.engine.fronts import FrontedStack
from tests.engine.pair import PROVISIONAL_S, Outcome, Pair, PairPlan, eventually, whole_blocks

from kvlease.core.ids import lease_id_from_hex
from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SYSTEM, THIRD
from kvlease.router.config import RouterConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL, DECODE = EngineRole.PREFILL, EngineRole.DECODE
LEASE_S = 45.0
"""Between a turn and the next one a sidecar is replaced, and meanwhile nothing is renewed."""


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    """Sidecars behind fronts; leases that outlive a slow restart, and expire when nobody renews them.

    No return is worth keeping a conversation beyond the floor.
    """
    return PairPlan(
        router=RouterConfig(
            rate_samples_min=0,
            heartbeat_interval_s=2.0,
            lease_duration_s=LEASE_S,
            gap_floor_s=LEASE_S,
            gap_returns_per_hour=1e9,
            reservation_s=60.0,
            provisional_s=PROVISIONAL_S,
        ),
        stack=FrontedStack,
    )


@pytest.fixture(scope="module")
def stack(pair: Pair) -> FrontedStack:
    """The pair's stack, whose sidecars can be silenced, killed and restarted."""
    assert isinstance(pair.stack, FrontedStack)
    return pair.stack


class Talk:
    """A conversation whose every question is long enough to be read back."""

    def __init__(self, pair: Pair, name: str) -> None:
        self._pair = pair
        self.name = name
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": f"{name}. {SYSTEM}"}]

    async def turn(self) -> Outcome:
        """The next turn; it ended well, and equals a cold run."""
        question = THIRD if len(self.messages) > 1 else FIRST
        self.messages.append({"role": "user", "content": question})
        turn = await self._pair.turn(self.messages, self.name)
        assert turn.record["ended"] == "well"
        assert turn.reply.equals(await self._pair.cold(self.messages))
        self.messages.append({"role": "assistant", "content": turn.reply.text})
        return turn

    async def is_held(self) -> None:
        """Waits until the holder has acked that it keeps the lease of the last turn."""

        async def is_acked() -> bool:
            lease: dict[str, Any] = (await self._pair.conversation(self.name))["lease"]
            return str(lease["state"]) == "held"

        await eventually(is_acked, f"the lease of {self.name} is held")


async def nothing_waits(pair: Pair) -> None:
    """No request is left in either engine."""
    for role in EngineRole:

        async def is_idle(role: EngineRole = role) -> bool:
            return await pair.is_idle(role)

        await eventually(is_idle, f"nothing waits in the {role.value} engine")


async def replace_sidecar(pair: Pair, stack: FrontedStack, role: EngineRole) -> None:
    """The store notices that a sidecar is gone; then another one takes its place."""
    await stack.bury(role)

    async def is_gone() -> bool:
        return not await pair.is_registered(role)

    await eventually(is_gone, "the record of an engine without a sidecar vanishes")
    await stack.restart(role)
    await eventually(lambda: pair.is_registered(role), "the connector attaches to the restarted sidecar")


async def test_a_restarted_sidecar_of_the_holder_learns_its_leases_and_the_next_turn_reuses_them(
    pair: Pair, stack: FrontedStack
) -> None:
    talk = Talk(pair, "restarted")
    first = await talk.turn()
    await talk.is_held()
    kept = whole_blocks(len(await pair.tokens(talk.messages[:2])))
    stack.kill(DECODE)
    await replace_sidecar(pair, stack, DECODE)
    lease_id = lease_id_from_hex(first.record["lease_id"])

    async def is_recorded() -> bool:
        return await pair.stack.store.get_lease(lease_id) is not None

    await eventually(is_recorded, "the lease is recorded again under its id")
    await talk.is_held()
    await pair.reset_cache(PREFILL)
    second = await talk.turn()
    assert second.path == "readback"
    assert second.reused_tokens >= kept
    assert second.record["outcome"] == "read"
    await nothing_waits(pair)


async def test_turns_go_on_while_the_sidecar_of_the_holder_is_silent(pair: Pair, stack: FrontedStack) -> None:
    talk = Talk(pair, "silent holder")
    await talk.turn()
    stack.silence(DECODE)
    try:
        second = await talk.turn()
        assert (second.path, second.record["reason"]) == ("recompute", "holder_unreachable")
        await nothing_waits(pair)
    finally:
        stack.resume(DECODE)
    await pair.gauges(DECODE)
    await talk.turn()


async def test_turns_go_on_while_the_sidecar_of_the_holder_is_dead(pair: Pair, stack: FrontedStack) -> None:
    talk, other = Talk(pair, "dead holder"), Talk(pair, "begun without a sidecar")
    await talk.turn()
    stack.kill(DECODE)
    second = await talk.turn()
    assert (second.path, second.record["reason"]) == ("recompute", "holder_unreachable")
    assert (await other.turn()).path == "recompute"
    await stack.bury(DECODE)

    async def is_gone() -> bool:
        return not await pair.is_registered(DECODE)

    await eventually(is_gone, "the record of the decode engine vanishes")
    third = await talk.turn()
    assert (third.path, third.record["reason"]) == ("recompute", "engine_unregistered")
    await nothing_waits(pair)
    await stack.restart(DECODE)
    await eventually(lambda: pair.is_registered(DECODE), "the decode engine is registered again")
    await talk.turn()
    await talk.is_held()
    assert (await talk.turn()).path == "readback"


async def test_turns_go_on_without_the_sidecar_of_the_prefill_engine(pair: Pair, stack: FrontedStack) -> None:
    talk = Talk(pair, "prefill")
    await talk.turn()
    stack.silence(PREFILL)
    try:
        second = await talk.turn()
        assert second.record["outcome"] == "unreachable"
        await nothing_waits(pair)
    finally:
        stack.resume(PREFILL)
    stack.kill(PREFILL)
    assert (await talk.turn()).record["outcome"] == "unreachable"
    await nothing_waits(pair)
    await replace_sidecar(pair, stack, PREFILL)
    names = itertools.count()

    async def decode_reads_prefill() -> bool:
        return (await Talk(pair, f"prefill again {next(names)}").turn()).read_bytes > 0

    await eventually(decode_reads_prefill, "the decode engine reads what the prefill engine computed")


async def test_when_nobody_renews_any_more_every_block_of_both_engines_comes_back(pair: Pair) -> None:
    for role in EngineRole:

        async def at_base(role: EngineRole = role) -> bool:
            return await pair.is_at_base(role)

        # A conversation is kept for a lease's time after its turn, and its lease lasts as long again.
        await eventually(at_base, f"every block of the {role.value} engine is free", 10 * LEASE_S)
