"""The benchmark of routing: engines take the time that was measured, and a replay loses no turn."""

import json
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvlease.bench import main as bench
from kvlease.bench.routing.events import Events, Links
from kvlease.bench.routing.fleet import Fleet
from kvlease.bench.routing.kept import KeptTurns, Order, Retention
from kvlease.bench.routing.policies import OURS, POLICIES, Policy
from kvlease.bench.routing.prefill import PrefixCache
from kvlease.bench.routing.replay import Replay, Turn
from kvlease.bench.routing.report import measure
from kvlease.bench.trace import Visit, generate_trace, read_trace
from kvlease.core.errors import InvalidArgument
from kvlease.core.planning import Plan, plan
from kvlease.core.signals import LeaseSignal, PlanReason, TurnPath, TurnSignals

PAIR = Fleet(prefills=1, decodes=1)
BY_NAME = {policy.name: policy for policy in POLICIES}


def replayed(visits: Sequence[Visit], policy: Policy, fleet: Fleet = PAIR) -> list[Turn]:
    return sorted(Replay(fleet, visits, policy, 1.0).run(), key=lambda turn: turn.index)


def taking(path: TurnPath) -> Policy:
    """Plans the path wherever a lease is held."""

    def choose(signals: TurnSignals) -> Plan | None:
        made = plan(signals)
        if made is None or not isinstance(signals.lease, LeaseSignal):
            return made
        prefill = "" if path is TurnPath.APPEND else "prefill-0"
        return Plan(path, PlanReason.FASTEST, "decode-0", prefill)

    return Policy(path.value, lambda: choose, Retention(Order.LEAST_WORTH))


def two_turns(prompt_tokens: int) -> list[Visit]:
    """A conversation whose second prompt has 128 tokens more; the prefill engine's own cache knows no block of it."""
    first = Visit(0.0, prompt_tokens - 118, -1, 0, prompt_tokens - 128)
    return [first, Visit(60.0, prompt_tokens + 10, 0, prompt_tokens - 128, prompt_tokens)]


@pytest.mark.parametrize(
    ("tokens", "path", "measured_s"),
    [
        (2_300, TurnPath.RECOMPUTE, 0.343),
        (12_500, TurnPath.RECOMPUTE, 1.623),
        (8_400, TurnPath.READBACK, 0.213),
        (12_500, TurnPath.READBACK, 0.266),
        (8_400, TurnPath.APPEND, 0.100),
    ],
)
def test_a_turn_alone_takes_what_was_measured(tokens: int, path: TurnPath, measured_s: float) -> None:
    second = replayed(two_turns(tokens), taking(path))[1]
    assert second.plan.path is path
    assert second.first_s - second.came_s == pytest.approx(measured_s, rel=0.07)


def test_those_that_decode_wait_while_a_prompt_is_computed_beside_them() -> None:
    visits = [*two_turns(9_000), Visit(59.0, 300 + 1_000, -1, 0, 300)]
    visits.sort(key=lambda visit: visit.at_s)
    visits[2] = Visit(60.0, 13_010, 0, 8_872, 13_000)
    alone, beside = (replayed(visits, taking(path))[1] for path in (TurnPath.READBACK, TurnPath.APPEND))
    computed_s = PAIR.prefill_token_s * (13_000 - 8_872)
    assert beside.ended_s - alone.ended_s == pytest.approx(computed_s, rel=0.05)


def test_reads_of_one_source_or_sink_follow_each_other_and_others_do_not() -> None:
    events = Events()
    links, ended = Links(events, token_s=1.0), list[tuple[str, float]]()
    for source, sink, tokens in (("a", "x", 2), ("a", "y", 3), ("b", "x", 1), ("c", "z", 1)):
        links.read(source, sink, tokens, lambda seconds, name=source + sink: ended.append((name, seconds)))  # type: ignore[misc]
    events.run()
    assert ended == [("cz", 1.0), ("ax", 2.0), ("bx", 3.0), ("ay", 5.0)]


def test_tails_leave_a_prefix_cache_before_heads() -> None:
    cache = PrefixCache(blocks_max=4)
    cache.insert((1, 2, 3))
    cache.insert((7, 8))
    assert cache.cached_tokens(Visit(0, 0, -1, 0, 1_536, (1, 2, 3))) == 1_024
    assert cache.cached_tokens(Visit(0, 0, -1, 0, 1_024, (7, 8))) == 1_023


