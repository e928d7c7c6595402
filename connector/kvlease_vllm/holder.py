"""The holder half: keeps a finished turn's blocks by reference and answers for them.

Two threads meet here. The link's thread asks the table (pin, renew, release); the scheduler's thread grants and
gives blocks back, since only it may touch vLLM's block pool. A lock guards the table; the pool needs none. A
lease that ends on the link's thread leaves its blocks in the table until the scheduler's thread comes by, which
it does before every allocation it can see: `on_new_request`, `get_num_new_matched_tokens`,
`has_pending_block_frees`, `build_connector_meta`, `take_events`.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvlease.core.attachment import LeaseOffer, offer_of
from kvlease.core.holding import Grant, Hold, HoldEvent, HoldLimits, HoldTable, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, LeaseKind, LeaseState, MissReason
from kvlease.core.records import BlockList, KvLayout, Pinned


class EvictionCause(Enum):
    """Why leases are evicted: a request needs blocks, the share for leases is full, a tenant's cap is."""

    PRESSURE = "pressure"
    BUDGET = "budget"
    TENANT = "tenant"


@dataclass(frozen=True, slots=True)
class Gauges:
    """Blocks as the holder sees them; vLLM's own gauge lags while the engine is idle."""

    held_blocks: int
    reading_blocks: int
    free_blocks: int
    total_blocks: int


