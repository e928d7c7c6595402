"""The table of renewals: beats, beliefs and deadlines, on a clock that the test moves."""

from collections import Counter
from dataclasses import replace

import pytest

from kvlease.core.errors import InvalidArgument
from kvlease.core.holding import Grant, HoldLimits, HoldTable
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, MissReason
from kvlease.core.renewal import Belief, EngineDelta, RenewalPolicy, RenewalTable

POLICY = RenewalPolicy()


@pytest.fixture
def table() -> RenewalTable:
    return RenewalTable(POLICY)


def test_a_pending_lease_is_in_the_next_beat_once(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    first = table.beat(0.0)
    assert (first.full, first.engines) == (True, {"d": EngineDelta(added_lease_ids=(7,))})
    second = table.beat(5.0)
    assert (second.full, second.engines, second.sequence) == (False, {}, first.sequence + 1)


def test_a_grant_is_only_pending_until_the_holder_acked(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    assert table.belief(5.9, 7) is Belief.PENDING
    assert table.belief(6.0, 7) is Belief.EXPIRED


def test_belief_counts_a_share_of_the_duration_from_before_the_beat_was_sent(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    beat = table.beat(1.0)
    table.ack(3.0, beat.sequence, {})
    assert table.belief(1.0 + 0.8 * 20 - 0.01, 7) is Belief.HELD
    assert table.belief(1.0 + 0.8 * 20, 7) is Belief.EXPIRED


def test_every_acked_beat_renews_the_belief_though_it_names_only_changes(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.open(7)
    for now_s in (0.0, 5.0, 10.0):
        beat = table.beat(now_s)
        table.ack(now_s, beat.sequence, {})
    assert beat.engines == {}
    assert table.belief(25.9, 7) is Belief.HELD
    assert table.belief(26.0, 7) is Belief.EXPIRED


def test_a_lease_that_is_renewed_no_longer_keeps_the_belief_of_its_last_ack(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.ack(0.0, table.beat(0.0).sequence, {})
    table.ack(29.0, table.beat(29.0).sequence, {})
    dropped = table.beat(31.0)
    table.ack(31.0, dropped.sequence, {})
    assert dropped.engines == {"d": EngineDelta(dropped_lease_ids=(7,))}
    assert table.belief(44.9, 7) is Belief.HELD
    assert table.belief(45.0, 7) is Belief.EXPIRED


def test_an_ack_of_an_earlier_beat_says_nothing_of_a_later_lease(table: RenewalTable) -> None:
    early = table.beat(0.0)
    table.expect(1.0, 7, "d")
    table.beat(1.0)
    table.ack(2.0, early.sequence, {})
    assert table.belief(2.0, 7) is Belief.PENDING


def test_an_unknown_ack_changes_nothing(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.ack(0.0, 99, {})
    assert table.belief(0.0, 7) is Belief.PENDING


def test_a_lease_is_live_through_its_turn_and_the_gap_after_it(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.beat(0.0)
    table.open(7)
    assert table.beat(1000.0).engines == {}
    table.close(1000.0, 7)
    assert table.beat(1029.9).engines == {}
    assert table.beat(1030.0).engines == {"d": EngineDelta(dropped_lease_ids=(7,))}


def test_a_lease_is_live_for_the_gap_that_is_expected_within_floor_and_cap(table: RenewalTable) -> None:
    for lease_id, gap_s in ((1, 5.0), (2, 100.0), (3, 10_000.0)):
        table.expect(0.0, lease_id, "d", gap_s)
    table.beat(0.0)
    assert table.beat(29.9).engines == {}
    assert table.beat(30.0).engines == {"d": EngineDelta(dropped_lease_ids=(1,))}
    assert table.beat(100.0).engines == {"d": EngineDelta(dropped_lease_ids=(2,))}
    assert table.beat(599.9).engines == {}
    assert table.beat(600.0).engines == {"d": EngineDelta(dropped_lease_ids=(3,))}


def test_a_turn_that_failed_leaves_its_lease_live_for_the_expected_gap(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.beat(0.0)
    table.open(7)
    table.close(10.0, 7, 200.0)
    assert table.beat(209.9).engines == {}
    assert table.beat(210.0).engines == {"d": EngineDelta(dropped_lease_ids=(7,))}


def test_a_turn_makes_a_lease_live_again(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.beat(0.0)
    table.beat(31.0)
    table.open(7)
    assert table.beat(32.0).engines == {"d": EngineDelta(added_lease_ids=(7,))}


def test_a_client_may_ask_for_a_longer_gap_up_to_the_cap(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.ack(0.0, table.beat(0.0).sequence, {})
    assert table.keep_live(1.0, 7, 10_000.0)
    assert table.beat(600.9).engines == {}
    assert table.beat(601.0).engines == {"d": EngineDelta(dropped_lease_ids=(7,))}
    assert not table.keep_live(700.0, 7, 10.0)


def test_a_client_that_asks_for_ever_keeps_a_lease_no_longer_than_its_lifetime(table: RenewalTable) -> None:
    holder = HoldTable(Holder("d", "boot", 1), HoldLimits(reading_blocks_max=1, lifetime_max_s=1800.0))
    grant = Grant(7, LeaseKind.CONVERSATION, (1,), b"d" * 16, 16, 16)
    holder.grant(0.0, grant, POLICY.provisional_s, provisional=True)
    table.expect(0.0, 7, "d")
    now_s, asked = 0.0, True
    while asked and now_s < 4000.0:
        beat = table.beat(now_s)
        table.ack(now_s, beat.sequence, holder.renew(now_s, [7], POLICY.duration_s))
        asked = table.keep_live(now_s, 7, 1e9)
        now_s += POLICY.interval_s
    assert 1800.0 <= now_s <= 1800.0 + 2 * POLICY.interval_s
    assert table.miss(7) is MissReason.EXPIRED
    assert [hold.grant.lease_id for hold in holder.take_ended()] == [7]


def test_a_dropped_lease_is_renewed_no_longer(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.beat(0.0)
    table.drop(7)
    assert table.beat(1.0).engines == {"d": EngineDelta(dropped_lease_ids=(7,))}
    assert table.belief(1.0, 7) is Belief.MISSED


def test_a_grant_that_is_later_than_the_end_of_its_turn_is_asked_for_again(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    first = table.beat(0.0)
    assert table.ack(0.1, first.sequence, {7: MissReason.UNKNOWN})
    assert table.belief(0.1, 7) is Belief.PENDING
    second = table.beat(0.3)
    assert not table.ack(0.4, second.sequence, {})
    assert table.belief(0.4, 7) is Belief.HELD


def test_a_grant_that_never_comes_is_asked_for_a_few_times_only(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    asked = 0
    while table.ack(0.1, table.beat(0.1).sequence, {7: MissReason.UNKNOWN}):
        asked += 1
    assert asked == 4
    assert table.belief(0.1, 7) is Belief.MISSED
    assert table.miss(7) is MissReason.UNKNOWN
    assert table.beat(5.0).engines == {"d": EngineDelta(dropped_lease_ids=(7,))}
    assert table.beat(10.0).engines == {}


def test_a_miss_ends_the_belief_with_its_reason(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.ack(0.0, table.beat(0.0).sequence, {})
    assert not table.ack(5.0, table.beat(5.0).sequence, {7: MissReason.EVICTED})
    assert table.belief(5.0, 7) is Belief.MISSED
    assert table.miss(7) is MissReason.EVICTED


def test_a_lease_that_was_evicted_is_not_revived(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.lose(7, MissReason.EVICTED)
    table.revive(1.0, 7)
    assert table.belief(1.0, 7) is Belief.MISSED


def test_a_revived_lease_is_renewed_and_believed_after_an_ack_only(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.ack(0.0, table.beat(0.0).sequence, {})
    table.lose(7, MissReason.UNKNOWN)
    table.beat(1.0)
    table.revive(2.0, 7)
    assert table.belief(2.0, 7) is Belief.PENDING
    beat = table.beat(2.0)
    assert beat.engines == {"d": EngineDelta(added_lease_ids=(7,))}
    table.ack(3.0, beat.sequence, {})
    assert table.belief(17.9, 7) is Belief.HELD


def test_a_holder_that_does_not_answer_leaves_the_belief_to_its_deadline(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.ack(0.0, table.beat(0.0).sequence, {})
    table.ack(5.0, table.beat(5.0).sequence, {7: MissReason.UNREACHABLE})
    assert table.belief(15.9, 7) is Belief.HELD
    assert table.belief(16.0, 7) is Belief.EXPIRED


@pytest.mark.parametrize("reason", [MissReason.UNREACHABLE, MissReason.UNKNOWN])
def test_a_lease_that_was_missed_when_its_gap_ended_is_dropped_at_the_registry_too(
    table: RenewalTable, reason: MissReason
) -> None:
    table.expect(0.0, 7, "d")
    table.ack(0.0, table.beat(0.0).sequence, {})
    table.ack(31.0, table.beat(29.0).sequence, {7: reason})
    assert table.beat(31.0).engines == {"d": EngineDelta(dropped_lease_ids=(7,))}
    assert table.beat(36.0).engines == {}


def test_a_lease_whose_holder_did_not_answer_is_believed_again_when_it_answers_a_later_beat(
    table: RenewalTable,
) -> None:
    table.expect(0.0, 7, "d")
    table.ack(0.0, table.beat(0.0).sequence, {})
    table.ack(6.0, table.beat(5.0).sequence, {7: MissReason.UNREACHABLE})
    again = table.beat(10.0)
    assert again.engines == {}
    table.ack(10.1, again.sequence, {})
    assert table.belief(25.9, 7) is Belief.HELD
    assert table.belief(26.0, 7) is Belief.EXPIRED
    assert table.beat(31.0).engines == {"d": EngineDelta(dropped_lease_ids=(7,))}


def test_leases_of_a_dead_sidecar_are_told_once_however_many_beats_go_by(table: RenewalTable) -> None:
    told: Counter[int] = Counter()
    for lease_id in range(1, 101):
        now_s = 0.1 * lease_id
        table.expect(now_s, lease_id, "d")
        beat = table.beat(now_s)
        told.update(beat.engines["d"].added_lease_ids)
        table.ack(now_s, beat.sequence, dict.fromkeys(range(1, lease_id + 1), MissReason.UNREACHABLE))
    assert told == Counter(range(1, 101))
    dropped = [beat.engines for beat in map(table.beat, (20.0, 60.0)) if beat.engines]
    assert dropped == [{"d": EngineDelta(dropped_lease_ids=tuple(range(1, 101)))}]


def test_after_a_resync_the_beat_is_complete_under_another_epoch(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.hold_pin("pin", "d")
    before = table.beat(0.0)
    table.resync()
    after = table.beat(1.0)
    assert (after.full, after.epoch) == (True, before.epoch + 1)
    assert after.engines == {"d": EngineDelta(added_lease_ids=(7,), added_pin_ids=("pin",))}
    table.ack(2.0, before.sequence, {})
    assert table.belief(2.0, 7) is Belief.PENDING


def test_pins_are_renewed_until_they_are_dropped(table: RenewalTable) -> None:
    table.hold_pin("pin", "p")
    assert table.beat(0.0).engines == {"p": EngineDelta(added_pin_ids=("pin",))}
    assert table.beat(5.0).engines == {}
    table.drop_pin("pin")
    assert table.beat(10.0).engines == {"p": EngineDelta(dropped_pin_ids=("pin",))}


def test_leases_nobody_may_use_again_are_forgotten(table: RenewalTable) -> None:
    table.expect(0.0, 7, "d")
    table.beat(0.0)
    table.beat(POLICY.gap_floor_s + POLICY.gap_cap_s)
    assert len(table) == 0


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"interval_s": 7.0}, ("heartbeat_interval_s (7)", "lease_duration_s (20)")),
        ({"interval_s": 30.0, "duration_s": 100.0}, ("heartbeat_interval_s (30)", "reservation_s (30)")),
        ({"gap_floor_s": 700.0}, ("gap_floor_s (700)", "gap_cap_s (600)")),
        ({"gap_returns_per_hour": 0.0}, ("gap_returns_per_hour (0)",)),
        ({"tool_call_max_s": 0.0}, ("tool_call_max_s (0)",)),
        ({"duration_s": 0.0}, ("lease_duration_s (0)",)),
        ({"interval_s": float("inf")}, ("heartbeat_interval_s (inf)",)),
    ],
)
def test_durations_that_do_not_fit_each_other_are_refused_with_both_values(
    changes: dict[str, float], values: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        replace(POLICY, **changes)
    assert all(value in str(refused.value) for value in values)
