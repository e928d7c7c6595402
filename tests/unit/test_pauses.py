"""How long idle conversations are worth keeping: what counts while nothing is known, and what is learnt."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core import pauses
from kvlease.core.errors import InvalidArgument
from kvlease.core.pauses import EDGES_S, KeepPolicy, PauseModel, TurnEnd

PRICED = KeepPolicy(returns_per_hour=3.0, floor_s=30.0, cap_s=600.0)
TURN = TurnEnd("t", prompt_tokens=1000, new_tokens=1000, reply_tokens=100)
LONG_S = EDGES_S[-1] + 1.0


class Fleet:
    """Conversations one after the other, on a clock of their own."""

    def __init__(self) -> None:
        self.model = PauseModel()
        self.now_s = 0.0
        self._key = 0

    def converse(self, turn: TurnEnd, gap_s: float, times: int) -> None:
        """One conversation that goes on so often, each time after so long, and then no more."""
        self._key += 1
        for number in range(times):
            self.model.begin(self.now_s, self._key, turn)
            self.now_s += gap_s
            self.model.went_on(self.now_s, self._key)
            turn = replace(turn, turns=number + 1, last_gap_s=gap_s)
        self.model.begin(self.now_s, self._key, turn)

    def end(self) -> None:
        """Lets so much time pass that all that was idle has ended."""
        self.now_s += LONG_S
        self.model.advance(self.now_s)

    def keep_s(self, turn: TurnEnd, policy: KeepPolicy = PRICED) -> float:
        return self.model.keep_s(turn, policy)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_while_nothing_is_known_later_turns_are_kept_for_longer(fleet: Fleet) -> None:
    times_s = [fleet.keep_s(replace(TURN, turns=turns)) for turns in range(6)]
    assert times_s == sorted(times_s)
    assert PRICED.floor_s < times_s[0] < times_s[-1]


def test_what_never_goes_on_is_let_go_at_the_floor_and_what_does_is_not(fleet: Fleet) -> None:
    short = replace(TURN, prompt_tokens=30, new_tokens=30)
    for _ in range(100):
        fleet.converse(short, 0.0, 0)
        fleet.converse(TURN, 100.0, 1)
    fleet.end()
    assert fleet.keep_s(short) == PRICED.floor_s
    assert fleet.keep_s(TURN) > 100.0


def test_a_tenant_that_returns_at_once_or_not_at_all_is_kept_for_less_long_than_a_slow_one(
    fleet: Fleet,
) -> None:
    programs, people = replace(TURN, tenant="programs"), replace(TURN, tenant="people")
    for _ in range(400):
        fleet.converse(programs, 5.0, 3)
        fleet.converse(people, 200.0, 3)
    fleet.end()
    priced = replace(PRICED, returns_per_hour=6.0)
    assert fleet.keep_s(programs, priced) < 100.0 < 200.0 < fleet.keep_s(people, priced)


def test_within_a_tenant_a_conversations_own_pace_counts(fleet: Fleet) -> None:
    for _ in range(200):
        fleet.converse(TURN, 5.0, 3)
        fleet.converse(TURN, 200.0, 3)
    fleet.end()
    quick, slow = (replace(TURN, turns=2, last_gap_s=gap_s) for gap_s in (5.0, 200.0))
    assert fleet.keep_s(quick) < fleet.keep_s(slow)
    assert fleet.keep_s(slow) > 200.0


def test_time_alone_teaches_that_conversations_do_not_go_on(fleet: Fleet) -> None:
    before_s = fleet.keep_s(TURN)
    for _ in range(100):
        fleet.converse(TURN, 0.0, 0)
    assert fleet.keep_s(TURN) == before_s
    fleet.end()
    assert fleet.keep_s(TURN) < before_s
    assert len(fleet.model) == 0


def test_what_is_learnt_is_forgotten_for_what_comes_later(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "MEMORY", 50.0)
    for _ in range(300):
        fleet.converse(TURN, 0.0, 0)
    fleet.end()
    assert fleet.keep_s(TURN) == PRICED.floor_s
    for _ in range(300):
        fleet.converse(TURN, 100.0, 1)
    assert fleet.keep_s(TURN) > 100.0


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.floats(0.0, 5000.0), st.integers(0, 3)), max_size=12),
    st.floats(0.01, 100.0),
    st.floats(0.01, 100.0),
)
def test_a_higher_price_never_keeps_for_longer(
    conversations: list[tuple[int, float, int]], one: float, other: float
) -> None:
    fleet = Fleet()
    for tokens, gap_s, times in conversations:
        fleet.converse(replace(TURN, prompt_tokens=tokens), gap_s, times)
    cheap, dear = (replace(PRICED, returns_per_hour=price) for price in sorted((one, other)))
    assert PRICED.floor_s <= fleet.keep_s(TURN, dear) <= fleet.keep_s(TURN, cheap) <= PRICED.cap_s


def test_a_conversation_is_kept_until_others_went_on_when_that_is_worth_its_price(fleet: Fleet) -> None:
    for number in range(400):
        fleet.converse(TURN, 100.0, number % 2)
    fleet.end()
    # Of 100 s of keeping every second one brings a return: 18 an hour.
    assert fleet.keep_s(TURN, KeepPolicy(returns_per_hour=36.0, cap_s=4000.0)) == 30.0
    assert 100.0 < fleet.keep_s(TURN, KeepPolicy(returns_per_hour=9.0, cap_s=4000.0)) < 200.0


def test_conversations_and_tenants_are_followed_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "FOLLOWED_MAX", 10)
    monkeypatch.setattr(pauses, "TENANTS_MAX", 5)
    model = PauseModel()
    for number in range(50):
        model.begin(float(number), number, replace(TURN, tenant=f"tenant {number}"))
    assert len(model) == 10
    model.went_on(50.0, 3)
    assert len(model) == 10


def test_a_return_of_what_is_not_followed_teaches_nothing(fleet: Fleet) -> None:
    before_s = fleet.keep_s(TURN)
    fleet.model.went_on(10.0, "nobody")
    fleet.model.begin(10.0, "c", TURN)
    fleet.model.forget("c")
    fleet.model.went_on(20.0, "c")
    fleet.model.advance(20.0 + LONG_S)
    assert fleet.keep_s(TURN) == before_s


@pytest.mark.parametrize(
    ("policy", "values"),
    [
        ({"returns_per_hour": 0.0}, ("0.0",)),
        ({"returns_per_hour": math.inf}, ("inf",)),
        ({"floor_s": 700.0}, ("700.0", "600.0")),
        ({"floor_s": 0.0}, ("0.0",)),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_its_values(
    policy: dict[str, float], values: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        KeepPolicy(**policy)
    assert all(value in str(refused.value) for value in values)


def test_a_conversation_that_fell_out_of_a_full_bucket_may_go_on_whenever_it_wants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pauses, "FOLLOWED_MAX", 3)
    model = PauseModel()
    model.begin(0.0, "early", TURN)
    for _ in range(pauses.FOLLOWED_MAX):
        model.begin(0.0, "busy", TURN)
    model.went_on(LONG_S, "early")
    assert len(model) == 0