def test_what_is_pinned_or_not_evictable_stays_until_its_time() -> None:
    gone: list[int] = []
    kept = KeptTurns(100, Retention(Order.LEAST_RECENT), lambda index, tokens: tokens or gone.append(index))
    kept.keep(0.0, 1, 60, -1)
    kept.pin(1)
    kept.keep(1.0, 2, 60, -1)
    assert (kept.tokens_of(1), gone) == (60, [2])
    kept.unpin(1)
    assert kept.make_room(1.0, 0)
    stock = KeptTurns(100, Retention(Order.NOTHING, keep_s=480.0), lambda index, tokens: None)
    stock.keep(0.0, 1, 60, -1)
    stock.keep(1.0, 2, 60, -1)
    assert not stock.make_room(479.0, 50)
    assert (stock.tokens_of(1), stock.tokens_of(2)) == (60, 0)
    assert stock.make_room(480.0, 50)


def test_a_turn_for_which_stock_retention_leaves_no_room_waits_until_its_time_has_passed() -> None:
    visits = [Visit(0.0, 150_000, -1, 0, 149_990), Visit(100.0, 100_000, -1, 0, 99_990)]
    first, second = replayed(visits, BY_NAME["stock, 480 s"])
    assert second.first_s == pytest.approx(first.ended_s + 480.0, rel=0.01)
    assert second.first_s - second.came_s > 300.0
    evicting = replayed(visits, OURS)[1]
    assert evicting.first_s - evicting.came_s < 20.0


def test_a_turn_comes_after_the_one_that_it_continues_has_ended() -> None:
    first, second = replayed([Visit(0.0, 20_000, -1, 0, 18_000), Visit(1.0, 20_000, 0, 18_000, 19_000)], OURS)
    assert second.came_s == first.ended_s > 1.0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_every_turn_of_a_trace_ends_and_is_the_same_when_replayed_again(policy: Policy) -> None:
    visits = read_trace(generate_trace(seed=1, seconds=240))
    fleet = Fleet(prefills=2, decodes=2)
    one, two = (replayed(visits, policy, fleet) for _ in range(2))
    assert [turn.index for turn in one] == list(range(len(visits)))
    assert all(turn.came_s < turn.first_s <= turn.ended_s for turn in one)
    assert [(turn.first_s, turn.ended_s, turn.plan) for turn in one] == [
        (turn.first_s, turn.ended_s, turn.plan) for turn in two
    ]


def test_affinity_appends_and_ours_reuses_where_stock_and_recompute_do_not() -> None:
    visits = read_trace(generate_trace(seed=2, seconds=240))
    figures = measure(visits, (0.5,)).figures[0.5]
    assert any(route.startswith("append") for route in figures["affinity"].paths)
    assert set(figures["recompute"].paths) == {"recompute; reuse_off"}
    assert figures["ours"].reused > figures["recompute"].reused
    assert figures["ours"].ttft_s[0] < figures["recompute"].ttft_s[0]


def test_a_trace_without_any_time_is_no_load() -> None:
    with pytest.raises(InvalidArgument, match="one moment"):
        measure([Visit(1.0, 10, -1, 0, 5)], (1.0,))


def bench_routing(*arguments: str) -> int:
    parser = ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["routing", *arguments]))


def test_the_command_prints_figures_as_json_and_says_by_its_status_whether_goals_are_met(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--generate", "1", "--seconds", "60", "--loads", "0.5")
    status = bench_routing(*arguments, "--output", "json")
    printed = json.loads(capsys.readouterr().out)
    assert status == (0 if all(printed["goals"].values()) else 1)
    assert printed["command"] == "kvlease bench routing --generate 1 --seconds 60 --loads 0.5"
    assert {(row["load"], row["policy"]) for row in printed["results"]} == {(0.5, name) for name in BY_NAME}
    bench_routing(*arguments)
    assert "NOT MET" in (table := capsys.readouterr().out) or status == 0
    assert "recompute" in table


@pytest.mark.parametrize("loads", ["", "0", "a", "1,-1", "nan"])
def test_loads_that_are_none_are_refused(loads: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_routing("--generate", "1", f"--loads={loads}")
    assert "shares above 0" in capsys.readouterr().err


def test_a_trace_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_routing("--trace", str(tmp_path / "none")) == 2
    assert "none" in capsys.readouterr().err
