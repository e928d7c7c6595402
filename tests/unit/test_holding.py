"""Examples of what the table of holds promises; `test_holding_machine.py` searches for the rest."""

import pytest

from kvlease.core.errors import InvalidArgument
from kvlease.core.holding import Grant, Hold, HoldLimits, HoldTable, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, LeaseKind, LeaseState, MissReason

HOLDER = Holder("engine", "boot", 1)
LIMITS = HoldLimits(reading_blocks_max=100, lifetime_max_s=1800.0)


def table(limits: HoldLimits = LIMITS, holder: Holder = HOLDER) -> HoldTable:
    return HoldTable(holder, limits)


def conversation(lease_id: int, *, supersedes: int = 0, blocks: int = 4, tenant: str = "t") -> Grant:
    return Grant(
        lease_id=lease_id,
        kind=LeaseKind.CONVERSATION,
        block_ids=tuple(range(lease_id * 100, lease_id * 100 + blocks)),
        digests=b"d" * 16 * blocks,
        tokens=16 * blocks,
        block_size=16,
        tenant=tenant,
        supersedes=supersedes,
    )


def transfer(lease_id: int, *, blocks: int = 4) -> Grant:
    return Grant(
        lease_id=lease_id,
        kind=LeaseKind.TRANSFER,
        block_ids=tuple(range(lease_id * 100, lease_id * 100 + blocks)),
        digests=b"d" * 16 * blocks,
        tokens=16 * blocks,
        block_size=16,
        tenant="t",
    )


def ask(
    lease_id: int,
    pin_id: str,
    *,
    reservation_s: float = 0.0,
    read_part_s: float = 0.0,
    tenant: str = "t",
    holder: Holder = HOLDER,
) -> PinAsk:
    return PinAsk(lease_id, pin_id, holder, tenant, reservation_s, read_part_s)


def ended_ids(holds: HoldTable) -> list[int]:
    return [hold.grant.lease_id for hold in holds.take_ended()]


def state_of(holds: HoldTable, lease_id: int) -> LeaseState | None:
    hold = holds.get(lease_id)
    return hold.state if hold else None


def test_a_renewal_never_takes_away_time_that_an_earlier_one_promised() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    holds.renew(1.0, [1], 2.0)
    holds.advance(19.0)
    assert state_of(holds, 1) is LeaseState.HELD
    holds.advance(20.0)
    assert ended_ids(holds) == [1]


def test_renewing_a_transfer_leaves_it_to_its_pin() -> None:
    holds = table()
    holds.grant_transfer(0.0, transfer(1), "x", 30.0)
    holds.renew(0.0, [1], 5.0)
    holds.advance(20.0)
    assert state_of(holds, 1) is LeaseState.READING


def test_a_pin_id_whose_deadline_has_passed_can_be_used_for_the_next_transfer() -> None:
    holds = table()
    assert holds.grant_transfer(0.0, transfer(1), "x", 5.0)
    assert holds.grant_transfer(10.0, transfer(2), "x", 5.0)
    assert ended_ids(holds) == [1]


def test_a_draining_lease_does_not_ack_a_reservation_that_it_does_not_renew() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    holds.pin(0.0, ask(1, "x", reservation_s=30.0))
    holds.end(1.0, 1, LeaseEvent.RELEASE)
    assert holds.pin(2.0, ask(1, "x", reservation_s=30.0)) is MissReason.DRAINING
    assert isinstance(holds.pin(2.0, ask(1, "x", read_part_s=10.0)), Hold)


@pytest.mark.parametrize("asked_epoch", [0, 1, 2])
def test_after_a_reset_an_existing_pin_starts_no_read_part(asked_epoch: int) -> None:
    holds = table(holder=Holder("engine", "boot", 1))
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    holds.pin(0.0, ask(1, "x", reservation_s=30.0))
    assert not holds.reset(1.0)
    asked = Holder("engine", "boot", asked_epoch)
    assert isinstance(holds.pin(2.0, ask(1, "x", read_part_s=10.0, holder=asked)), MissReason)
    assert not holds.take_ended()


def test_an_ending_that_is_none_is_refused() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    with pytest.raises(InvalidArgument):
        holds.end(1.0, 1, LeaseEvent.PIN)
    assert state_of(holds, 1) is LeaseState.HELD


