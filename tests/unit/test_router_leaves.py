"""Requests under one id: each fork of the chain has a leaf of its own, and a wrong id costs no more than a miss."""

from typing import Any

import pytest

from kvlease.core.conversation import Reply
from kvlease.core.signals import LeaseSignal, PlanReason
from kvlease.router.conversation import OpenTurn
from kvlease.router.conversations import LEAVES_MAX, ConversationTable
from stubs.conversations import HOLDER, CountingRandom, World, request

SYSTEM = {"role": "system", "content": "You are an agent."}


@pytest.fixture
def world() -> World:
    world = World()
    world.table = ConversationTable(world.clock, world.renewals, world.engines, CountingRandom(), 1000)
    return world


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def replied(text: str = "fine") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def run(
    world: World, lease_id: int, *messages: dict[str, Any], reply: str = "fine", model: str = "m"
) -> OpenTurn:
    """A whole turn under the id `c`."""
    turn = world.table.open(request(list(messages), "c", model))
    world.table.grant(turn, lease_id, HOLDER, Reply(reply))
    world.table.close(turn)
    world.clock.advance(0.1)
    return turn


def test_agents_at_work_under_their_parents_id_keep_their_leases(world: World) -> None:
    parent: list[dict[str, Any]] = [SYSTEM, user("build it")]
    agent: list[dict[str, Any]] = [{**SYSTEM, "content": "You search."}, user("find it")]
    run(world, 1, *parent)
    run(world, 101, *agent)
    for turn in range(1, 5):
        parent += [replied(), user(f"parent {turn}")]
        agent += [replied(), user(f"agent {turn}")]
        assert run(world, 1 + turn, *parent).supersedes == turn
        assert run(world, 101 + turn, *agent).supersedes == 100 + turn


def test_agents_that_fork_off_their_parents_history_read_it_and_supersede_nothing(world: World) -> None:
    parent: list[dict[str, Any]] = [SYSTEM, user("build it")]
    run(world, 1, *parent)
    history = [*parent, replied()]
    in_flight = world.table.open(request([*history, user("go on")], "c"))
    forks = [world.table.open(request([*history, user(f"task {n}")], "c")) for n in range(3)]
    assert in_flight.supersedes == 1
    assert [fork.supersedes for fork in forks] == [0, 0, 0]
    assert all(isinstance(world.signal(fork), LeaseSignal) for fork in forks)
    assert len({fork.conversation.key for fork in forks} | {in_flight.conversation.key}) == 4


def test_the_same_body_twice_is_one_leaf_whether_the_first_runs_or_has_ended(world: World) -> None:
    run(world, 1, user("a"))
    again = [user("a"), replied(), user("b")]
    one, two = world.table.open(request(again, "c")), world.table.open(request(again, "c"))
    assert one.conversation is two.conversation
    for turn, lease_id in ((one, 2), (two, 3)):
        world.table.grant(turn, lease_id, HOLDER, Reply("fine"))
        world.table.close(turn)
    regenerated = run(world, 4, *again, reply="better")
    assert regenerated.conversation is one.conversation
    assert regenerated.supersedes == 3
    assert run(world, 5, *again, replied("better"), user("c")).supersedes == 4


def test_a_branch_and_the_line_it_left_go_on_side_by_side(world: World) -> None:
    run(world, 1, user("a"))
    run(world, 2, user("a"), replied(), user("b"))
    branch = run(world, 3, user("a"), replied(), user("other"))
    assert branch.supersedes == 0
    assert run(world, 4, user("a"), replied(), user("b"), replied(), user("c")).supersedes == 2
    assert run(world, 5, user("a"), replied(), user("other"), replied(), user("c")).supersedes == 3


def test_a_compacted_history_begins_a_leaf_and_goes_on_from_it(world: World) -> None:
    run(world, 1, SYSTEM, user("a"))
    run(world, 2, SYSTEM, user("a"), replied(), user("b"))
    compacted = run(world, 3, SYSTEM, user("summary: a, b"))
    assert compacted.supersedes == 0
    assert run(world, 4, SYSTEM, user("summary: a, b"), replied(), user("c")).supersedes == 3


def test_a_window_that_slides_takes_the_place_of_the_leaf_before(world: World) -> None:
    run(world, 1, user("a"), reply="1")
    run(world, 2, user("a"), replied("1"), user("b"), reply="2")
    slid = run(world, 3, replied("1"), user("b"), replied("2"), user("c"))
    assert slid.supersedes == 2
    assert len(world.table) == 1


def test_an_id_used_for_two_models_has_a_leaf_for_each(world: World) -> None:
    for turn in range(3):
        history = [message for n in range(turn) for message in (user(str(n)), replied())]
        here = run(world, 1 + turn, *history, user(str(turn)), model="m")
        there = run(world, 11 + turn, *history, user(str(turn)), model="other")
        assert (here.supersedes, there.supersedes) == ((turn, 10 + turn) if turn else (0, 0))


def test_one_id_for_everybody_costs_misses_and_bounded_memory(world: World) -> None:
    for client in range(3 * LEAVES_MAX):
        turn = run(world, 1 + client, user(f"client {client}"))
        assert world.signal(turn) is PlanReason.FIRST_TURN or turn.base is None
    conversation = world.table.find(turn.conversation.tenant, "c")
    assert conversation is not None
    assert len(world.table.leaves(conversation)) == LEAVES_MAX
    last = 3 * LEAVES_MAX - 1
    assert run(world, 999, user(f"client {last}"), replied(), user("next")).supersedes == last + 1


def test_the_leaf_used_last_is_what_an_id_stands_for(world: World) -> None:
    run(world, 1, user("a"))
    run(world, 2, {**SYSTEM}, user("b"))
    conversation = world.table.find(request([user("a")]).tenant, "c")
    assert conversation is not None
    assert [leaf.lease.lease_id for leaf in world.table.leaves(conversation) if leaf.lease] == [1, 2]
