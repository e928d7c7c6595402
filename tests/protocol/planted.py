"""Bugs planted in the simulated fleet, each with the seed that catches it first.

`python tests/protocol/planted.py` hunts for those seeds again, from 1 to 200, and prints them.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from kvlease.core.digests import BlockChain
from kvlease.core.errors import KvleaseError
from kvlease.core.holding import Hold, HoldTable, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, LeaseState, MissReason
from kvlease.core.records import Pinned, PinOutcome
from kvlease.core.turn import ReadOrder
from kvlease.registry.registry import Registry
from kvlease.registry.renewals import Heartbeat, PendingBeat, RenewalSession
from kvlease.sidecar.sidecar import Sidecar
from kvlease.sim.ports import OfferListener
from kvlease.sim.reader import PinnedRead, ReadResult
from kvlease.simulation.network import NetworkSettings
from kvlease.simulation.run import RunResult, simulate
from kvlease.simulation.transports import SimTransfers
from kvlease.simulation.watched import (
    WatchedEngine,
    WatchedHolder,
    WatchedReader,
    WatchedRenewals,
    WatchedStore,
)
from kvlease.simulation.world import Parts, WorldSettings
from kvlease.store.memory import MemorySession

SEEDS_MAX = 200

SCARCE = WorldSettings(
    seed=1,
    duration_s=25.0,
    clients=5,
    total_blocks=100,
    read_s=(2.6, 7.0),
    network=NetworkSettings(slow_share=0.1),
)
"""Blocks are scarce, so that a freed one is soon written again; READs and messages are slow."""


def scarce(*fault_kinds: str, **changes: Any) -> WorldSettings:
    """The same with one kind of fault again and again."""
    return replace(SCARCE, fault_kinds=frozenset(fault_kinds), **changes)


REPEATED = scarce("slow_down", branches=0.7, total_blocks=200, network=NetworkSettings(repeats=0.3))
"""Messages come twice, the second time late, and several readers of one lease meet."""


# --- the holder -------------------------------------------------------------------------------------------


def holder_of(table: type[HoldTable]) -> type[WatchedEngine]:
    """An engine whose holder has another table."""
    holder = type("PlantedHolder", (WatchedHolder,), {"table_class": table})
    return type("PlantedEngine", (WatchedEngine,), {"holder_class": holder})


class ForgetsPins(HoldTable):
    """An ending frees the blocks although a pin lives."""

    def end(self, now_s: float, lease_id: int, event: LeaseEvent) -> MissReason | None:
        return super().end(now_s, lease_id, LeaseEvent.LOSE_ENGINE)


class EvictsPinned(WatchedHolder):
    table_class = ForgetsPins

    def _frees_a_block(self, hold: Hold) -> bool:
        return any(self._pool.references(block_id) == 1 for block_id in hold.grant.block_ids)


class NeverExpires(HoldTable):
    """A lease that nobody renews stays."""

    def advance(self, now_s: float) -> None:
        for hold in self.holds():
            hold.deadline_s = max(hold.deadline_s, now_s + 1.0)
        super().advance(now_s)


class UnpinsEverybody(HoldTable):
    """An UNPIN names only the lease, as NIXL's notification does: the first reader that is done ends all pins."""

    def unpin(self, now_s: float, lease_id: int, pin_id: str) -> None:
        hold = self.get(lease_id)
        for pin in [*hold.pins] if hold is not None else [pin_id]:
            super().unpin(now_s, lease_id, pin)


class HasNoDraining(HoldTable):
    """An ending that comes during a READ is not accepted, and nobody repeats it."""

    def _apply(self, hold: Hold, event: LeaseEvent) -> None:
        if hold.state is not LeaseState.READING or event not in (LeaseEvent.SUPERSEDE, LeaseEvent.RELEASE):
            super()._apply(hold, event)


class ForgetsDeadlineOfRead(HoldTable):
    """A deadline that passes during a READ is not looked at again after the UNPIN."""

    def _expire_if_due(self, now_s: float, hold: Hold) -> None:
        if hold.state is LeaseState.READING:
            hold.deadline_s = now_s + 1e6
        else:
            super()._expire_if_due(now_s, hold)


class SleepsOverLeases(WatchedEngine):
    """The caches are cleared for sleep, and the leases stay: what their blocks hold may be anything."""

    def reset_prefix_cache(self) -> bool:
        if self.running or self.reader.quarantined_blocks or self.holder.reading_blocks():
            return super().reset_prefix_cache()
        for block_id in range(self.pool.total_blocks):
            self.pool._forget(block_id)
        return True


class FreesWithoutSidecar(WatchedHolder):
    """A failsafe of its own: with its sidecar gone for 0.3 s it frees everything, pinned or not."""

    _alone_since_s: float | None = None

    def listen(self, listener: OfferListener | None) -> None:
        self._alone_since_s = self._clock.now_s() if listener is None else None
        super().listen(listener)

    def give_back(self) -> None:
        if self._alone_since_s is not None and self._clock.now_s() > self._alone_since_s + 0.3:
            for hold in list(self._table.holds()):
                self._table.end(self._clock.now_s(), hold.grant.lease_id, LeaseEvent.LOSE_ENGINE)
        super().give_back()