def test_short_transfers_leave_no_moments_behind_in_the_queue() -> None:
    holds = table()
    for number in range(1, 2001):
        now_s = number * 0.1
        holds.grant_transfer(now_s, transfer(number, blocks=1), f"pin-{number}", 30.0)
        holds.unpin(now_s, number, f"pin-{number}")
        holds.take_ended()
    assert len(holds) == 0
    assert holds.queued_moments() <= 128


def test_pins_and_renewals_of_one_lease_leave_no_moments_behind_in_the_queue() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 600.0, provisional=False)
    for number in range(1, 5001):
        now_s = number * 0.01
        holds.renew(now_s, [1], 600.0)
        holds.pin(now_s, ask(1, f"pin-{number}", read_part_s=1.0 / number))
        holds.unpin(now_s, 1, f"pin-{number}")
    assert holds.queued_moments() <= 128
    assert state_of(holds, 1) is LeaseState.HELD


def test_leases_that_expire_are_not_stranded_behind_an_older_one_that_is_renewed() -> None:
    holds = table()
    for lease_id in range(1, 12):
        holds.grant(0.0, conversation(lease_id), 20.0, provisional=False)
    assert holds.renew(19.0, [1], 20.0) == {}
    holds.advance(20.0)
    assert sorted(ended_ids(holds)) == list(range(2, 12))
    assert state_of(holds, 1) is LeaseState.HELD


def test_a_provisional_lease_supersedes_only_once_it_is_confirmed() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    holds.grant(1.0, conversation(2, supersedes=1), 6.0, provisional=True)
    assert state_of(holds, 1) is LeaseState.HELD
    assert holds.renew(2.0, [2], 20.0) == {}
    assert state_of(holds, 1) is None
    assert ended_ids(holds) == [1]
    assert holds.renew(2.0, [1], 20.0) == {1: MissReason.RELEASED}


def test_an_unconfirmed_lease_expires_and_supersedes_nothing() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    holds.grant(0.0, conversation(2, supersedes=1), 6.0, provisional=True)
    holds.advance(6.0)
    assert ended_ids(holds) == [2]
    assert state_of(holds, 1) is LeaseState.HELD


def test_a_pin_confirms_a_provisional_lease() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 6.0, provisional=True)
    holds.take_events()
    holds.pin(1.0, ask(1, "x", read_part_s=10.0))
    assert [event.confirmed for event in holds.take_events()] == [False, True]


def test_a_lease_of_another_tenant_is_neither_pinned_nor_superseded() -> None:
    holds = table()
    holds.grant(0.0, conversation(1, tenant="victim"), 20.0, provisional=False)
    assert holds.pin(0.0, ask(1, "x", read_part_s=1.0)) is MissReason.FORBIDDEN
    holds.grant(0.0, conversation(2, supersedes=1), 20.0, provisional=True)
    holds.renew(0.0, [2], 20.0)
    assert state_of(holds, 1) is LeaseState.HELD


@pytest.mark.parametrize(
    "asked", [Holder("engine", "other", 1), Holder("other", "boot", 1), Holder("engine", "boot", 2)]
)
def test_a_question_to_another_incarnation_is_a_miss(asked: Holder) -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    assert holds.pin(0.0, ask(1, "x", read_part_s=1.0, holder=asked)) is MissReason.HOLDER_CHANGED


def test_the_cap_counts_conversations_once_and_transfers_never() -> None:
    holds = table(HoldLimits(reading_blocks_max=8))
    for lease_id in (1, 2, 3):
        holds.grant(0.0, conversation(lease_id), 20.0, provisional=False)
    holds.grant_transfer(0.0, transfer(9, blocks=50), "t", 30.0)
    assert isinstance(holds.pin(0.0, ask(1, "a", read_part_s=5.0)), Hold)
    assert isinstance(holds.pin(0.0, ask(2, "b", read_part_s=5.0)), Hold)
    assert holds.pin(0.0, ask(3, "c", read_part_s=5.0)) is MissReason.READING_CAP
    assert isinstance(holds.pin(0.0, ask(1, "d", read_part_s=5.0)), Hold)
    holds.unpin(1.0, 2, "b")
    assert isinstance(holds.pin(1.0, ask(3, "c", read_part_s=5.0)), Hold)
    assert holds.reading_blocks() == 8


