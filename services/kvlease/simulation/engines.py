"""Simulated engines under watch: what they promise is noted, and compared with what happens."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvlease.core.holding import Grant
from kvlease.core.lease import LeaseState, MissReason
from kvlease.sim.engine import SimEngine
from kvlease.sim.holder import SimHolder
from kvlease.sim.reader import PinnedRead, Reader, ReadResult

RATE_LEAST = 0.9
"""The slowest clock's rate: what it counts as a second takes 1 / 0.9."""

TICK_S = 0.5
"""How late a deadline may be seen to have passed: engines look at their table this often."""


@dataclass
class Observed:
    """What the engines of one world were seen to promise, and the promises that were seen broken.

    Attributes:
        contents: per lease, what its blocks held when it was granted.
        must_end_s: per lease, the virtual time after which it must be gone unless pinned.
        granted_s: the virtual time of every grant.
        ended: how leases ended.
    """

    contents: dict[int, dict[int, bytes]] = field(default_factory=dict[int, dict[int, bytes]])
    must_end_s: dict[int, float] = field(default_factory=dict[int, float])
    granted_s: dict[int, float] = field(default_factory=dict[int, float])
    ended: dict[int, LeaseState] = field(default_factory=dict[int, LeaseState])
    problems: list[str] = field(default_factory=list[str])
    used_reads: int = 0


class WatchedHolder(SimHolder):
    """Notes grants, renewals and endings."""

    observed = Observed()

    def grant(self, grant: Grant, duration_s: float) -> bool:
        """Grants, and notes what is kept until when."""
        self._note_blocks(grant)
        self._note_end(grant.lease_id, duration_s)
        return super().grant(grant, duration_s)

    def grant_transfer(self, grant: Grant, pin_id: str, reservation_s: float) -> bool:
        """Grants, and notes what is kept."""
        self._note_blocks(grant)
        return super().grant_transfer(grant, pin_id, reservation_s)

    def renew(
        self, lease_ids: Iterable[int], duration_s: float, pin_ids: Iterable[str], reservation_s: float
    ) -> dict[int, MissReason]:
        """Renews, and notes until when."""
        asked = list(lease_ids)
        for lease_id in asked:
            self._note_end(lease_id, duration_s)
        return super().renew(asked, duration_s, pin_ids, reservation_s)

    def check(self, name: str) -> None:
        """Compares every hold with what was promised."""
        now_s = asyncio.get_running_loop().time()
        for hold in self.table.holds():
            lease_id = hold.grant.lease_id
            for block_id, content in self.observed.contents.get(lease_id, {}).items():
                if self._pool.references(block_id) < 1 or self._pool.read(block_id) != content:
                    self._broken(f"block {block_id} of lease {lease_id:016x} at {name} is not what was kept")
            late_s = now_s - TICK_S - self.observed.must_end_s.get(lease_id, now_s)
            if late_s > 0 and hold.state is LeaseState.HELD:
                self._broken(f"lease {lease_id:016x} at {name} lives {late_s:.1f} s after its last renewal")
            before = self.table.get(hold.grant.supersedes) if not hold.provisional else None
            if before is not None and before.state in (LeaseState.HELD, LeaseState.READING):
                self._broken(f"lease {lease_id:016x} at {name} lives beside the one that it superseded")

    def _note_blocks(self, grant: Grant) -> None:
        kept = {block_id: self._pool.read(block_id) for block_id in grant.block_ids}
        self.observed.contents.setdefault(grant.lease_id, kept)
        self.observed.granted_s.setdefault(grant.lease_id, asyncio.get_running_loop().time())

    def _note_end(self, lease_id: int, duration_s: float) -> None:
        until_s = asyncio.get_running_loop().time() + duration_s / RATE_LEAST
        self.observed.must_end_s[lease_id] = max(until_s, self.observed.must_end_s.get(lease_id, 0.0))

    def _tell(self) -> None:
        events = self._table.take_events()
        for event in events:
            if event.state not in (LeaseState.HELD, LeaseState.READING, LeaseState.DRAINING):
                self.observed.ended[event.lease_id] = event.state
        if events and self._listener is not None:
            self._listener.happened(self.holder, events)

    def _broken(self, problem: str) -> None:
        if problem not in self.observed.problems:
            self.observed.problems.append(problem)


class WatchedReader(Reader):
    """Compares what was READ and is used with what the holder kept."""

    observed = Observed()

    async def read(
        self, read: PinnedRead, source: Sequence[int], destination: Sequence[int], block_bytes: int
    ) -> ReadResult:
        """READs; a READ whose result is used touched no block that changed hands."""
        result = await super().read(read, source, destination, block_bytes)
        if result.used:
            self.observed.used_reads += 1
            kept = self.observed.contents.get(read.order.lease_id, {})
            for block_id, landed in zip(source, destination, strict=True):
                if self._pool.read(landed) != kept.get(block_id):
                    lease_id = read.order.lease_id
                    self.observed.problems.append(f"a READ of lease {lease_id:016x} used garbage")
                    break
        return result


class WatchedEngine(SimEngine):
    """A simulated engine whose two halves are watched."""

    holder_class = WatchedHolder
    reader_class = WatchedReader

    def watch(self, observed: Observed) -> None:
        """Sets where promises are noted."""
        if isinstance(self.holder, WatchedHolder) and isinstance(self.reader, WatchedReader):
            self.holder.observed = observed
            self.reader.observed = observed

    def check(self, name: str) -> None:
        """Compares every hold with what was promised."""
        if isinstance(self.holder, WatchedHolder):
            self.holder.check(name)
