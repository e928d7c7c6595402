"""What the parts of one world promised, and which promises were seen broken.

Everything is compared in virtual time when it happens: whatever a part believes, its clock translates.
"""

from dataclasses import dataclass, field

from kvlease.core.holding import Grant, Hold, HoldTable
from kvlease.core.ids import lease_id_to_hex
from kvlease.core.lease import LeaseState
from kvlease.sim.pool import BlockPool
from kvlease.simulation.loop import Process

RATE_LEAST = 0.9
"""The slowest clock's rate: what it counts as a second takes 1 / 0.9."""

ROUNDING_S = 1e-6

_LIVE = (LeaseState.HELD, LeaseState.READING)


@dataclass(slots=True)
class Kept:
    """What a lease keeps.

    Attributes:
        owners: per block, how often it had been handed out when the lease was granted.
        must_end_s: the virtual time after which it must be gone unless it is pinned.
        deadline_s: the virtual time until which its holder keeps it.
    """

    owners: dict[int, int]
    contents: dict[int, bytes]
    must_end_s: float
    deadline_s: float
    ended: LeaseState | None = None


@dataclass(slots=True)
class Watched:
    """An engine process that can be looked into."""

    process: Process
    table: HoldTable
    pool: BlockPool


@dataclass(slots=True)
class Promises:
    """Of one world.

    Attributes:
        kept: per lease id, also of leases that have ended.
        engines: engine processes by boot id, also those that died.
        generations: per conversation, the latest generation.
    """

    kept: dict[int, Kept] = field(default_factory=dict[int, Kept])
    engines: dict[str, Watched] = field(default_factory=dict[str, Watched])
    epochs: dict[str, int] = field(default_factory=dict[str, int])
    generations: dict[bytes, int] = field(default_factory=dict[bytes, int])
    used_reads: int = 0
    problems: list[str] = field(default_factory=list[str])

    def broken(self, promise: str, what: str) -> None:
        """Notes a promise that was broken: (a) to (f), in the order in which they are listed in `run`."""
        problem = f"({promise}) {what}"
        if problem not in self.problems:
            self.problems.append(problem)

    # --- at the holder ------------------------------------------------------------------------------------

    def granted(self, engine: Watched, grant: Grant, now_s: float, duration_s: float) -> None:
        """A lease keeps its blocks as they are now."""
        pool, block_ids = engine.pool, grant.block_ids
        self.kept.setdefault(
            grant.lease_id,
            Kept(
                dict(zip(block_ids, pool.owners(block_ids), strict=True)),
                dict(zip(block_ids, pool.read_all(block_ids), strict=True)),
                now_s + duration_s / RATE_LEAST,
                engine.process.virtual_s(engine.process.local_s(now_s) + duration_s),
            ),
        )

    def renewed(self, engine: Watched, lease_id: int, now_s: float, duration_s: float) -> None:
        """A lease lives for `duration_s` more, and not much longer; one that the same call ended, ended early."""
        kept, process = self.kept[lease_id], engine.process
        kept.must_end_s = max(kept.must_end_s, now_s + duration_s / RATE_LEAST)
        kept.deadline_s = max(kept.deadline_s, process.virtual_s(process.local_s(now_s) + duration_s))

    def check_holds(self, engine: Watched, now_s: float) -> None:
        """(a) what is kept is what was granted; (b) what nobody renews is gone."""
        for hold in engine.table.holds():
            kept = self.kept[hold.grant.lease_id]
            if now_s > kept.must_end_s + ROUNDING_S and hold.state is LeaseState.HELD:
                lease = lease_id_to_hex(hold.grant.lease_id)
                self.broken("b", f"lease {lease} at {engine.process.name} outlives its last renewal")
        if engine.table.has_ended():
            self.broken("b", f"{engine.process.name} keeps blocks of leases that have ended")

    def check_confirmed(self, engine: Watched, hold: Hold) -> None:
        """(c) a confirmed lease lives alone."""
        before = engine.table.get(hold.grant.supersedes)
        if before is not None and before.state in _LIVE and before is not hold:
            lease = lease_id_to_hex(hold.grant.lease_id)
            self.broken(
                "c", f"lease {lease} at {engine.process.name} lives beside the one that it superseded"
            )

    def check_handed_out(self, engine: Watched, blocks: list[int]) -> None:
        """(b) a block that is handed out is kept by nobody."""
        kept = {block_id for hold in engine.table.holds() for block_id in hold.grant.block_ids}
        if not kept.isdisjoint(blocks):
            self.broken("b", f"{engine.process.name} hands out blocks that a lease keeps")

    def check_epoch(self, boot_id: str, epoch: int) -> None:
        """(e) epochs grow."""
        if epoch < self.epochs.get(boot_id, 0):
            self.broken("e", "an epoch went back")
        self.epochs[boot_id] = epoch

    def check_generation(self, leaf: bytes, generation: int) -> None:
        """(e) generations grow."""
        if generation < self.generations.get(leaf, 0):
            self.broken("e", "a generation went back")
        self.generations[leaf] = generation

    def check_pinned(self, engine: Watched, lease_id: int) -> None:
        """(d) a lease that has ended is pinned no more, and what is pinned is what was granted."""
        kept = self.kept.get(lease_id)
        if kept is None or kept.ended is not None:
            self.broken("d", f"{engine.process.name} pins lease {lease_id_to_hex(lease_id)}, which has ended")
        elif self._is_changed(engine, kept):
            self.broken(
                "a", f"{engine.process.name} pins lease {lease_id_to_hex(lease_id)}, whose blocks changed"
            )

    # --- at the reader ------------------------------------------------------------------------------------

    def check_pin_of_read(
        self, reader: Process, boot_id: str, lease_id: int, pin_id: str, fence_s: float
    ) -> None:
        """(d) while a reader counts on a pin, the holder has it. A holder that died has no memory to read."""
        engine = self.engines[boot_id]
        if engine.process.dead:
            return
        hold, lease = engine.table.get(lease_id), lease_id_to_hex(lease_id)
        pin = hold.pins.get(pin_id) if hold is not None else None
        if pin is None:
            self.broken(
                "d", f"{reader.name} READs lease {lease} under a pin that {engine.process.name} has not"
            )
        elif reader.virtual_s(fence_s) > engine.process.virtual_s(pin.read_deadline_s) + ROUNDING_S:
            self.broken("d", f"the fence of {reader.name} for lease {lease} lies behind the pin's deadline")

    def check_used(self, reader: Watched, boot_id: str, lease_id: int, blocks: list[tuple[int, int]]) -> None:
        """(a) what a READ that is used touched had not changed hands. `blocks`: the holder's and the reader's."""
        self.used_reads += 1
        engine, kept, lease = self.engines[boot_id], self.kept.get(lease_id), lease_id_to_hex(lease_id)
        if kept is None:
            self.broken("a", f"a READ of lease {lease}, which was never granted, is used")
            return
        if not engine.process.dead and self._is_changed(engine, kept):
            self.broken("a", f"a READ of lease {lease} is used although its blocks changed hands")
        if any(reader.pool.read(here) != kept.contents.get(there) for there, here in blocks):
            self.broken("a", f"a READ of lease {lease} brought what was not kept")

    def _is_changed(self, engine: Watched, kept: Kept) -> bool:
        return engine.pool.owners(kept.owners) != list(kept.owners.values())

    # --- at the router ------------------------------------------------------------------------------------

    def check_belief(self, router: Process, lease_id: int, held_until_s: float) -> None:
        """(d) a router believes in no lease for longer than its holder keeps it, unless that ended it early."""
        kept = self.kept.get(lease_id)
        if kept is None:
            self.broken("d", f"{router.name} believes in a lease that was never granted")
        elif router.virtual_s(held_until_s) > kept.deadline_s + ROUNDING_S:
            lease = lease_id_to_hex(lease_id)
            self.broken("d", f"{router.name} believes in lease {lease} for longer than its holder")
