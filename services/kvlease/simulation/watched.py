"""The parts of a simulated fleet under watch: production code that tells `Promises` what it does."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvlease.core.holding import Grant, PinAsk
from kvlease.core.lease import TERMINAL, MissReason
from kvlease.core.records import LeaseRecord, PinOutcome
from kvlease.core.renewal import Belief, RenewalPolicy, RenewalTable
from kvlease.sim.engine import SimEngine
from kvlease.sim.holder import SimHolder
from kvlease.sim.pool import BlockPool
from kvlease.sim.ports import Landed
from kvlease.sim.reader import PinnedRead, Reader, ReadResult
from kvlease.simulation.loop import Process, VirtualLoop
from kvlease.simulation.promises import Promises, Watched
from kvlease.store.memory import MemorySession, MemoryStore
from kvlease.store.port import Recorded


@dataclass(frozen=True, slots=True)
class Watch:
    """Who watches what."""

    promises: Promises
    loop: VirtualLoop
    engine: Watched

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self.loop.virtual_s


class WatchedPool(BlockPool):
    """Tells which blocks it hands out."""

    watch: Watch

    def allocate(self, count: int) -> list[int] | None:
        """Hands out blocks that nobody keeps."""
        taken = super().allocate(count)
        if taken:
            self.watch.promises.check_handed_out(self.watch.engine, taken)
        return taken


class WatchedHolder(SimHolder):
    """Tells of grants, renewals, pins and endings."""

    watch: Watch

    def grant(self, grant: Grant, duration_s: float) -> bool:
        """Grants, and tells what is kept until when."""
        self.watch.promises.granted(self.watch.engine, grant, self.watch.now_s, duration_s)
        return super().grant(grant, duration_s)

    def grant_transfer(self, grant: Grant, pin_id: str, reservation_s: float) -> bool:
        """Grants, and tells what is kept."""
        self.watch.promises.granted(self.watch.engine, grant, self.watch.now_s, 0.0)
        return super().grant_transfer(grant, pin_id, reservation_s)

    def renew(
        self, lease_ids: Iterable[int], duration_s: float, pin_ids: Iterable[str], reservation_s: float
    ) -> dict[int, MissReason]:
        """Renews, and tells until when."""
        asked, watch = list(lease_ids), self.watch
        misses = super().renew(asked, duration_s, pin_ids, reservation_s)
        for lease_id in asked:
            if lease_id not in misses:
                watch.promises.renewed(watch.engine, lease_id, watch.now_s, duration_s)
        return misses

    def pin(self, ask: PinAsk) -> PinOutcome:
        """Pins what is still what was granted."""
        outcome = super().pin(ask)
        if not isinstance(outcome, MissReason):
            self.watch.promises.check_pinned(self.watch.engine, ask.lease_id)
        return outcome

    def give_back(self) -> None:
        """Gives back all that nobody keeps."""
        super().give_back()
        self.watch.promises.check_holds(self.watch.engine, self.watch.now_s)

    def _tell(self) -> None:
        events, watch, holder = self._table.take_events(), self.watch, self._table.holder
        for event in events:
            hold = self._table.get(event.lease_id)
            if event.confirmed and hold is not None:
                watch.promises.check_confirmed(watch.engine, hold)
            kept = watch.promises.kept.get(event.lease_id)
            if event.state in TERMINAL and kept is not None:
                kept.ended = event.state
        watch.promises.check_epoch(holder.boot_id, holder.epoch)
        if events and self._listener is not None:
            self._listener.happened(holder, events)


class WatchedReader(Reader):
    """Tells of READs that begin, that land and that are used."""

    watch: Watch

    async def read(
        self, read: PinnedRead, source: Sequence[int], destination: Sequence[int], block_bytes: int
    ) -> ReadResult:
        """READs under a pin that the holder has, until the result is used."""
        promises, engine, order = self.watch.promises, self.watch.engine, read.order
        reader, boot_id = engine.process, read.holder.boot_id
        promises.check_pin_of_read(reader, boot_id, order.lease_id, order.pin_id, read.fence_s)
        result = await super().read(read, source, destination, block_bytes)
        if result.used:
            promises.check_pin_of_read(reader, boot_id, order.lease_id, order.pin_id, read.fence_s)
            pairs = list(zip(source, destination, strict=True))
            promises.check_used(engine, boot_id, order.lease_id, pairs)
        return result

    def _landing(self, owned: tuple[int, ...], block_bytes: int) -> Landed:
        land, pool = super()._landing(owned, block_bytes), self._pool
        owners = pool.owners(owned)

        def watched(place: int, content: bytes) -> None:
            if pool.owner(owned[place]) != owners[place]:
                self.watch.promises.broken("a", f"{self.watch.engine.process.name} lets a late READ write on")
            land(place, content)

        return watched


class WatchedEngine(SimEngine):
    """A simulated engine whose parts are watched."""

    pool_class = WatchedPool
    holder_class = WatchedHolder
    reader_class = WatchedReader

    def begin_watch(self, promises: Promises, loop: VirtualLoop, process: Process) -> None:
        """Tells the parts who watches them."""
        engine = Watched(process, self.holder.table, self.pool)
        promises.engines[self.holder.holder.boot_id] = engine
        watch = Watch(promises, loop, engine)
        for part in (self.pool, self.holder, self.reader):
            assert isinstance(part, WatchedPool | WatchedHolder | WatchedReader)
            part.watch = watch


class WatchedRenewals(RenewalTable):
    """A router's renewals: after every ack, what the router believes is compared with what is."""

    def __init__(self, policy: RenewalPolicy, promises: Promises, router: Process) -> None:
        super().__init__(policy)
        self._promises = promises
        self._router = router

    def ack(self, now_s: float, sequence: int, misses: Mapping[int, MissReason]) -> bool:
        """Takes the registry's answer."""
        again = super().ack(now_s, sequence, misses)
        for lease_id, lease in self._leases.items():
            until_s = self._held_until_s(lease_id, lease)
            if until_s is not None and now_s < until_s and self.belief(now_s, lease_id) is Belief.HELD:
                self._promises.check_belief(self._router, lease_id, until_s)
        return again


class WatchedStore(MemoryStore):
    """A store whose generations are watched."""

    promises: Promises

    def commit_lease(self, session: MemorySession, record: LeaseRecord, supersedes: int) -> Recorded:
        """Stores a lease record."""
        recorded = super().commit_lease(session, record, supersedes)
        if recorded.generation and record.conversation_key:
            leaf = record.tenant.encode() + record.conversation_key
            self.promises.check_generation(leaf, recorded.generation)
        return recorded

    @property
    def recorded_leases(self) -> int:
        """Leases that are recorded now."""
        return len(self._state.leases)

    def revoke(self, engine_id: str) -> None:
        """Ends the session of an engine under its sidecar."""
        session = self._state.owners.get(engine_id)
        if session is not None:
            session.revoke()
