"""The holder's table, its references on a block pool, and who hears of what."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.connector.fake_pool import FakeBlock, FakePool

from kvlease.core.digests import BlockChain, ChainRoot, chain
from kvlease.core.holding import Grant, HoldEvent, HoldLimits, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, LeaseKind, LeaseState, MissReason
from kvlease.core.records import KvLayout, Pinned
from kvlease.testing.clock import ManualClock
from kvlease_vllm.holder import BlockHolder, EvictionCause

ME = Holder("engine", "boot", 1)
LAYOUT = KvLayout(4, "float32", 1, 1, 64, "layout")


class Bench:
    """A holder on a pool of 20 blocks, of which 10 may be retained."""

    def __init__(self, budget: int = 10, limits: HoldLimits | None = None) -> None:
        self.clock = ManualClock()
        self.pool = FakePool(20)
        self.events: list[HoldEvent] = []
        self.holder = BlockHolder(
            ME,
            self.pool,
            limits or HoldLimits(reading_blocks_max=8),
            budget,
            self.events.extend,
            self.clock.now_s,
        )

    def grant(
        self,
        lease_id: int,
        *blocks: int,
        supersedes: int = 0,
        duration_s: float = 20.0,
        tenant: str = "tenant",
    ) -> bool:
        return self.holder.grant(_grant(lease_id, blocks, supersedes=supersedes, tenant=tenant), duration_s)

    def exclusive_bytes(self, lease_id: int) -> int:
        offer = self.holder.offer(lease_id, LAYOUT)
        assert offer is not None
        return offer.record.exclusive_bytes

    def held(self) -> list[int]:
        return [offer.record.lease_id for offer in self.holder.offers(LAYOUT)[1]]

    def pin(self, lease_id: int, pin_id: str = "pin", read_part_s: float = 5.0) -> Pinned | MissReason:
        return self.holder.pin(PinAsk(lease_id, pin_id, ME, "tenant", 30.0, read_part_s))

    def references(self, *blocks: int) -> list[int]:
        return [self.pool.blocks[block].ref_cnt for block in blocks]


def _grant(
    lease_id: int,
    blocks: tuple[int, ...],
    kind: LeaseKind = LeaseKind.CONVERSATION,
    supersedes: int = 0,
    tenant: str = "tenant",
) -> Grant:
    held: BlockChain = chain(ChainRoot("tenant", "model"), range(4 * len(blocks)), 4)
    return Grant(lease_id, kind, blocks, held.digests, held.tokens, 4, tenant=tenant, supersedes=supersedes)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_grant_references_its_blocks_once(bench: Bench) -> None:
    assert bench.grant(1, 3, 4)
    assert not bench.grant(1, 3, 4)
    assert bench.references(3, 4) == [1, 1]


def test_an_ended_lease_is_given_back_tail_first_and_once(bench: Bench) -> None:
    bench.grant(1, 3, 4, 5)
    assert bench.holder.end(1, LeaseEvent.RELEASE) is None
    assert bench.references(3, 4, 5) == [1, 1, 1]
    bench.holder.give_back()
    bench.holder.give_back()
    assert bench.pool.freed == [5, 4, 3]


def test_a_pinned_lease_keeps_its_blocks_until_the_last_pin_ends(bench: Bench) -> None:
    bench.grant(1, 3)
    bench.pin(1, "a")
    bench.pin(1, "b")
    bench.holder.end(1, LeaseEvent.RELEASE)
    bench.holder.unpin(1, "a")
    bench.holder.give_back()
    assert bench.references(3) == [1]
    bench.holder.unpin(1, "b")
    bench.holder.give_back()
    assert bench.references(3) == [0]


def test_block_ids_come_with_a_read_part_only(bench: Bench) -> None:
    bench.grant(1, 3, 4)
    reservation = bench.pin(1, read_part_s=0.0)
    assert isinstance(reservation, Pinned)
    assert reservation.blocks is None
    reading = bench.pin(1)
    assert isinstance(reading, Pinned)
    assert reading.blocks is not None
    assert (reading.blocks.block_ids, reading.blocks.tokens, reading.holder) == ((3, 4), 8, ME)


def test_a_transfer_ends_with_its_pin(bench: Bench) -> None:
    assert bench.holder.grant_transfer(_grant(1, (3,), LeaseKind.TRANSFER), "pin", 30.0)
    bench.holder.unpin(1, "pin")
    bench.holder.give_back()
    assert bench.references(3) == [0]


def test_a_transfer_does_not_count_in_the_budget() -> None:
    bench = Bench(budget=2)
    assert bench.holder.grant_transfer(_grant(1, (3, 4, 5, 6), LeaseKind.TRANSFER), "pin", 30.0)
    assert bench.grant(2, 7, 8)


def test_the_budget_evicts_older_leases_but_never_the_one_that_was_just_granted() -> None:
    bench = Bench(budget=4)
    bench.grant(1, 3, 4)
    bench.grant(2, 5, 6)
    assert bench.grant(3, 7, 8)
    assert bench.references(3, 4, 5, 6, 7, 8) == [0, 0, 1, 1, 1, 1]
    assert bench.pin(1) is MissReason.EVICTED


def test_at_the_cap_of_leases_the_tenants_own_least_valuable_one_gives_way() -> None:
    bench = Bench(limits=HoldLimits(reading_blocks_max=8, tenant_leases_max=2))
    bench.grant(1, 3, tenant="other")
    bench.grant(2, 4)
    bench.grant(3, 5)
    bench.holder.set_order([1, 3, 2])
    assert bench.grant(4, 6)
    assert bench.held() == [1, 2, 4]
    assert bench.references(3, 4, 5, 6) == [1, 1, 0, 1]


def test_at_the_cap_of_blocks_the_tenants_own_leases_give_way_and_shared_blocks_count_once() -> None:
    bench = Bench(limits=HoldLimits(reading_blocks_max=8, tenant_blocks_max=4))
    bench.grant(1, 9, 10, 11, tenant="other")
    bench.grant(2, 3, 4)
    assert bench.grant(3, 3, 4, 5)
    assert bench.held() == [1, 2, 3]
    assert bench.grant(4, 6, 7, 8)
    assert bench.held() == [1, 4]


def test_a_tenant_whose_leases_are_all_being_read_gets_no_other_one() -> None:
    bench = Bench(limits=HoldLimits(reading_blocks_max=8, tenant_leases_max=1))
    bench.grant(1, 3)
    bench.pin(1)
    assert not bench.grant(2, 4)
    assert bench.grant(3, 5, tenant="other")
    assert bench.references(3, 4, 5) == [1, 0, 1]


def test_the_next_turn_of_a_conversation_takes_no_place_of_another_one() -> None:
    bench = Bench(limits=HoldLimits(reading_blocks_max=8, tenant_leases_max=2))
    bench.grant(1, 3)
    bench.grant(2, 4)
    assert bench.grant(3, 4, 5, supersedes=2)
    bench.holder.renew([3], 20.0, [], 0.0)
    assert bench.held() == [1, 3]


def test_an_offer_counts_the_bytes_that_no_other_lease_keeps(bench: Bench) -> None:
    for block in (3, 4, 5, 6):  # the request that finishes still has references of its own
        bench.pool.touch([bench.pool.blocks[block]])
    bench.grant(1, 3, 4)
    bench.grant(2, 3, 5, 6)
    assert bench.exclusive_bytes(2) == 2 * LAYOUT.block_bytes
    assert bench.exclusive_bytes(1) == LAYOUT.block_bytes
    bench.holder.end(2, LeaseEvent.RELEASE)
    assert bench.exclusive_bytes(1) == 2 * LAYOUT.block_bytes


def test_what_a_lease_shares_with_the_one_that_it_supersedes_is_its_own(bench: Bench) -> None:
    bench.grant(1, 3, 4)
    bench.grant(2, 3, 4, 5, supersedes=1)
    assert bench.exclusive_bytes(2) == 3 * LAYOUT.block_bytes


def test_a_grant_that_the_budget_cannot_place_references_nothing() -> None:
    bench = Bench(budget=4)
    bench.grant(1, 3, 4)
    bench.pin(1)
    assert not bench.grant(2, 5, 6, 7)
    assert bench.references(3, 4, 5, 6, 7) == [1, 1, 0, 0, 0]


def test_an_expiry_is_told_while_nothing_else_happens(bench: Bench) -> None:
    bench.grant(1, 3, duration_s=6.0)
    bench.clock.advance(6.0)
    bench.holder.advance()
    assert bench.events == [HoldEvent(1, LeaseState.EXPIRED)]


def test_a_grant_is_not_told_as_an_event_since_it_is_offered(bench: Bench) -> None:
    bench.grant(1, 3)
    assert bench.events == []
    offer = bench.holder.offer(1, LAYOUT)
    assert offer is not None
    assert (offer.record.lease_id, offer.provisional, offer.remaining_s) == (1, True, 20.0)


def test_a_renewal_confirms_and_tells_of_the_superseded_lease(bench: Bench) -> None:
    bench.grant(1, 3)
    bench.grant(2, 3, 4, supersedes=1)
    assert bench.holder.renew([2, 9], 20.0, [], 0.0) == {9: MissReason.UNKNOWN}
    assert HoldEvent(2, LeaseState.HELD, confirmed=True) in bench.events
    assert HoldEvent(1, LeaseState.RELEASED) in bench.events


def test_a_renewed_reservation_outlives_the_first_one(bench: Bench) -> None:
    bench.grant(1, 3, duration_s=600.0)
    bench.pin(1)
    bench.clock.advance(29.0)
    bench.holder.renew([], 20.0, ["pin"], 30.0)
    bench.clock.advance(20.0)
    assert bench.holder.offers(LAYOUT)[1][0].pin_ids == ("pin",)


def test_gauges_count_a_shared_block_once(bench: Bench) -> None:
    bench.grant(1, 3, 4)
    bench.grant(2, 3, 5)
    bench.pin(2)
    gauges = bench.holder.gauges()
    assert (gauges.held_blocks, gauges.reading_blocks, gauges.free_blocks) == (3, 2, 16)


def test_room_is_made_by_the_earliest_deadline_where_nothing_is_ranked(bench: Bench) -> None:
    bench.grant(1, 3, duration_s=50.0)
    bench.grant(2, 4, duration_s=10.0)
    assert bench.holder.make_free(18)
    assert (bench.holder.pin(PinAsk(2, "p", ME, "tenant", 1.0)), bench.references(3)) == (
        MissReason.EVICTED,
        [1],
    )


def test_a_lease_of_which_a_request_uses_every_block_is_not_evicted(bench: Bench) -> None:
    bench.grant(1, 3, 4)
    bench.pool.touch([bench.pool.blocks[3], bench.pool.blocks[4]])
    assert not bench.holder.make_free(19)
    assert isinstance(bench.pin(1), Pinned)


def test_no_more_is_evicted_than_is_needed(bench: Bench) -> None:
    for lease_id in (1, 2, 3):
        bench.grant(lease_id, 2 * lease_id + 1, 2 * lease_id + 2)
    assert bench.holder.gain(1)
    assert bench.holder.evictions == 1
    assert not bench.holder.make_free(bench.pool.get_num_free_blocks())
    assert bench.holder.evictions == 1


def test_choosing_what_to_evict_looks_at_few_of_the_blocks_that_many_leases_share() -> None:
    class Blocks(list[FakeBlock]):
        looks = 0

        def __getitem__(self, place: Any) -> Any:
            self.looks += 1
            return super().__getitem__(place)

    bench = Bench(budget=200)
    bench.pool.blocks = blocks = Blocks(FakeBlock(block_id) for block_id in range(200))
    bench.pool.num_gpu_blocks = 200
    shared, leases, evicted = range(1, 101), 40, 5
    for lease_id in range(1, leases + 1):
        assert bench.grant(lease_id, *shared, 100 + lease_id)
    blocks.looks = 0
    assert bench.holder.make_free(bench.pool.get_num_free_blocks() + evicted)
    assert bench.held() == list(range(evicted + 1, leases + 1))
    given_back = evicted * (len(shared) + 1)
    assert blocks.looks <= given_back + evicted * leases


def test_evictions_are_counted_by_cause() -> None:
    tight = Bench(budget=2)
    tight.grant(1, 3, 4)
    tight.grant(2, 5, 6)
    capped = Bench(limits=HoldLimits(reading_blocks_max=8, tenant_leases_max=1))
    capped.grant(1, 3)
    capped.grant(2, 4)
    pressed = Bench()
    pressed.grant(1, 3)
    pressed.holder.make_free(pressed.pool.get_num_free_blocks() + 1)
    causes = [dict(bench.holder.evictions_by_cause) for bench in (tight, capped, pressed)]
    one_of = [EvictionCause.BUDGET, EvictionCause.TENANT, EvictionCause.PRESSURE]
    assert causes == [{cause: int(cause is wanted) for cause in EvictionCause} for wanted in one_of]


def test_resetting_the_pool_loses_every_hold_first(bench: Bench) -> None:
    bench.grant(1, 3)
    assert bench.pool.reset_prefix_cache()
    assert (bench.pool.resets, bench.holder.holder.epoch) == (1, ME.epoch + 1)
    assert bench.pin(1) is MissReason.HOLDER_CHANGED


def test_resetting_the_pool_fails_while_a_pin_keeps_blocks(bench: Bench) -> None:
    bench.grant(1, 3)
    bench.pin(1)
    assert not bench.pool.reset_prefix_cache()
    assert bench.references(3) == [1]
    bench.holder.unpin(1, "pin")
    assert bench.pool.reset_prefix_cache()


def test_a_reset_of_a_pool_that_holds_nothing_tells_that_an_epoch_began() -> None:
    told: list[tuple[int, int]] = []
    pool = FakePool(20)

    def notify(events: Sequence[HoldEvent]) -> None:
        told.append((holder.holder.epoch, len(events)))

    holder = BlockHolder(ME, pool, HoldLimits(reading_blocks_max=8), 10, notify, ManualClock().now_s)
    assert pool.reset_prefix_cache()
    assert told == [(ME.epoch + 1, 0)]


def test_every_epoch_is_told_also_when_what_is_left_was_lost_before(bench: Bench) -> None:
    told: list[int] = []
    bench.holder._notify = lambda _events: told.append(bench.holder.holder.epoch)
    bench.grant(1, 3)
    bench.pin(1)
    bench.pool.reset_prefix_cache()
    bench.holder.lose_all()
    assert told[-1] == bench.holder.holder.epoch


def test_losing_all_begins_no_epoch_when_nothing_is_held(bench: Bench) -> None:
    bench.holder.lose_all()
    assert bench.holder.holder == ME


def test_questions_of_another_thread_never_touch_the_pool(bench: Bench) -> None:
    bench.grant(1, 3, 4)

    def other_thread() -> None:
        bench.pin(1)
        bench.holder.end(1, LeaseEvent.RELEASE)
        bench.holder.unpin(1, "pin")
        bench.holder.gauges()

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert bench.references(3, 4) == [1, 1]
    bench.holder.give_back()
    assert bench.references(3, 4) == [0, 0]
