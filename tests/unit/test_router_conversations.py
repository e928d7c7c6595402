"""The router's table of conversations: whose lease a turn may use, and what a turn leaves behind."""

from dataclasses import replace

import pytest

from kvlease.core.conversation import Leaf, Reply, conversation_key, tenant_digest
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState, MissReason
from kvlease.core.records import LeaseRecord
from kvlease.core.renewal import Belief
from kvlease.core.signals import LeaseSignal, PlanReason
from kvlease.router.conversation import OpenTurn
from kvlease.store.port import Batch, Change
from stubs.conversations import ENGINE, HOLDER, NEXT, TENANT, USER, World, request


@pytest.fixture
def world() -> World:
    return World()


def first_turn(world: World, conversation_id: str = "c", lease_id: int = 7) -> OpenTurn:
    turn = world.table.open(request([USER], conversation_id))
    assert world.signal(turn) is PlanReason.FIRST_TURN
    world.finish(turn, lease_id)
    return turn


def test_the_next_turn_may_use_the_lease_before_anyone_acked_it(world: World) -> None:
    turn = first_turn(world)
    world.table.learn(turn, 7, prompt_tokens=11, completion_tokens=2)
    following = world.table.open(request(NEXT, "c"))
    assert world.signal(following) == LeaseSignal("d", suffix_tokens=10, tokens=13)
    assert following.supersedes == 7


def test_an_edited_history_keeps_the_lease_but_has_no_suffix(world: World) -> None:
    first_turn(world)
    edited = world.table.open(request([{**USER, "content": "edited"}, *NEXT[1:]], "c"))
    assert world.signal(edited) == LeaseSignal("d", suffix_tokens=None)


def test_a_pending_lease_that_nobody_acked_expires(world: World) -> None:
    first_turn(world)
    world.clock.advance(6.0)
    assert world.signal(world.table.open(request(NEXT, "c"))) is PlanReason.LEASE_EXPIRED


def is_renewed(world: World, lease_id: int) -> bool:
    """Whether the heartbeat still names the lease."""
    world.renewals.resync()
    beat = world.renewals.beat(world.clock.now_s())
    return any(lease_id in delta.added_lease_ids for delta in beat.engines.values())


def pause(world: World, lease_id: int, gap_s: float) -> None:
    """One more turn of the conversation, after a gap."""
    world.clock.advance(gap_s)
    turn = world.table.open(request(NEXT, "c"))
    world.table.grant(turn, lease_id, HOLDER, Reply("fine"))
    world.table.close(turn)


def test_a_conversation_is_kept_for_longer_the_more_often_it_went_on(world: World) -> None:
    first_turn(world, "other", 90)
    world.clock.advance(300.0)
    assert is_renewed(world, 90)
    world.clock.advance(100.0)
    assert not is_renewed(world, 90)
    first_turn(world)
    pause(world, 8, 5.0)
    world.clock.advance(400.0)
    assert is_renewed(world, 8)


def test_a_conversation_is_let_go_sooner_where_others_like_it_never_went_on(world: World) -> None:
    for number in range(100):
        first_turn(world, f"once {number}", 100 + number)
    world.clock.advance(4100.0)
    first_turn(world, "another", 7)
    world.clock.advance(40.0)
    assert not is_renewed(world, 7)


def test_the_counts_of_a_turn_tell_which_conversations_are_like_it(world: World) -> None:
    def turn_of(name: str, lease_id: int, prompt_tokens: int) -> None:
        turn = world.table.open(request([USER], name))
        world.table.grant(turn, lease_id, HOLDER, Reply("fine"))
        world.table.learn(turn, lease_id, prompt_tokens, completion_tokens=2)
        world.table.close(turn)

    for number in range(100):
        turn_of(f"short {number}", 100 + number, 30)
        turn_of(f"long {number}", 300 + number, 3000)
        world.clock.advance(60.0)
        world.table.open(request(NEXT, f"long {number}"))
    world.clock.advance(4100.0)
    turn_of("short", 7, 30)
    turn_of("long", 8, 3000)
    world.clock.advance(40.0)
    assert (is_renewed(world, 7), is_renewed(world, 8)) == (False, True)


