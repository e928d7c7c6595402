"""The benchmark of policies: traces are read as they say, costs are counted, and no policy beats the bounds."""

import json
from argparse import ArgumentParser
from collections.abc import Sequence

import pytest

from kvlease.bench import main as bench
from kvlease.bench import policy
from kvlease.bench.bounds import Offer, gib_s_at_least, offers_of, tokens_at_most, tokens_within
from kvlease.bench.budget import reused_fixed, reused_lru, reused_ours
from kvlease.bench.keeping import keep_fixed, keep_predicted, replay, turn_of
from kvlease.bench.trace import GIB, Visit, generate_trace, read_trace
from kvlease.core.errors import InvalidArgument
from kvlease.core.pauses import KeepPolicy, TurnEnd

TOKENS_OF_A_GIB = GIB // (256 << 10)


def request(at_ms: int, *hash_ids: int) -> str:
    return json.dumps(
        {
            "timestamp": at_ms,
            "input_length": 512 * len(hash_ids),
            "output_length": 0,
            "hash_ids": list(hash_ids),
        }
    )


@pytest.fixture(scope="module")
def made_up() -> Sequence[Visit]:
    return read_trace(generate_trace(seed=1, seconds=1200))


def test_a_trace_is_replayed_to_the_hits_and_the_time_that_it_has() -> None:
    trace = (request(0, 1, 2), request(10000, 1, 9), request(20000, 1, 2, 3), request(90000, 1, 2, 3, 4))
    visits = read_trace(trace)
    assert [visit.parent for visit in visits] == [-1, -1, 0, 2]
    result = replay(visits, [30.0] * len(visits))
    assert (result.hits, result.continued, result.reused_tokens) == (1, 2, 1024)
    assert result.held_s == 20.0 + 30.0 + 30.0 + 0.0
    turns: list[TurnEnd] = []
    for visit in visits:
        turns.append(turn_of(visit, visits, turns))
    assert [turn.last_gap_s for turn in turns] == [None, None, 20.0, 70.0]
    assert [turn.turns for turn in turns] == [0, 0, 1, 2]
    assert [turn.new_tokens for turn in turns] == [1024, 1024, 512, 512]


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (("{",), "line 1"),
        ((request(0, 1), "[]"), "line 2"),
        (('{"timestamp": 0}',), "input_length"),
        ((request(5, 1), request(4, 1)), "line 2"),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(lines: Sequence[str], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        read_trace(lines)


def test_the_clairvoyant_takes_what_saves_most_for_its_time_first() -> None:
    cheap, dear = Offer(0.0, 10.0, 1.0, 100), Offer(0.0, 100.0, 1.0, 100)
    assert tokens_at_most((dear, cheap), 10.0) == 100.0
    assert tokens_at_most((dear, cheap), 60.0) == 150.0
    assert gib_s_at_least((dear, cheap), 150.0) == 60.0
    assert tokens_at_most((dear, cheap), 1e9) == 200.0


def test_the_bound_within_a_budget_counts_what_is_kept_at_one_moment() -> None:
    together = [Offer(0.0, 60.0, 1.0, 100) for _ in range(4)]
    in_turn = [Offer(60.0 * number, 60.0 * number + 60.0, 1.0, 100) for number in range(4)]
    assert tokens_within(together, 1.0) == pytest.approx(100.0, rel=0.05)
    assert tokens_within(in_turn, 1.0) == pytest.approx(400.0, rel=0.05)


@pytest.mark.parametrize("budget_gib", [5.0, 20.0, 80.0])
def test_no_policy_saves_more_than_the_bound_within_a_budget(
    made_up: Sequence[Visit], budget_gib: float
) -> None:
    bound = tokens_within(offers_of(made_up), budget_gib)
    saved = [reused_lru(made_up, budget_gib), reused_ours(made_up, budget_gib)]
    saved += [reused_fixed(made_up, budget_gib, seconds) for seconds in (30.0, 480.0)]
    assert 0 < max(saved) <= bound


def test_no_policy_saves_more_than_the_bound_for_its_gib_and_seconds(made_up: Sequence[Visit]) -> None:
    offers = offers_of(made_up)
    for cost in (
        keep_fixed(made_up, 120.0),
        keep_fixed(made_up, 480.0),
        *keep_predicted(made_up, [KeepPolicy(4.0), KeepPolicy(1.0)]),
    ):
        assert 0 < cost.reused_tokens <= tokens_at_most(offers, cost.held_gib_s)
        assert gib_s_at_least(offers, cost.reused_tokens) <= cost.held_gib_s


def test_leases_that_cannot_be_evicted_keep_out_what_does_not_fit() -> None:
    size = TOKENS_OF_A_GIB
    visits = [
        Visit(0.0, size, -1, 0),
        Visit(1.0, size, -1, 0),
        Visit(2.0, size, 0, 7),
        Visit(3.0, size, 1, 9),
    ]
    assert reused_fixed(visits, 1.0, 600.0) == 7
    assert reused_lru(visits, 1.0) == 0
    assert reused_fixed(visits, 2.0, 600.0) == 16


def test_the_command_prints_a_document_and_says_which_goals_were_met(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = ArgumentParser()
    bench.add_arguments(parser)
    asked = ["policy", "--generate", "3", "--seconds", "900", "--budgets", "20", "--output", "json"]
    status = bench.run(parser.parse_args(asked))
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "kvlease bench policy --generate 3 --seconds 900"
    assert set(document["budgets"]) == {"20 GiB"}
    assert status == (0 if all(document["goals"].values()) else 1)


def test_a_trace_that_cannot_be_read_ends_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    policy.add_arguments(parser)
    assert policy.run(parser.parse_args(["--trace", "/nonexistent/trace.jsonl"])) == 2
    assert "/nonexistent/trace.jsonl" in capsys.readouterr().err
