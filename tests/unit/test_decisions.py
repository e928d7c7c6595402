"""Recorded decisions come back the same, are made again the same, and are explained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease import cli
from kvlease.core.decisions import Decision, decided
from kvlease.core.errors import InvalidArgument
from kvlease.core.planning import plan
from kvlease.core.rates import Line
from kvlease.core.records import EngineRole
from kvlease.core.signals import (
    EngineSignal,
    LeaseSignal,
    PlanReason,
    ReadRates,
    TurnPath,
    TurnSignals,
)
from kvlease.dev.engine_process import free_ports
from kvlease.router.conversation import TurnRecord
from kvlease.router.decisions import DecisionLog

LINE = Line(0.01, 1e-4, 100)
ENGINES = (
    EngineSignal("p", EngineRole.PREFILL, "layout", prefill=LINE),
    EngineSignal("d", EngineRole.DECODE, "layout", running=3, prefill=LINE),
)
RATES = ReadRates(LINE, LINE, {("d", "p"): LINE, ("x", "y"): LINE})
SIGNALS = TurnSignals(LeaseSignal("d", 600, 8000), ENGINES, prompt_tokens=8600, rates=RATES)


def decision(signals: TurnSignals = SIGNALS) -> Decision:
    return decided("turn-1", signals, plan(signals))


def note(log: DecisionLog, turn_id: str, signals: TurnSignals, **became: str) -> None:
    """The decision of a turn that has ended."""
    made = plan(signals)
    record = TurnRecord(turn_id, made.path, made.reason, **became) if made is not None else None  # type: ignore[arg-type]
    log.end(log.note("tenant", turn_id, signals, made, record))


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "decisions.jsonl"
    log = DecisionLog(kept_max=2, file=path)
    for number in range(3):
        note(log, f"turn-{number}", SIGNALS)
    log.close()
    assert log.find("tenant", "turn-0") is None
    assert log.find("other", "turn-2") is None
    assert log.find("tenant", "turn-2") is not None
    return path


lines = st.none() | st.builds(Line, st.floats(0, 1), st.floats(0, 1), st.integers(0, 99))
leases = st.sampled_from(PlanReason) | st.builds(
    LeaseSignal,
    st.sampled_from(["d", "gone"]),
    st.none() | st.integers(0, 9999),
    st.integers(0, 9999),
)


@given(leases, lines, lines, st.none() | st.sampled_from(TurnPath), st.booleans())
def test_decisions_survive_the_way_through_json_and_are_made_again_the_same(
    lease: LeaseSignal | PlanReason, line: Line | None, read: Line | None, last: TurnPath | None, keep: bool
) -> None:
    engines = tuple(replace(engine, prefill=line) for engine in ENGINES)
    rates = ReadRates(read, line, {("d", "p"): LINE})
    signals = TurnSignals(lease, engines, last_path=last, keep=keep, prompt_tokens=5000, rates=rates)
    recorded = decision(signals)
    back = Decision.from_json(json.loads(json.dumps(recorded.to_json())))
    assert back == recorded
    whole = decision(replace(signals, whole_prompt=True))
    assert Decision.from_json(json.loads(json.dumps(whole.to_json()))).again() == whole.plan
    assert back.again() == recorded.plan


def test_only_rates_that_can_have_mattered_are_recorded() -> None:
    assert set(decision().signals.rates.pairs) == {("d", "p")}


@pytest.mark.parametrize("spoilt", [None, [], {}, {"version": 2}, {"version": 1, "turn_id": "t"}])
def test_what_is_no_decision_is_refused(spoilt: object) -> None:
    with pytest.raises(InvalidArgument):
        Decision.from_json(spoilt)


def test_explain_shows_what_each_path_costs(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(written), "--turn", "turn-1"]) == 0
    shown = capsys.readouterr().out
    assert "turn turn-1: about 8600 tokens, a lease of 8000 tokens at d, 600 tokens after it" in shown
    assert "append, because fastest: d" in shown
    assert all(f"{path.value}" in shown for path in TurnPath)


def test_explain_tells_the_decode_engine_alone_from_a_prompt_that_is_handed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill, decode = ENGINES
    engines = (replace(prefill, backlog_tokens=90_000, running=9), replace(decode, kv_tokens=200_000))
    signals = replace(SIGNALS, lease=PlanReason.FIRST_TURN, engines=engines)
    log = DecisionLog(kept_max=1, file=tmp_path / "decisions.jsonl")
    note(log, "turn-1", signals)
    log.close()
    assert cli.main(["explain", str(tmp_path / "decisions.jsonl")]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "recompute, because prefill_overloaded: d" in shown[1]
    assert [line[:16].rstrip() for line in shown[2:4]] == ["    recompute", "  → decode alone"]


@pytest.mark.parametrize(
    ("became", "said"),
    [
        ({"decode_engine_id": "d"}, []),
        (
            {"decode_engine_id": "d2", "decode_anew_id": "d2"},
            ["  decoded by d2, chosen anew when the prompt was computed"],
        ),
        ({"decode_engine_id": "d3"}, ["  decoded by d3 in the end, in place of d"]),
        (
            {"decode_engine_id": "d3", "decode_anew_id": "d2"},
            [
                "  decoded by d2, chosen anew when the prompt was computed",
                "  decoded by d3 in the end, in place of d2",
            ],
        ),
    ],
)
def test_explain_shows_the_decode_engine_that_served_and_why_it_is_not_the_planned_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], became: dict[str, str], said: list[str]
) -> None:
    log, path = DecisionLog(kept_max=1, file=tmp_path / "decisions.jsonl"), str(tmp_path / "decisions.jsonl")
    note(log, "turn-1", replace(SIGNALS, lease=PlanReason.FIRST_TURN), **became)
    log.close()
    assert cli.main(["explain", path]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if "decoded by" in line] == said
    assert cli.main(["explain", path, "--output", "json"]) == 0
    shown_json = json.loads(capsys.readouterr().out)
    assert shown_json["served_by_id"] == became["decode_engine_id"]
    assert shown_json["decode_anew_id"] == became.get("decode_anew_id", "")


def test_a_decision_of_a_version_that_recorded_less_is_read(written: Path) -> None:
    first = json.loads(written.read_text().splitlines()[0])
    del first["decode_anew_id"], first["served_by_id"], first["whole_prompt"]
    back = Decision.from_json(first)
    assert (back.served_by_id, back.signals.whole_prompt) == ("", False)


def test_explain_says_when_this_version_would_decide_otherwise(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = json.loads(written.read_text().splitlines()[0])
    first["plan"]["path"] = "recompute"
    written.write_text(json.dumps(first) + "\n")
    assert cli.main(["explain", str(written)]) == 1
    assert "! this version would decide: append" in capsys.readouterr().out
    assert cli.main(["explain", str(written), "--output", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["same"] is False


def test_explain_of_a_turn_that_is_not_there_is_a_problem_and_no_wrong_use(
    written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", str(written), "--turn", "nobody's", "--output", "json"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, json.loads(printed.err)["error"]["reason"]) == ("", "not_found")


@pytest.mark.parametrize(
    "arguments", [[], ["a", "--router", "http://r"], ["--router", "http://r"], ["/no/such/file"]]
)
def test_explain_refuses_what_makes_no_sense(arguments: list[str]) -> None:
    assert cli.main(["explain", *arguments]) == 2


def test_explain_tells_a_router_that_does_not_answer_from_a_wrong_command_line() -> None:
    (port,) = free_ports(1)
    assert cli.main(["explain", "--router", f"http://127.0.0.1:{port}", "--turn", "turn-1"]) == 3


def test_a_file_that_cannot_be_written_stops_no_turn(tmp_path: Path) -> None:
    log = DecisionLog(10, tmp_path / "missing" / "decisions.jsonl")
    for number in range(2):
        note(log, f"turn-{number}", SIGNALS)
    assert log.find("tenant", "turn-1") is not None