def test_a_conversation_that_awaits_its_tools_is_kept_as_long_as_they_may_take(world: World) -> None:
    turn = world.table.open(request([USER], "c"))
    world.table.grant(turn, 7, HOLDER, Reply("calls"), awaits_tools=True)
    world.table.close(turn)
    world.clock.advance(599.0)
    assert is_renewed(world, 7)
    world.clock.advance(1.0)
    assert not is_renewed(world, 7)


def test_the_time_that_tools_take_is_no_gap(world: World) -> None:
    first_turn(world)
    for lease_id in range(8, 40):
        pause(world, lease_id, 1.0)
    turn = world.table.open(request(NEXT, "c"))
    world.table.grant(turn, 40, HOLDER, Reply("calls"), awaits_tools=True)
    world.table.close(turn)
    for lease_id in range(41, 49):
        world.clock.advance(500.0)
        turn = world.table.open(request(NEXT, "c"))
        world.table.grant(turn, lease_id, HOLDER, Reply("calls"), awaits_tools=lease_id < 48)
        world.table.close(turn)
    last = world.table.find(TENANT, "c")
    assert last is not None
    assert last.last_gap_s == 0.0


def test_another_model_uses_no_lease_of_the_conversation(world: World) -> None:
    first_turn(world)
    assert world.signal(world.table.open(request(NEXT, "c", "other"))) is PlanReason.MODEL_CHANGED


@pytest.mark.parametrize("holder", [replace(HOLDER, boot_id="other"), replace(HOLDER, epoch=2)])
def test_a_restart_or_a_reset_of_the_engine_loses_the_lease(world: World, holder: Holder) -> None:
    first_turn(world)
    world.engines.apply(Batch((Change(replace(ENGINE, holder=holder)),)))
    assert world.signal(world.table.open(request(NEXT, "c"))) is PlanReason.LEASE_LOST


def test_a_record_that_is_gone_ends_the_lease(world: World) -> None:
    first_turn(world)
    record = lease_record(7, conversation_key(TENANT, "c"))
    world.table.apply(Batch((Change(record, gone=True),)))
    assert world.signal(world.table.open(request(NEXT, "c"))) is PlanReason.LEASE_MISSING


def test_a_lease_that_expired_before_its_record_went_counts_as_expired(world: World) -> None:
    first_turn(world)
    record = lease_record(7, conversation_key(TENANT, "c"))
    world.table.apply(Batch((Change(record),)))
    world.clock.advance(6.0)
    world.table.apply(Batch((Change(record, gone=True),)))
    assert world.signal(world.table.open(request(NEXT, "c"))) is PlanReason.LEASE_EXPIRED


def test_a_lease_whose_record_comes_back_is_pending_again(world: World) -> None:
    first_turn(world)
    record = lease_record(7, conversation_key(TENANT, "c"))
    world.table.apply(Batch((Change(record, gone=True),)))
    world.table.apply(Batch((Change(record),)))
    assert isinstance(world.signal(world.table.open(request(NEXT, "c"))), LeaseSignal)


def test_a_record_absent_from_a_snapshot_proves_nothing(world: World) -> None:
    first_turn(world)
    world.table.apply(Batch((), snapshot=True))
    assert isinstance(world.signal(world.table.open(request(NEXT, "c"))), LeaseSignal)


def test_the_last_finished_of_two_turns_wins_and_the_other_lease_is_released(world: World) -> None:
    first_turn(world)
    one, two = world.table.open(request(NEXT, "c")), world.table.open(request(NEXT, "c"))
    assert world.table.grant(one, 8, HOLDER, Reply("fine")) is None
    left = world.table.grant(two, 9, HOLDER, Reply("fine"))
    assert left is not None
    assert left.lease_id == 8


