"""The planner: which path a turn takes, why, and on which engines."""

from dataclasses import replace

import pytest

from kvlease.core.lease import MissReason
from kvlease.core.planning import (
    REASON_OF_MISS,
    EngineSignal,
    LeaseSignal,
    Plan,
    PlanLimits,
    PlanReason,
    TurnPath,
    TurnSignals,
    choose_decode,
    choose_prefill,
    plan,
)
from kvlease.core.records import EngineRole

PREFILL = EngineSignal("p", EngineRole.PREFILL, "layout")
DECODE = EngineSignal("d", EngineRole.DECODE, "layout")
BOTH = (PREFILL, DECODE)


def planned(lease: LeaseSignal | PlanReason, *engines: EngineSignal, **signals: object) -> Plan:
    made = plan(replace(TurnSignals(lease, engines or BOTH), **signals))
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("suffix_tokens", "path", "reason"),
    [
        (0, TurnPath.APPEND, PlanReason.SHORT_SUFFIX),
        (512, TurnPath.APPEND, PlanReason.SHORT_SUFFIX),
        (513, TurnPath.READBACK, PlanReason.LONG_SUFFIX),
        (None, TurnPath.READBACK, PlanReason.HISTORY_EDITED),
    ],
)
def test_the_suffix_after_the_leased_history_chooses_the_path(
    suffix_tokens: int | None, path: TurnPath, reason: PlanReason
) -> None:
    made = planned(LeaseSignal("d", suffix_tokens, tokens=1000))
    assert (made.path, made.reason) == (path, reason)
    assert made.decode_engine_id == "d"
    assert made.prefill_engine_id == ("" if path is TurnPath.APPEND else "p")


@pytest.mark.parametrize(
    "reason", [PlanReason.FIRST_TURN, PlanReason.LEASE_EXPIRED, PlanReason.MODEL_CHANGED]
)
def test_without_a_lease_the_turn_recomputes_for_the_reason_given(reason: PlanReason) -> None:
    assert planned(reason) == Plan(TurnPath.RECOMPUTE, reason, "d", "p")


def test_a_busy_decode_engine_prefills_not_even_a_short_suffix() -> None:
    busy = replace(DECODE, running=128)
    made = planned(LeaseSignal("d", 10, tokens=1000), PREFILL, busy)
    assert (made.path, made.reason) == (TurnPath.READBACK, PlanReason.DECODE_OVERLOADED)


@pytest.mark.parametrize(
    ("tokens", "path"), [(63, TurnPath.RECOMPUTE), (64, TurnPath.READBACK), (0, TurnPath.READBACK)]
)
def test_a_lease_below_the_threshold_is_not_read_unless_its_size_is_unknown(
    tokens: int, path: TurnPath
) -> None:
    assert planned(LeaseSignal("d", None, tokens)).path is path


def test_the_lease_of_an_engine_that_is_gone_is_lost() -> None:
    made = planned(LeaseSignal("gone", 10, tokens=1000))
    assert (made.path, made.reason) == (TurnPath.RECOMPUTE, PlanReason.LEASE_LOST)


def test_the_decode_engine_that_has_the_blocks_is_preferred_to_an_idle_one() -> None:
    idle = replace(DECODE, engine_id="idle")
    busy = replace(DECODE, running=50)
    assert planned(LeaseSignal("d", 10, 1000), PREFILL, idle, busy).decode_engine_id == "d"
    assert planned(PlanReason.FIRST_TURN, PREFILL, idle, busy).decode_engine_id == "idle"
    made = planned(PlanReason.LEASE_EXPIRED, PREFILL, idle, busy, preferred_engine_id="d")
    assert made.decode_engine_id == "d"


def test_a_suspect_holder_is_read_from_and_decodes_nothing() -> None:
    other = replace(DECODE, engine_id="other")
    made = planned(LeaseSignal("d", 10, 1000), PREFILL, replace(DECODE, suspect=True), other)
    assert (made.path, made.decode_engine_id) == (TurnPath.READBACK, "other")


