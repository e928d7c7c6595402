"""Faults planted in the engine that the simulation must catch; a simulation that passes them checks nothing."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvlease.core.digests import BlockChain
from kvlease.core.holding import Hold, HoldTable
from kvlease.core.lease import LeaseEvent, MissReason
from kvlease.core.turn import ReadOrder
from kvlease.router.config import RouterConfig
from kvlease.sim.reader import PinnedRead, ReadResult
from kvlease.simulation.engines import WatchedEngine, WatchedHolder, WatchedReader
from kvlease.simulation.run import simulate
from kvlease.simulation.world import WorldSettings

pytestmark = pytest.mark.simulation

SEEDS_MAX = 200
HARSH = WorldSettings(seed=1, duration_s=40.0, clients=5, total_blocks=130, read_s=(2.0, 9.0))
"""Blocks are scarce, so that a freed one is soon written again."""

SLOW = replace(HARSH, read_s=(8.0, 25.0), router=RouterConfig(reservation_s=5.5))
"""READs often outlive both parts of their pins."""


class ForgetsPins(HoldTable):
    """An ending frees the blocks although a pin lives."""

    def end(self, now_s: float, lease_id: int, event: LeaseEvent) -> MissReason | None:
        return super().end(now_s, lease_id, LeaseEvent.LOSE_ENGINE)


class NeverExpires(HoldTable):
    """A lease that nobody renews stays."""

    def advance(self, now_s: float) -> None:
        for hold in self.holds():
            hold.deadline_s = max(hold.deadline_s, now_s + 1.0)
        super().advance(now_s)


class HolderThatEvictsPinnedBlocks(WatchedHolder):
    table_class = ForgetsPins

    def _frees_a_block(self, hold: Hold) -> bool:
        return any(self._pool.references(block_id) == 1 for block_id in hold.grant.block_ids)


class HolderThatNeverExpires(WatchedHolder):
    table_class = NeverExpires


class IgnoresTheFence(WatchedReader):
    """A READ counts whenever it ends."""

    async def read(
        self, read: PinnedRead, source: Sequence[int], destination: Sequence[int], block_bytes: int
    ) -> ReadResult:
        late = replace(read, fence_s=read.fence_s + 1e6)
        return await super().read(late, source, destination, block_bytes)


class NoQuarantine(WatchedReader):
    """Blocks of a READ that was given up are handed out although it still writes."""

    def _quarantine(self, task: "asyncio.Task[None]", blocks: tuple[int, ...]) -> None:
        pass


class VerifiesNothing(WatchedReader):
    """All of a lease counts as the prompt's, as vLLM's own connector has it."""

    async def pin(self, order: ReadOrder, tenant: str, prompt: BlockChain) -> PinnedRead | str:
        read = await super().pin(order, tenant, prompt)
        if isinstance(read, str):
            return read
        return replace(read, verified_tokens=min(read.blocks.tokens, prompt.tokens))


class EngineThatEvictsPinnedBlocks(WatchedEngine):
    holder_class = HolderThatEvictsPinnedBlocks


class EngineThatNeverExpires(WatchedEngine):
    holder_class = HolderThatNeverExpires


class EngineThatIgnoresTheFence(WatchedEngine):
    reader_class = IgnoresTheFence


class EngineWithoutQuarantine(WatchedEngine):
    reader_class = NoQuarantine


class EngineThatVerifiesNothing(WatchedEngine):
    reader_class = VerifiesNothing


@pytest.mark.parametrize(
    ("engine_class", "world"),
    [
        (EngineThatEvictsPinnedBlocks, HARSH),
        (EngineThatNeverExpires, HARSH),
        (EngineThatIgnoresTheFence, SLOW),
        (EngineWithoutQuarantine, HARSH),
        (EngineThatVerifiesNothing, HARSH),
    ],
)
def test_a_planted_fault_is_caught(engine_class: type[WatchedEngine], world: WorldSettings) -> None:
    for seed in range(1, SEEDS_MAX + 1):
        result = simulate(replace(world, seed=seed, engine_class=engine_class))
        if not result.ok:
            return
    pytest.fail(f"not caught in {SEEDS_MAX} seeds")


@pytest.mark.parametrize("world", [HARSH, SLOW], ids=["harsh", "slow"])
@pytest.mark.parametrize("seed", range(1, 4))
def test_without_a_planted_fault_the_same_worlds_keep_every_promise(world: WorldSettings, seed: int) -> None:
    result = simulate(replace(world, seed=seed))
    assert result.ok, result.problems
