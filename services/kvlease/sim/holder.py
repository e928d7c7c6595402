"""The holder half of a simulated engine: the table of holds, and its references on blocks."""

from collections.abc import Callable, Iterable, Sequence

from kvlease.core.attachment import LeaseOffer, offer_of
from kvlease.core.clock import Clock
from kvlease.core.holding import Grant, Hold, HoldEvent, HoldLimits, HoldTable, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, LeaseState, MissReason
from kvlease.core.records import BlockList, KvLayout, KvLocation, Pinned, PinOutcome
from kvlease.sim.pool import BlockPool
from kvlease.sim.ports import OfferListener


class SimHolder:
    """Answers for one engine incarnation. Runs on one event loop and never awaits."""

    table_class: type[HoldTable] = HoldTable

    def __init__(
        self,
        holder: Holder,
        pool: BlockPool,
        limits: HoldLimits,
        clock: Clock,
        layout: KvLayout,
        location: KvLocation,
    ) -> None:
        self._table = self.table_class(holder, limits)
        self._pool = pool
        self._clock = clock
        self._layout = layout
        self._location = location
        self._order: dict[int, int] = {}
        self._listener: OfferListener | None = None
        self.evictions = 0

    @property
    def holder(self) -> Holder:
        """The incarnation that answers now."""
        return self._table.holder

    @property
    def table(self) -> HoldTable:
        """The table of holds."""
        return self._table

    def place(self, location: KvLocation) -> None:
        """Sets where readers are sent."""
        self._location = location

    def listen(self, listener: OfferListener | None) -> None:
        """Sets who hears of offers and events; None: nobody."""
        self._listener = listener

    # --- what the sidecar asks ----------------------------------------------------------------------------

    def pin(self, ask: PinAsk) -> PinOutcome:
        """Takes or renews a pin; block ids, digests and location come with a read part."""
        outcome = self._table.pin(self._clock.now_s(), ask)
        self._tell()
        if isinstance(outcome, MissReason):
            return outcome
        grant, layout_hash = outcome.grant, self._layout.layout_hash
        if ask.read_part_s <= 0:
            return Pinned(self.holder, grant.tokens, layout_hash)
        blocks = BlockList(grant.block_ids, grant.digests, grant.tokens, grant.tail_digest)
        return Pinned(self.holder, grant.tokens, layout_hash, blocks, self._location)

    def unpin(self, lease_id: int, pin_id: str) -> None:
        """Ends a pin; idempotent."""
        self._table.unpin(self._clock.now_s(), lease_id, pin_id)
        self.give_back()

    def renew(
        self, lease_ids: Iterable[int], duration_s: float, pin_ids: Iterable[str], reservation_s: float
    ) -> dict[int, MissReason]:
        """Renews leases and reservations; the leases that could not be renewed."""
        now_s = self._clock.now_s()
        misses = self._table.renew(now_s, lease_ids, duration_s)
        if reservation_s > 0:
            self._table.renew_reservations(now_s, pin_ids, reservation_s)
        self.give_back()
        return misses

    def end(self, lease_id: int, event: LeaseEvent) -> MissReason | None:
        """Ends a lease; None, or what it was already."""
        miss = self._table.end(self._clock.now_s(), lease_id, event)
        self.give_back()
        return miss

    def set_order(self, lease_ids: Sequence[int]) -> None:
        """Takes the order of eviction, least worth keeping first."""
        self._order = {lease_id: place for place, lease_id in enumerate(lease_ids)}

    def offers(self) -> list[LeaseOffer]:
        """An offer of every hold, for a sidecar that knows nothing."""
        self.give_back()
        return [self._offer(hold) for hold in self._table.holds()]

    def held_blocks(self) -> int:
        """Blocks that leases keep now, each counted once."""
        self.give_back()
        return len({block for hold in self._table.holds() for block in hold.grant.block_ids})

    def reading_blocks(self) -> int:
        """Blocks that pins keep from ending."""
        return self._table.reading_blocks()

    # --- what the engine does -----------------------------------------------------------------------------

    def grant(self, grant: Grant, duration_s: float) -> bool:
        """Grants a provisional CONVERSATION lease and references its blocks."""
        return self._admit(grant, lambda now_s: self._table.grant(now_s, grant, duration_s, provisional=True))

    def grant_transfer(self, grant: Grant, pin_id: str, reservation_s: float) -> bool:
        """Grants a TRANSFER lease under its turn's pin and references its blocks."""
        return self._admit(
            grant, lambda now_s: self._table.grant_transfer(now_s, grant, pin_id, reservation_s)
        )

    def give_back(self) -> None:
        """Returns the blocks of every ended lease to the pool."""
        self._table.advance(self._clock.now_s())
        for hold in self._table.take_ended():
            self._pool.free(hold.grant.block_ids)
        self._tell()

    def make_free(self, blocks: int) -> bool:
        """Evicts leases that nobody reads until `blocks` are free. Whether they are."""
        self.give_back()
        while self._pool.free_blocks < blocks:
            victim = min(filter(self._frees_a_block, self._table.holds()), key=self._worth, default=None)
            if victim is None:
                return False
            self.evictions += 1
            self.end(victim.grant.lease_id, LeaseEvent.EVICT)
        return True

    def reset(self) -> bool:
        """Loses every hold. False when pinned blocks stay referenced."""
        clean = self._table.reset(self._clock.now_s())
        self.give_back()
        return clean

    # --- inside -------------------------------------------------------------------------------------------

    def _admit(self, grant: Grant, admit: Callable[[float], bool]) -> bool:
        if not admit(self._clock.now_s()):
            return False
        self._pool.touch(grant.block_ids)
        hold = self._table.get(grant.lease_id)
        if hold is not None and self._listener is not None:
            self._listener.offered(self._offer(hold))
        self.give_back()
        return True

    def _offer(self, hold: Hold) -> LeaseOffer:
        exclusive_bytes = self._table.exclusive_blocks(hold) * self._layout.block_bytes
        return offer_of(hold, self.holder, self._clock.now_s(), self._layout, exclusive_bytes)

    def _frees_a_block(self, hold: Hold) -> bool:
        unread = hold.state is LeaseState.HELD
        return unread and any(self._pool.references(block_id) == 1 for block_id in hold.grant.block_ids)

    def _worth(self, hold: Hold) -> tuple[int, float]:
        return self._order.get(hold.grant.lease_id, -1), hold.deadline_s

    def _tell(self) -> None:
        events: list[HoldEvent] = self._table.take_events()
        if events and self._listener is not None:
            self._listener.happened(self.holder, events)