def test_without_a_prefill_engine_the_decode_engine_does_everything() -> None:
    made = planned(PlanReason.FIRST_TURN, DECODE)
    assert made == Plan(TurnPath.RECOMPUTE, PlanReason.NO_PREFILL_ENGINE, "d")
    appended = planned(LeaseSignal("d", 5000, 1000), DECODE)
    assert appended == Plan(TurnPath.APPEND, PlanReason.NO_PREFILL_ENGINE, "d")
    edited = planned(LeaseSignal("d", None, 1000), DECODE)
    assert edited == Plan(TurnPath.RECOMPUTE, PlanReason.NO_PREFILL_ENGINE, "d")


@pytest.mark.parametrize(
    ("prefill", "reason"),
    [
        (replace(PREFILL, layout_hash="other"), PlanReason.LAYOUT_MISMATCH),
        (replace(PREFILL, retain=False), PlanReason.RETAIN_REFUSED),
    ],
)
def test_engines_that_cannot_read_each_other_are_no_pair(prefill: EngineSignal, reason: PlanReason) -> None:
    assert planned(PlanReason.FIRST_TURN, prefill, DECODE) == Plan(TurnPath.RECOMPUTE, reason, "d")


def test_a_decode_engine_that_retains_nothing_is_asked_to_keep_nothing() -> None:
    made = planned(PlanReason.FIRST_TURN, PREFILL, replace(DECODE, retain=False))
    assert (made.keep, made.prefill_engine_id) == (False, "")


def test_a_batch_is_left_to_the_decode_engine() -> None:
    assert planned(PlanReason.FIRST_TURN, batch=True) == Plan(
        TurnPath.RECOMPUTE, PlanReason.BATCH, "d", keep=False
    )


def test_nothing_is_planned_when_no_engine_decodes() -> None:
    assert plan(TurnSignals(PlanReason.FIRST_TURN, (PREFILL,))) is None


def test_engines_that_were_tried_are_not_chosen_again() -> None:
    assert choose_decode(BOTH, without={"d"}) is None
    assert choose_prefill(BOTH, DECODE, without={"p"}) is None


def test_the_idlest_prefill_engine_is_chosen_and_a_suspect_one_only_alone() -> None:
    busy = replace(PREFILL, engine_id="busy", running=3)
    suspect = replace(PREFILL, engine_id="suspect", suspect=True)
    chosen = choose_prefill((busy, suspect), DECODE)
    assert chosen == busy
    assert choose_prefill((suspect,), DECODE) == suspect


def test_limits_are_the_callers() -> None:
    made = planned(LeaseSignal("d", 600, 1000), limits=PlanLimits(append_tokens_max=1000))
    assert made.path is TurnPath.APPEND


def test_every_miss_has_a_reason() -> None:
    assert set(REASON_OF_MISS) == set(MissReason)


def test_an_engine_without_a_sidecar_serves_alone_and_only_when_there_is_no_other() -> None:
    left = replace(DECODE, engine_id="left", retain=False, suspect=True, registered=False)
    assert planned(PlanReason.FIRST_TURN, PREFILL, left, DECODE).decode_engine_id == "d"
    assert planned(PlanReason.LEASE_LOST, PREFILL, left) == Plan(
        TurnPath.RECOMPUTE, PlanReason.ENGINE_UNREGISTERED, "left", keep=False
    )
    alone = replace(PREFILL, retain=False, suspect=True, registered=False)
    assert planned(PlanReason.LEASE_LOST, alone, DECODE) == Plan(
        TurnPath.RECOMPUTE, PlanReason.ENGINE_UNREGISTERED, "d"
    )


def test_a_draining_engine_gets_no_turn_and_its_leases_are_read() -> None:
    draining = replace(DECODE, draining=True)
    other = replace(DECODE, engine_id="other")
    assert planned(PlanReason.FIRST_TURN, PREFILL, draining, other).decode_engine_id == "other"
    made = planned(LeaseSignal("d", 10, 1000), PREFILL, draining, other)
    assert (made.path, made.decode_engine_id) == (TurnPath.READBACK, "other")
    assert plan(TurnSignals(PlanReason.FIRST_TURN, (PREFILL, draining))) is None
    alone = planned(PlanReason.FIRST_TURN, replace(PREFILL, draining=True), DECODE)
    assert alone == Plan(TurnPath.RECOMPUTE, PlanReason.NO_PREFILL_ENGINE, "d")