def test_a_transfer_is_released_at_its_last_unpin() -> None:
    holds = table()
    holds.grant_transfer(0.0, transfer(1), "x", 30.0)
    holds.pin(1.0, ask(1, "x", read_part_s=10.0))
    holds.pin(1.0, ask(1, "y", read_part_s=10.0))
    holds.unpin(2.0, 1, "x")
    assert ended_ids(holds) == []
    holds.unpin(2.0, 1, "y")
    assert ended_ids(holds) == [1]


def test_no_renewal_outlives_the_maximum_lifetime_and_a_pin_drains_it() -> None:
    holds = table(HoldLimits(reading_blocks_max=100, lifetime_max_s=60.0))
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    for now_s in range(5, 60, 5):
        assert holds.renew(float(now_s), [1], 20.0) == {}
    holds.pin(59.0, ask(1, "x", read_part_s=10.0))
    assert holds.renew(60.0, [1], 20.0) == {1: MissReason.DRAINING}
    assert ended_ids(holds) == []
    holds.advance(69.0)
    assert ended_ids(holds) == [1]


def test_the_first_ending_stands_except_that_a_reset_overrides_it() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    holds.pin(0.0, ask(1, "x", read_part_s=10.0))
    holds.end(1.0, 1, LeaseEvent.EVICT)
    holds.end(1.0, 1, LeaseEvent.RELEASE)
    holds.unpin(2.0, 1, "x")
    assert holds.renew(2.0, [1], 20.0) == {1: MissReason.EVICTED}
    holds.grant(2.0, conversation(2), 20.0, provisional=False)
    holds.pin(2.0, ask(2, "y", read_part_s=10.0))
    holds.end(2.0, 2, LeaseEvent.EVICT)
    assert not holds.reset(3.0)
    holds.unpin(4.0, 2, "y")
    assert holds.renew(4.0, [2], 20.0) == {2: MissReason.LOST}


def test_a_reservation_keeps_a_pin_and_draining_renews_none() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 100.0, provisional=False)
    holds.pin(0.0, ask(1, "x", reservation_s=30.0))
    assert holds.renew_reservations(20.0, ["x", "unknown"], 30.0) == ["unknown"]
    holds.advance(49.0)
    assert state_of(holds, 1) is LeaseState.READING
    holds.end(49.0, 1, LeaseEvent.RELEASE)
    assert holds.renew_reservations(49.0, ["x"], 30.0) == []
    holds.advance(50.0)
    assert ended_ids(holds) == [1]


def test_unpins_that_come_late_or_twice_change_nothing() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    holds.unpin(0.0, 1, "never")
    holds.unpin(0.0, 77, "never")
    holds.pin(0.0, ask(1, "x", read_part_s=5.0))
    holds.unpin(1.0, 1, "x")
    holds.unpin(1.0, 1, "x")
    assert state_of(holds, 1) is LeaseState.HELD
    holds.end(2.0, 1, LeaseEvent.RELEASE)
    holds.unpin(3.0, 1, "x")
    assert ended_ids(holds) == [1]


def test_one_pin_id_keeps_one_lease() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    holds.grant(0.0, conversation(2), 20.0, provisional=False)
    holds.pin(0.0, ask(1, "x", read_part_s=5.0))
    with pytest.raises(InvalidArgument):
        holds.pin(0.0, ask(2, "x", read_part_s=5.0))
    assert state_of(holds, 2) is LeaseState.HELD


def test_engine_death_ends_even_pinned_leases() -> None:
    holds = table()
    holds.grant(0.0, conversation(1), 20.0, provisional=False)
    holds.pin(0.0, ask(1, "x", read_part_s=5.0))
    holds.end(0.0, 1, LeaseEvent.LOSE_ENGINE)
    assert ended_ids(holds) == [1]
    assert holds.lease_of_pin("x") is None


def test_an_id_is_granted_once() -> None:
    holds = table()
    assert holds.grant(0.0, conversation(1), 20.0, provisional=False)
    assert not holds.grant(0.0, conversation(1), 20.0, provisional=False)
    holds.end(1.0, 1, LeaseEvent.RELEASE)
    assert not holds.grant(1.0, conversation(1), 20.0, provisional=False)
    assert not holds.grant_transfer(1.0, transfer(1), "x", 30.0)
    assert holds.lease_of_pin("x") is None
