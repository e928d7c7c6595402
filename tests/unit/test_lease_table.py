"""The transition table against the protocol's description, written down here a second time as data."""

import pytest

from kvlease.core.lease import (
    ENDINGS,
    MISS_OF_STATE,
    TERMINAL,
    TRANSITIONS,
    LeaseEvent,
    LeaseState,
    transition,
)

STATES = ["none", "held", "reading", "draining", "released", "expired", "evicted", "lost"]

TABLE = """
state     event                      next      remembers
none      grant conversation         held      -
none      grant transfer             reading   -
held      renew                      held      -
held      pin                        reading   -
held      unpin                      held      -
held      release                    released  -
held      supersede                  released  -
held      expire                     expired   -
held      maximum lifetime           expired   -
held      evict                      evicted   -
held      lose by reset              lost      -
held      lose by engine death       lost      -
reading   renew                      reading   -
reading   pin                        reading   -
reading   unpin                      reading   -
reading   last unpin                 held      -
reading   last unpin of a transfer   released  -
reading   release                    draining  released
reading   supersede                  draining  released
reading   expire                     draining  expired
reading   maximum lifetime           draining  expired
reading   evict                      draining  evicted
reading   lose by reset              draining  lost
reading   lose by engine death       lost      -
draining  unpin                      draining  -
draining  last unpin                 *         -
draining  last unpin of a transfer   *         -
draining  release                    draining  -
draining  supersede                  draining  -
draining  expire                     draining  -
draining  maximum lifetime           draining  -
draining  evict                      draining  -
draining  lose by reset              draining  lost
draining  lose by engine death       lost      -
"""
"""`*` is the terminal state that the lease remembers."""

ACKNOWLEDGED = (
    "unpin",
    "release",
    "supersede",
    "expire",
    "maximum lifetime",
    "evict",
    "lose by reset",
    "lose by engine death",
)


def described() -> dict[tuple[str, str], tuple[str, str]]:
    rows: dict[tuple[str, str], tuple[str, str]] = {}
    for line in TABLE.strip().splitlines()[1:]:
        state, event, target, remembers = line[:10], line[10:37], line[37:47], line[47:]
        rows[state.strip(), event.strip()] = (target.strip(), remembers.strip())
    for state in ("released", "expired", "evicted", "lost"):
        for event in ACKNOWLEDGED:
            rows[state, event] = (state, "-")
    return rows


DESCRIBED = described()
EVERY_PAIR = [(state, event) for state in LeaseState for event in LeaseEvent]


@pytest.mark.parametrize(
    ("state", "event"), EVERY_PAIR, ids=[f"{state.value}-{event.value}" for state, event in EVERY_PAIR]
)
def test_every_pair_of_state_and_event_does_what_the_protocol_says(
    state: LeaseState, event: LeaseEvent
) -> None:
    row = transition(state, event)
    expected = DESCRIBED.get((state.value, event.value))
    if expected is None:
        assert row is None
        return
    assert row is not None
    assert (row.target.value if row.target else "*") == expected[0]
    assert (row.remember.value if row.remember else "-") == expected[1]


def test_the_description_names_no_state_and_no_event_that_do_not_exist() -> None:
    assert {state for state, _ in DESCRIBED} <= set(STATES)
    assert {event for _, event in DESCRIBED} == {event.value for event in LeaseEvent}
    assert len(TRANSITIONS) == len(DESCRIBED)


def test_every_ending_asks_for_a_terminal_state() -> None:
    assert set(ENDINGS.values()) == TERMINAL


def test_every_state_that_refuses_a_pin_says_why_in_a_miss() -> None:
    refusing = {state for state in LeaseState if transition(state, LeaseEvent.PIN) is None}
    assert refusing - {LeaseState.NONE} == set(MISS_OF_STATE)


def test_no_terminal_state_is_ever_left() -> None:
    for (state, _), row in TRANSITIONS.items():
        if state in TERMINAL:
            assert row.target is state