def test_a_lease_left_on_another_engine_is_released(world: World) -> None:
    first_turn(world)
    left = world.table.grant(world.table.open(request(NEXT, "c")), 8, Holder("e", "b", 1), Reply("fine"))
    assert left is not None
    assert (left.lease_id, left.holder) == (7, HOLDER)


def test_without_ids_a_leaf_in_use_is_forked(world: World) -> None:
    first_turn(world, "")
    one, two = world.table.open(request(NEXT)), world.table.open(request(NEXT))
    assert one.supersedes == 7
    assert two.supersedes == 0
    assert two.base == one.base
    assert one.conversation is not two.conversation
    assert world.signal(two) == world.signal(one)


def test_without_ids_a_turn_that_failed_leaves_its_leaf_free(world: World) -> None:
    first_turn(world, "")
    world.table.close(world.table.open(request(NEXT)))
    assert world.table.open(request(NEXT)).supersedes == 7


def test_without_ids_the_next_turn_may_come_before_the_last_one_closed(world: World) -> None:
    first = world.table.open(request([USER]))
    world.table.grant(first, 7, HOLDER, Reply("fine"))
    second = world.table.open(request(NEXT))
    assert second.supersedes == 7
    world.table.close(first)
    assert world.table.open(request(NEXT)).supersedes == 0


def lease_record(lease_id: int, key: bytes, chain_keys: tuple[int, ...] = ()) -> LeaseRecord:
    return LeaseRecord(
        lease_id,
        LeaseKind.CONVERSATION,
        LeaseState.HELD,
        HOLDER,
        TENANT,
        key,
        tokens=500,
        model="m",
        chain_keys=chain_keys,
    )


def test_a_conversation_of_another_router_is_found_by_its_id(world: World) -> None:
    transcript = request([USER]).transcript
    assert transcript is not None
    record = lease_record(9, conversation_key(TENANT, "c"), transcript.keys)
    world.table.apply(Batch((Change(record),), snapshot=True))
    turn = world.table.open(request(NEXT, "c"))
    assert turn.supersedes == 9
    signal = world.signal(turn)
    assert isinstance(signal, LeaseSignal)
    assert (signal.tokens, signal.suffix_tokens) == (500, 4)


def test_a_conversation_of_another_router_is_branched_when_it_has_no_id(world: World) -> None:
    transcript = request([USER]).transcript
    assert transcript is not None
    record = lease_record(9, b"k", transcript.keys)
    world.table.apply(Batch((Change(record),), snapshot=True))
    turn = world.table.open(request(NEXT))
    assert turn.base is not None
    assert (turn.base.lease_id, turn.supersedes) == (9, 0)
    assert world.signal(world.table.open(request([USER]))) is PlanReason.FIRST_TURN


def test_a_recorded_lease_is_renewed_while_one_of_the_branches_that_read_it_is_in_flight(
    world: World,
) -> None:
    transcript = request([USER]).transcript
    assert transcript is not None
    world.table.apply(Batch((Change(lease_record(9, b"k", transcript.keys)),), snapshot=True))
    first = world.table.open(request(NEXT))
    beat = world.renewals.beat(world.clock.now_s())
    world.renewals.ack(world.clock.now_s(), beat.sequence, {})
    second = world.table.open(request([*NEXT[:2], {"role": "user", "content": "another branch"}]))
    assert first.base is not None
    assert second.base is not None
    assert first.base.lease_id == second.base.lease_id == 9
    world.table.close(second)
    world.clock.advance(world.renewals.policy.gap_cap_s)
    beat = world.renewals.beat(world.clock.now_s())
    world.renewals.ack(world.clock.now_s(), beat.sequence, {})
    assert world.renewals.belief(world.clock.now_s(), 9) is Belief.HELD


def test_a_conversation_of_another_router_goes_on_under_another_name_of_its_model(world: World) -> None:
    world.table.apply(Batch((Change(lease_record(9, conversation_key(TENANT, "c"))),), snapshot=True))
    signal = world.signal(world.table.open(request(NEXT, "c", "an adapter of m")))
    assert isinstance(signal, LeaseSignal)