class FreesTwice(WatchedHolder):
    """The blocks of an ended lease are given back once more when its release is repeated."""

    def end(self, lease_id: int, event: LeaseEvent) -> MissReason | None:
        hold = self._table.get(lease_id)
        miss = super().end(lease_id, event)
        if hold is not None and self._table.get(lease_id) is None:
            shared = [block for block in hold.grant.block_ids if self._pool.references(block) > 0]
            self._pool.free(shared)
        return miss


class PromisesLonger(HoldTable):
    """What a lease was granted for counts from its last renewal twice over."""

    def renew(self, now_s: float, lease_ids: Sequence[int], duration_s: float) -> dict[int, MissReason]:
        return super().renew(now_s, lease_ids, 2 * duration_s)


# --- the reader -------------------------------------------------------------------------------------------


class IgnoresTheFence(WatchedReader):
    """A READ counts whenever it ends."""

    async def read(
        self, read: PinnedRead, source: Sequence[int], destination: Sequence[int], block_bytes: int
    ) -> ReadResult:
        late = replace(read, fence_s=read.fence_s + 1e6)
        return await super().read(late, source, destination, block_bytes)


class FenceFromTheReply(WatchedReader):
    """The fence counts from when the pin was there, not from before it was asked for."""

    async def pin(self, order: ReadOrder, tenant: str, prompt: BlockChain) -> PinnedRead | str:
        read = await super().pin(order, tenant, prompt)
        if isinstance(read, str):
            return read
        return replace(read, fence_s=read.fence_s + self._clock.now_s() - read.asked_s)


class FenceWithoutSkew(WatchedReader):
    """The fence counts the whole read part, as if all clocks ran alike."""

    async def pin(self, order: ReadOrder, tenant: str, prompt: BlockChain) -> PinnedRead | str:
        read = await super().pin(order, tenant, prompt)
        return (
            read if isinstance(read, str) else replace(read, fence_s=read.asked_s + self._limits.read_part_s)
        )


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


def reader_of(reader: type[WatchedReader]) -> Parts:
    """A fleet whose engines read in another way."""
    return Parts(engine=type("PlantedEngine", (WatchedEngine,), {"reader_class": reader}))


class KnowsEnginesByIdOnly(SimTransfers):
    """A handshake compares the engine id, which was configured and came back under another boot id."""

    def _is_same(self, found: Holder, asked: Holder) -> bool:
        return found.engine_id == asked.engine_id


# --- sidecar, registry, router, store ---------------------------------------------------------------------


class AcksRenewalsEarly(Sidecar):
    """The sidecar answers for the holder, and tells it afterwards."""

    async def renew(
        self,
        engine_id: str,
        lease_ids: Sequence[int],
        duration_s: float,
        pin_ids: Sequence[str],
        reservation_s: float,
    ) -> dict[int, MissReason]:
        forward = super().renew
        later(lambda: forward(engine_id, lease_ids, duration_s, pin_ids, reservation_s))
        return {}