class BlockHolder:
    """The table of holds, its lock, and the references on vLLM's blocks.

    Args:
        notify: called on either thread, without the lock, when there are events to send to the sidecar.
        before_reset: called on the scheduler's thread when vLLM is about to clear its caches.
    """

    def __init__(
        self,
        holder: Holder,
        pool: Any,
        limits: HoldLimits,
        budget_blocks: int,
        notify: Callable[[Sequence[HoldEvent]], None],
        now_s: Callable[[], float] = time.monotonic,
        before_reset: Callable[[], None] = lambda: None,
    ) -> None:
        self._table = HoldTable(holder, limits)
        self._pool = pool
        self._budget_blocks = budget_blocks
        self._notify = notify
        self._now_s = now_s
        self._before_reset = before_reset
        self._lock = threading.Lock()
        self._order: dict[int, int] = {}
        # Every cause from the start, since the link's thread reads it: its size never changes.
        self.evictions_by_cause = Counter(dict.fromkeys(EvictionCause, 0))
        self._reset_pool = pool.reset_prefix_cache
        pool.reset_prefix_cache = self.reset

    @property
    def evictions(self) -> int:
        """Leases that were evicted so far."""
        return self.evictions_by_cause.total()

    # --- the link's thread --------------------------------------------------------------------------

    @property
    def holder(self) -> Holder:
        """The incarnation that answers now."""
        with self._lock:
            return self._table.holder

    def pin(self, ask: PinAsk) -> Pinned | MissReason:
        """Takes or renews a pin; block ids and digests come with a read part."""
        with self._lock:
            outcome = self._table.pin(self._now_s(), ask)
            holder, events = self._table.holder, self._table.take_events()
        self._tell(events)
        if isinstance(outcome, MissReason):
            return outcome
        grant = outcome.grant
        blocks = BlockList(grant.block_ids, grant.digests, grant.tokens, grant.tail_digest)
        return Pinned(holder, grant.tokens, blocks=blocks if ask.read_part_s > 0 else None)

    def unpin(self, lease_id: int, pin_id: str) -> None:
        """Ends a pin; idempotent."""
        with self._lock:
            self._table.unpin(self._now_s(), lease_id, pin_id)
            events = self._table.take_events()
        self._tell(events)

    def renew(
        self, lease_ids: Iterable[int], duration_s: float, pin_ids: Iterable[str], reservation_s: float
    ) -> dict[int, MissReason]:
        """Renews leases and reservations; returns the leases that could not be renewed."""
        with self._lock:
            now_s = self._now_s()
            misses = self._table.renew(now_s, lease_ids, duration_s)
            self._table.renew_reservations(now_s, pin_ids, reservation_s)
            events = self._table.take_events()
        self._tell(events)
        return misses

    def end(self, lease_id: int, event: LeaseEvent) -> MissReason | None:
        """Ends a lease; None, or what it was already."""
        with self._lock:
            miss = self._table.end(self._now_s(), lease_id, event)
            events = self._table.take_events()
        self._tell(events)
        return miss

    def set_order(self, lease_ids: Sequence[int]) -> None:
        """Takes the sidecar's order of eviction, least worth keeping first; it holds until the next."""
        with self._lock:
            self._order = {lease_id: place for place, lease_id in enumerate(lease_ids)}

    def offers(self, layout: KvLayout) -> tuple[Holder, list[LeaseOffer]]:
        """The holder and an offer of every hold, for a sidecar that knows nothing."""
        with self._lock:
            now_s, holder = self._now_s(), self._table.holder
            self._table.advance(now_s)
            return holder, [self._offer_of(hold, now_s, layout) for hold in self._table.holds()]

    def offer(self, lease_id: int, layout: KvLayout) -> LeaseOffer | None:
        """The offer of one hold; None when it has ended."""
        with self._lock:
            hold = self._table.get(lease_id)
            if hold is None:
                return None
            return self._offer_of(hold, self._now_s(), layout)

    def advance(self) -> None:
        """Applies deadlines, so that the sidecar hears of them also while the engine is idle."""
        with self._lock:
            self._table.advance(self._now_s())
            events = self._table.take_events()
        self._tell(events)

    def gauges(self) -> Gauges:
        """Blocks held and pinned now; the pool's free blocks lag by what the scheduler has not given back."""
        with self._lock:
            self._table.advance(self._now_s())
            held = {block for hold in self._table.holds() for block in hold.grant.block_ids}
            reading = self._table.reading_blocks()
            events = self._table.take_events()
        self._tell(events)
        return Gauges(len(held), reading, self._pool.get_num_free_blocks(), self._pool.num_gpu_blocks)

    # --- the scheduler's thread ---------------------------------------------------------------------

    def grant(self, grant: Grant, duration_s: float) -> bool:
        """Grants a provisional CONVERSATION lease and references its blocks.

        False when the id was used before, or when the budget or the tenant's caps have no place for it beside
        what is being read.
        """
        if not self._admit(
            grant, lambda now_s: self._table.grant(now_s, grant, duration_s, provisional=True)
        ):
            return False
        if self._shrink_to_caps(grant):
            self._shrink_to_budget(keep=grant.lease_id)
            if self._retained_blocks() <= self._budget_blocks:
                return True
        self.end(grant.lease_id, LeaseEvent.EVICT)
        self.give_back()
        return False

    def kept_tokens(self, lease_id: int) -> int:
        """Tokens of a lease that has not ended, 0 without one."""
        with self._lock:
            hold = self._table.get(lease_id)
        return hold.grant.tokens if hold is not None else 0

    def grant_transfer(self, grant: Grant, pin_id: str, reservation_s: float) -> bool:
        """Grants a TRANSFER lease under its turn's pin and references its blocks."""
        return self._admit(
            grant, lambda now_s: self._table.grant_transfer(now_s, grant, pin_id, reservation_s)
        )

    def give_back(self) -> None:
        """Returns the blocks of every ended lease to the pool, tail first."""
        with self._lock:
            self._table.advance(self._now_s())
            ended, events = self._table.take_ended(), self._table.take_events()
        for hold in ended:
            self._pool.free_blocks(
                [self._pool.blocks[block_id] for block_id in reversed(hold.grant.block_ids)]
            )
        self._tell(events)

    def make_free(self, blocks: int) -> bool:
        """Evicts leases that nobody reads until `blocks` are free or none is left. Whether blocks were gained."""
        before = self._pool.get_num_free_blocks()
        self.give_back()
        while self._pool.get_num_free_blocks() < blocks and self._evict_one(EvictionCause.PRESSURE):
            self.give_back()
        return bool(self._pool.get_num_free_blocks() > before)

    def gain(self, blocks: int) -> bool:
        """Gives back or evicts until `blocks` more are free than now. Whether any were gained."""
        return self.make_free(self._pool.get_num_free_blocks() + blocks)

    def reset(self) -> bool:
        """vLLM's `reset_prefix_cache`: loses every hold first. False when pinned blocks stay referenced."""
        self._before_reset()
        self._begin_epoch()
        self.give_back()
        return bool(self._reset_pool())

    def lose_all(self) -> None:
        """Loses every hold without touching the pool's cache; nothing happens when there is none."""
        self._before_reset()
        if len(self._table):
            self._begin_epoch()
        self.give_back()

    # --- inside -------------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        with self._lock:
            self._table.reset(self._now_s())
            events = self._table.take_events()
        # Also without events: the sidecar learns the epoch by it, and routers name the holder of the next turn.
        self._notify(events)

    def _admit(self, grant: Grant, admit: Callable[[float], bool]) -> bool:
        with self._lock:
            admitted = admit(self._now_s())
            events = self._table.take_events()
        if admitted:
            self._pool.touch([self._pool.blocks[block_id] for block_id in grant.block_ids])
        # The caller offers the lease itself: an event about a lease that was not offered would mean nothing.
        self._tell([event for event in events if event.lease_id != grant.lease_id])
        return admitted

    def _offer_of(self, hold: Hold, now_s: float, layout: KvLayout) -> LeaseOffer:
        exclusive_bytes = self._table.exclusive_blocks(hold) * layout.block_bytes
        return offer_of(hold, self._table.holder, now_s, layout, exclusive_bytes)

    def _shrink_to_caps(self, grant: Grant) -> bool:
        """Evicts the tenant's own leases, never another's, until its caps are kept; False when they cannot be."""
        while True:
            with self._lock:
                if not self._table.is_over_cap(grant.tenant):
                    return True
                own = [hold for hold in self._idle(grant.lease_id) if hold.grant.tenant == grant.tenant]
                victim = min(own, key=self._worth, default=None)
                self._evict(victim, EvictionCause.TENANT)
            if victim is None:
                return False
            self.give_back()

    def _shrink_to_budget(self, keep: int) -> None:
        while self._retained_blocks() > self._budget_blocks and self._evict_one(EvictionCause.BUDGET, keep):
            self.give_back()

    def _retained_blocks(self) -> int:
        with self._lock:
            retained = (hold for hold in self._table.holds() if hold.grant.kind is LeaseKind.CONVERSATION)
            return len({block for hold in retained for block in hold.grant.block_ids})

    def _evict_one(self, cause: EvictionCause, keep: int = 0) -> bool:
        """Evicts the lease least worth keeping whose end helps to free a block; False when there is none."""
        with self._lock:
            victim = self._choose(self._idle(keep))
            self._evict(victim, cause)
        return victim is not None

    def _idle(self, keep: int) -> list[Hold]:
        """Leases of conversations that nobody reads, but for one."""
        return [
            hold
            for hold in self._table.holds()
            if hold.state is LeaseState.HELD and hold.grant.lease_id != keep
        ]

    def _evict(self, victim: Hold | None, cause: EvictionCause) -> None:
        if victim is not None:
            self._table.end(self._now_s(), victim.grant.lease_id, LeaseEvent.EVICT)
            self.evictions_by_cause[cause] += 1

    def _choose(self, idle: Sequence[Hold]) -> Hold | None:
        """The victim: one whose end frees a block if there is one, else one of those that only share blocks."""
        by_worth, blocks = sorted(idle, key=self._worth), self._pool.blocks
        for hold in by_worth:
            # From the tail: what conversations share is their head, and a step waits for this.
            if any(blocks[block].ref_cnt == 1 for block in reversed(hold.grant.block_ids)):
                return hold
        keepers = Counter(block_id for hold in idle for block_id in hold.grant.block_ids)
        for hold in by_worth:
            if any(blocks[block].ref_cnt == keepers[block] for block in hold.grant.block_ids):
                return hold
        return None

    def _worth(self, hold: Hold) -> tuple[int, float]:
        """Place in the sidecar's order; what it has not ranked comes first, the earliest deadline foremost."""
        return self._order.get(hold.grant.lease_id, -1), hold.deadline_s

    def _tell(self, events: Sequence[HoldEvent]) -> None:
        if events:
            self._notify(events)