def test_a_conversation_of_another_router_does_not_go_on_with_the_model_of_other_engines(
    world: World,
) -> None:
    other = replace(ENGINE, holder=replace(HOLDER, engine_id="other"), url="http://other:1", model="other")
    world.engines.apply(Batch((Change(other),)))
    world.table.apply(Batch((Change(lease_record(9, conversation_key(TENANT, "c"))),), snapshot=True))
    assert world.signal(world.table.open(request(NEXT, "c", "other"))) is PlanReason.MODEL_CHANGED


def test_another_tenants_record_is_not_adopted(world: World) -> None:
    record = replace(lease_record(9, conversation_key(TENANT, "c")), tenant=tenant_digest("other"))
    world.table.apply(Batch((Change(record),), snapshot=True))
    assert world.signal(world.table.open(request(NEXT, "c"))) is PlanReason.FIRST_TURN


def test_a_lease_that_another_router_superseded_gives_way_to_its_record(world: World) -> None:
    first_turn(world)
    world.renewals.lose(7, MissReason.RELEASED)
    world.table.apply(Batch((Change(lease_record(9, conversation_key(TENANT, "c"))),)))
    assert world.table.open(request(NEXT, "c")).supersedes == 9


@pytest.mark.parametrize("late", [False, True])
def test_the_record_of_a_lease_that_was_superseded_here_leads_nobody_to_it(world: World, late: bool) -> None:
    first = first_turn(world)
    assert first.transcript is not None
    record = lease_record(7, conversation_key(TENANT, "c"), first.transcript.keys)
    if not late:
        world.table.apply(Batch((Change(record),)))
    world.finish(world.table.open(request(NEXT, "c")), 8)
    if late:
        world.table.apply(Batch((Change(record),)))
    assert world.signal(world.table.open(request(NEXT))) is PlanReason.FIRST_TURN
    assert (7, "d") in world.table.release_tenant(TENANT)


def test_the_record_of_a_lease_that_was_released_here_leads_nobody_to_it(world: World) -> None:
    first_turn(world)
    key = conversation_key(TENANT, "c")
    world.table.apply(Batch((Change(lease_record(7, key)),), snapshot=True))
    conversation = world.table.find(TENANT, "c")
    assert conversation is not None
    assert world.table.release(conversation) is not None
    assert world.table.find(TENANT, "c") is conversation
    assert not world.table.keep_live(conversation, 60.0)
    assert world.signal(world.table.open(request(NEXT, "c"))) is PlanReason.FIRST_TURN


def test_nobody_is_led_to_what_a_tenant_has_released(world: World) -> None:
    key = conversation_key(TENANT, "c")
    world.table.apply(Batch((Change(lease_record(9, key)),), snapshot=True))
    assert world.table.release_tenant(TENANT) == [(9, "d")]
    assert world.table.find(TENANT, "c") is None
    world.table.apply(Batch((Change(lease_record(9, key)),), snapshot=True))
    assert world.signal(world.table.open(request(NEXT, "c"))) is PlanReason.FIRST_TURN


def test_the_least_recent_conversation_is_forgotten_at_the_bound(world: World) -> None:
    for name in ("a", "b", "c", "a", "d"):
        world.table.close(world.table.open(request([USER], name)))
    assert len(world.table) == 3
    assert [world.table.find(TENANT, name) is not None for name in "abcd"] == [True, False, True, True]


def test_a_conversation_with_a_turn_in_flight_is_not_forgotten(world: World) -> None:
    world.table.open(request([USER], "a"))
    for name in "bcde":
        world.table.close(world.table.open(request([USER], name)))
    assert world.table.find(TENANT, "a") is not None


def test_an_unknown_leaf_is_extended_by_nothing() -> None:
    transcript = request(NEXT).transcript
    assert transcript is not None
    assert transcript.suffix_bytes(Leaf((123,))) is None