class AcksPinsEarly(Sidecar):
    """The sidecar answers from what it knows when a read part is asked for again, and tells the holder afterwards."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)  # type: ignore[arg-type]
        self._known: dict[str, Pinned] = {}

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        known = self._known.get(ask.pin_id)
        if known is not None:
            forward = super().pin
            later(lambda: forward(ask, wait_for_offer_s))
            return known
        outcome = await super().pin(ask, wait_for_offer_s)
        if isinstance(outcome, Pinned) and outcome.blocks is not None:
            self._known[ask.pin_id] = outcome
        return outcome


class AcksHeartbeatsEarly(Registry):
    """The registry acks a heartbeat before the holders have it."""

    def renew(self, session: RenewalSession, beat: Heartbeat) -> PendingBeat:
        return replace(super().renew(session, beat), answers=())


class BelievesFromTheAck(WatchedRenewals):
    """The router counts from when it heard, not from before it asked."""

    def ack(self, now_s: float, sequence: int, misses: Mapping[int, MissReason]) -> bool:
        if sequence in self._sent_s:
            self._sent_s[sequence] = now_s
        return super().ack(now_s, sequence, misses)


class BelievesUnasked(WatchedRenewals):
    """The router believes in a lease that it learnt of, before any holder has acked a renewal."""

    def expect(self, now_s: float, lease_id: int, engine_id: str, gap_s: float = 0.0) -> None:
        super().expect(now_s, lease_id, engine_id, gap_s)
        self._leases[lease_id].held_until_s = now_s + 0.8 * self.policy.duration_s


class CountsWithTheSession(WatchedStore):
    """Generations are counted in a record that vanishes with its engine."""

    def drop_engine(self, session: MemorySession, engine_id: str) -> None:
        super().drop_engine(session, engine_id)
        self._state.revision = 0


_LATER: set["asyncio.Future[object]"] = set()


def later(work: Callable[[], Awaitable[object]]) -> None:
    """Does something afterwards; nobody hears how it went."""
    task: asyncio.Future[object] = asyncio.ensure_future(_quietly(work))
    _LATER.add(task)
    task.add_done_callback(_LATER.discard)


async def _quietly(work: Callable[[], Awaitable[object]]) -> None:
    with suppress(KvleaseError):
        await work()


# --- the table --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plant:
    """A planted bug.

    Attributes:
        promise: the one that it breaks, as it is listed in `kvlease.simulation.run`; several letters: any of them.
        seed: the first that catches it.
        seam: the review of vLLM's seams that it stands for; empty for others.
    """

    parts: Parts
    promise: str
    seed: int
    seam: str = ""
    world: WorldSettings = field(default=SCARCE)


def _holder(holder: type[WatchedHolder]) -> Parts:
    return Parts(engine=type("PlantedEngine", (WatchedEngine,), {"holder_class": holder}))


PLANTS: dict[str, Plant] = {
    "a sidecar that acks renewals early": Plant(Parts(sidecar=AcksRenewalsEarly), "d", 1, "1a"),
    "a sidecar that acks pins early": Plant(
        Parts(sidecar=AcksPinsEarly), "ad", 2, "1a", world=scarce("pause")
    ),
    "a failsafe that frees pinned blocks": Plant(
        _holder(FreesWithoutSidecar), "ad", 2, "1b", world=scarce("restart_sidecar")
    ),
    "a handshake that compares engine ids": Plant(
        Parts(transfers=KnowsEnginesByIdOnly), "a", 7, "1d", world=scarce("restart_under_the_same_id")
    ),
    "a fence that counts from the reply": Plant(reader_of(FenceFromTheReply), "d", 3, "1e, 9"),
    "a READ that counts whenever it ends": Plant(reader_of(IgnoresTheFence), "ad", 1, "1e"),
    "a fence without the skew of clocks": Plant(reader_of(FenceWithoutSkew), "d", 1, "1e"),
    "a late write without quarantine": Plant(reader_of(NoQuarantine), "a", 1, "2"),
    "an UNPIN of every reader": Plant(Parts(engine=holder_of(UnpinsEverybody)), "ad", 20, "4", REPEATED),
    "a sleep that keeps leases": Plant(
        Parts(engine=SleepsOverLeases), "a", 4, "5", world=scarce("sleep", clients=2)
    ),
    "a supersede that is lost during a READ": Plant(Parts(engine=holder_of(HasNoDraining)), "c", 2, "8"),
    "a deadline that is lost during a READ": Plant(
        Parts(engine=holder_of(ForgetsDeadlineOfRead)), "b", 1, "8", world=scarce("restart_router", "pause")
    ),
    "a registry that acks before the holder": Plant(Parts(registry=AcksHeartbeatsEarly), "d", 1, "9"),
    "a belief that counts from the ack": Plant(Parts(renewals=BelievesFromTheAck), "d", 1, "9"),
    "a belief in a lease that was only seen": Plant(Parts(renewals=BelievesUnasked), "d", 1, "9, 12"),
    "a generation that begins again": Plant(Parts(store=CountsWithTheSession), "e", 1, "16"),
    "pinned blocks that are evicted": Plant(_holder(EvictsPinned), "ad", 1, "7"),
    "blocks that are given back twice": Plant(_holder(FreesTwice), "ab", 1, "19"),
    "a lease that never expires": Plant(Parts(engine=holder_of(NeverExpires)), "b", 1),
    "a renewal that keeps for longer": Plant(Parts(engine=holder_of(PromisesLonger)), "b", 1),
    "digests that nobody compares": Plant(
        reader_of(VerifiesNothing), "a", 4, world=scarce("slow_down", edits=0.6)
    ),
}


def run(plant: Plant, seed: int) -> RunResult:
    """One seed of a fleet with the bug."""
    return simulate(replace(plant.world, seed=seed, parts=plant.parts))


def catches(plant: Plant, result: RunResult) -> bool:
    """Whether a promise was seen broken that the bug breaks."""
    return any(problem[1] in plant.promise for problem in result.problems if problem.startswith("("))


def first_catch(plant: Plant, seeds: Sequence[int]) -> tuple[int, str]:
    """The first of the seeds that catches the bug, and how; 0 when none does."""
    for seed in seeds:
        result = run(plant, seed)
        if catches(plant, result):
            return seed, result.problems[0]
    return 0, "not caught"


def main() -> None:
    """Prints the first seed that catches each bug, or each of those that are named."""
    logging.getLogger("kvlease").setLevel(logging.CRITICAL)
    for name in sys.argv[1:] or PLANTS:
        seed, found = first_catch(PLANTS[name], range(1, SEEDS_MAX + 1))
        sys.stdout.write(f"{seed:4} {name}: {found}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
