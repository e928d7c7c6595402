"""The planner: which path a turn takes, why, and on which engines."""

from dataclasses import replace

import pytest

from kvlease.core.lease import MissReason
from kvlease.core.planning import Plan, choose_decode, choose_prefill, plan, with_decode_anew
from kvlease.core.pricing import Price
from kvlease.core.rates import Line
from kvlease.core.records import EngineRole
from kvlease.core.signals import (
    REASON_OF_MISS,
    EngineSignal,
    LeaseSignal,
    PlanLimits,
    PlanReason,
    ReadRates,
    TurnPath,
    TurnSignals,
)

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


@pytest.mark.parametrize("lease", [PlanReason.FIRST_TURN, LeaseSignal("d", 100, 1000)])
def test_a_prompt_that_has_to_be_computed_whole_is_left_to_the_decode_engine_and_kept(
    lease: LeaseSignal | PlanReason,
) -> None:
    assert planned(lease, whole_prompt=True) == Plan(TurnPath.RECOMPUTE, PlanReason.PROMPT_LOGPROBS, "d")


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
    assert (made.path, made.reason) == (TurnPath.READBACK, PlanReason.DRAINING)
    assert made.decode_engine_id == "other"
    assert plan(TurnSignals(PlanReason.FIRST_TURN, (PREFILL, draining))) is None
    alone = planned(PlanReason.FIRST_TURN, replace(PREFILL, draining=True), DECODE)
    assert alone == Plan(TurnPath.RECOMPUTE, PlanReason.NO_PREFILL_ENGINE, "d")


def test_an_overloaded_holder_is_left_for_one_with_less_than_half_its_load() -> None:
    holder = replace(DECODE, running=128)
    idle, busy = replace(DECODE, engine_id="idle", running=60), replace(DECODE, engine_id="busy", running=70)
    made = planned(LeaseSignal("d", 10, 1000), PREFILL, holder, idle)
    assert (made.path, made.reason) == (TurnPath.READBACK, PlanReason.DECODE_OVERLOADED)
    assert made.decode_engine_id == "idle"
    assert planned(LeaseSignal("d", 10, 1000), PREFILL, holder, busy).decode_engine_id == "d"


def test_of_equally_loaded_decode_engines_the_one_that_holds_least_is_chosen() -> None:
    holds_more = replace(DECODE, engine_id="a", held_tokens=1000)
    assert planned(PlanReason.FIRST_TURN, PREFILL, holds_more, DECODE).decode_engine_id == "d"


def test_an_engine_that_has_just_joined_gets_a_smaller_share() -> None:
    joined = replace(DECODE, engine_id="a", running_tokens=200, warmth=0.1)
    for running_tokens, chosen in ((2_000, "d"), (4_000, "a")):
        other = replace(DECODE, running_tokens=running_tokens)
        made = planned(PlanReason.FIRST_TURN, PREFILL, joined, other, prompt_tokens=100)
        assert made.decode_engine_id == chosen


def test_the_decode_engine_whose_turns_need_least_of_its_room_is_chosen() -> None:
    many_short = replace(DECODE, engine_id="short", running=30, running_tokens=15_000, kv_tokens=200_000)
    few_long = replace(DECODE, engine_id="long", running=2, running_tokens=90_000, kv_tokens=200_000)
    assert planned(PlanReason.FIRST_TURN, PREFILL, few_long, many_short).decode_engine_id == "short"
    large = replace(few_long, kv_tokens=2_000_000)
    assert planned(PlanReason.FIRST_TURN, PREFILL, large, many_short).decode_engine_id == "long"
    unknown = (replace(many_short, kv_tokens=0), replace(few_long, kv_tokens=0))
    assert planned(PlanReason.FIRST_TURN, PREFILL, *unknown).decode_engine_id == "short"


@pytest.mark.parametrize(("running_tokens", "chosen"), [(70_000, "d"), (70_001, "idle")])
def test_a_conversation_of_which_nothing_is_held_leaves_an_engine_without_room(
    running_tokens: int, chosen: str
) -> None:
    idle = replace(DECODE, engine_id="idle", kv_tokens=100_000)
    last = replace(DECODE, running_tokens=running_tokens, kv_tokens=100_000)
    lost = planned(
        PlanReason.LEASE_EXPIRED, PREFILL, idle, last, preferred_engine_id="d", prompt_tokens=10_000
    )
    assert lost.decode_engine_id == chosen
    held = planned(LeaseSignal("d", 10, 1000), PREFILL, idle, last, prompt_tokens=10_000)
    assert held.decode_engine_id == "d"


def test_once_a_prompt_is_computed_its_decode_engine_is_the_one_with_most_room_by_then() -> None:
    other = replace(DECODE, engine_id="other")
    signals = TurnSignals(PlanReason.FIRST_TURN, (PREFILL, DECODE, other), prompt_tokens=100)
    made = plan(signals)
    assert made is not None
    assert made.decode_engine_id == "d"
    filled = replace(DECODE, running_tokens=5_000)
    assert with_decode_anew(made, signals, (PREFILL, filled, other)) == replace(
        made, decode_engine_id="other"
    )
    assert with_decode_anew(made, signals, (PREFILL, DECODE, other)) == made
    for unfit in (
        replace(other, layout_hash="x"),
        replace(other, retain=False),
        replace(other, draining=True),
    ):
        assert with_decode_anew(made, signals, (PREFILL, filled, unfit)) == made
        # The prefill engine is unknown for a moment, and what it computed waits there.
        assert with_decode_anew(made, signals, (filled, unfit)) == made
    assert with_decode_anew(made, signals, ()) == made


def test_an_engine_that_holds_a_lease_of_the_turn_keeps_it_when_the_prompt_is_computed() -> None:
    signals = TurnSignals(LeaseSignal("d", 5_000, 1000), (PREFILL, DECODE))
    made = plan(signals)
    assert made is not None
    assert made.path is TurnPath.READBACK
    filled = replace(DECODE, running_tokens=5_000)
    other = replace(DECODE, engine_id="other")
    assert with_decode_anew(made, signals, (PREFILL, filled, other)) == made


def test_a_full_engine_is_chosen_only_when_all_are_full() -> None:
    full = replace(DECODE, engine_id="full", full=True)
    assert planned(LeaseSignal("full", 10, 1000), PREFILL, full, DECODE).decode_engine_id == "d"
    assert planned(LeaseSignal("full", 10, 1000), PREFILL, full).decode_engine_id == "full"


def test_the_prefill_engine_that_is_soonest_done_is_chosen() -> None:
    idle = replace(PREFILL, engine_id="idle")
    cached = replace(PREFILL, engine_id="cached", cached_tokens=4000, backlog_tokens=1000, running=1)
    assert choose_prefill((idle, cached), DECODE, prompt_tokens=4096) == cached
    assert choose_prefill((idle, cached), DECODE, prompt_tokens=512) == idle
    slow = replace(idle, prefill=Line(0.0, 1e-3, 50))
    fast = replace(cached, cached_tokens=0, prefill=Line(0.0, 1e-5, 50))
    assert choose_prefill((slow, fast), DECODE, prompt_tokens=512) == fast


# --- measured rates -----------------------------------------------------------------------------------------

PER_TOKEN = Line(0.0, 1e-4, 100)
MEASURED = (replace(PREFILL, prefill=PER_TOKEN), replace(DECODE, prefill=PER_TOKEN))
READS = ReadRates(readback=Line(0.01, 1e-5, 100), handover=Line(0.01, 1e-5, 100))


def priced(suffix_tokens: int, *engines: EngineSignal, **signals: object) -> Plan:
    lease = LeaseSignal("d", suffix_tokens, tokens=8000)
    return planned(lease, *(engines or MEASURED), **({"rates": READS} | signals))


def test_the_fastest_path_by_measured_rates_is_taken_whatever_the_thresholds_say() -> None:
    short, long = priced(600), priced(4000)
    assert (short.path, short.reason) == (TurnPath.APPEND, PlanReason.FASTEST)
    assert [price.path for price in short.prices] == list(TurnPath)
    assert short.prices[0] == Price(TurnPath.APPEND, compute_s=pytest.approx(0.06))
    # The same suffix costs a decode engine no more than a prefill engine, but READs come on top.
    assert long.path is TurnPath.APPEND
    crowded = replace(MEASURED[1], running=100)
    assert priced(600, MEASURED[0], crowded).path is TurnPath.READBACK


def test_a_slow_link_makes_recompute_the_fastest_path() -> None:
    crowded = replace(MEASURED[1], running=127)
    slow = ReadRates(readback=Line(2.0, 1e-3, 100), handover=READS.handover)
    assert priced(1000, MEASURED[0], crowded, rates=slow).path is TurnPath.RECOMPUTE
    fast_pair = replace(slow, pairs={("d", "p"): READS.readback})
    assert priced(1000, MEASURED[0], crowded, rates=fast_pair).path is TurnPath.READBACK


def test_the_wait_at_the_prefill_engine_is_part_of_its_paths() -> None:
    crowded = replace(MEASURED[1], running=20)
    queued = replace(MEASURED[0], backlog_tokens=20_000)
    assert priced(600, MEASURED[0], crowded).path is TurnPath.READBACK
    assert priced(600, queued, crowded).path is TurnPath.APPEND


@pytest.mark.parametrize("unknown", ["prefill", "decode", "readback", "handover", "lease"])
def test_thresholds_decide_until_every_rate_has_enough_samples(unknown: str) -> None:
    few = Line(0.0, 1e-9, 31)
    engines = [
        replace(MEASURED[0], prefill=few) if unknown == "prefill" else MEASURED[0],
        replace(MEASURED[1], prefill=few) if unknown == "decode" else MEASURED[1],
    ]
    rates = READS if unknown not in ("readback", "handover") else replace(READS, **{unknown: few})
    tokens = 0 if unknown == "lease" else 8000
    made = planned(LeaseSignal("d", 600, tokens), *engines, rates=rates)
    assert (made.path, made.reason, made.prices) == (TurnPath.READBACK, PlanReason.LONG_SUFFIX, ())


def test_a_conversation_keeps_its_path_until_another_one_is_clearly_faster() -> None:
    decode = replace(MEASURED[1], running=8)
    fresh = priced(800, MEASURED[0], decode)
    assert (fresh.path, fresh.reason) == (TurnPath.APPEND, PlanReason.FASTEST)
    kept = priced(800, MEASURED[0], decode, last_path=TurnPath.READBACK)
    assert kept.path is TurnPath.APPEND
    near = replace(MEASURED[1], running=16)
    assert priced(800, MEASURED[0], near).path is TurnPath.READBACK
    last = priced(800, MEASURED[0], near, last_path=TurnPath.APPEND)
    assert (last.path, last.reason) == (TurnPath.APPEND, PlanReason.STEADY)


def test_recomputing_once_is_no_reason_to_recompute_again() -> None:
    waits = replace(MEASURED[0], backlog_tokens=500_000)
    busy = replace(MEASURED[1], running=128)
    made = priced(800, waits, busy, last_path=TurnPath.RECOMPUTE)
    prices = {price.path: price.total_s for price in made.prices}
    assert prices[TurnPath.READBACK] > 0.8 * prices[TurnPath.RECOMPUTE]
    assert (made.path, made.reason) == (TurnPath.READBACK, PlanReason.FASTEST)


@pytest.mark.parametrize("capped", ["p", "d"])
def test_no_lease_is_read_while_an_engine_is_at_its_cap_of_reads(capped: str) -> None:
    engines = [replace(e, reads=16 if e.engine_id == capped else 15) for e in BOTH]
    made = planned(LeaseSignal("d", None, 8000), *engines)
    assert (made.path, made.reason) == (TurnPath.RECOMPUTE, PlanReason.READS_CAPPED)
    assert planned(LeaseSignal("d", 10, 8000), *engines).path is TurnPath.APPEND


def test_a_turn_that_may_not_be_kept_is_not() -> None:
    assert planned(PlanReason.REUSE_OFF, keep=False) == Plan(
        TurnPath.RECOMPUTE, PlanReason.REUSE_OFF, "d", "p", keep=False
    )


# --- an overloaded prefill engine ---------------------------------------------------------------------------

QUEUED = replace(MEASURED[0], backlog_tokens=50_000, running=5)
ROOMY = replace(MEASURED[1], kv_tokens=200_000)


def first_turn(*engines: EngineSignal, **signals: object) -> Plan:
    return planned(PlanReason.FIRST_TURN, *engines, **({"rates": READS, "prompt_tokens": 8_000} | signals))


def test_a_decode_engine_that_would_be_done_before_a_prefill_engine_begins_computes_the_prompt_alone() -> (
    None
):
    made = first_turn(QUEUED, ROOMY)
    assert (made.path, made.reason) == (TurnPath.RECOMPUTE, PlanReason.PREFILL_OVERLOADED)
    assert (made.decode_engine_id, made.prefill_engine_id, made.keep) == ("d", "", True)
    handed, alone = made.prices
    assert (handed.wait_s, handed.alone, alone.ttft_s, alone.alone) == (
        pytest.approx(5.0),
        False,
        pytest.approx(0.8),
        True,
    )


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (MEASURED[0], ROOMY),
        (replace(QUEUED, backlog_tokens=7_000), ROOMY),
        (QUEUED, replace(ROOMY, backlog_tokens=50_000)),
        (QUEUED, replace(ROOMY, running=12)),
        (QUEUED, replace(ROOMY, running_tokens=153_000)),
        (QUEUED, replace(ROOMY, kv_tokens=0)),
        (replace(QUEUED, prefill=None), ROOMY),
        (replace(QUEUED, prefill=replace(PER_TOKEN, samples=31)), ROOMY),
    ],
    ids=[
        "idle",
        "soon free",
        "busy too",
        "streams",
        "no room",
        "unknown room",
        "unknown rate",
        "few samples",
    ],
)
def test_else_a_prefill_engine_computes_it(prefill: EngineSignal, decode: EngineSignal) -> None:
    made = first_turn(prefill, decode)
    assert (made.path, made.reason, made.prefill_engine_id) == (
        TurnPath.RECOMPUTE,
        PlanReason.FIRST_TURN,
        "p",
    )


def test_a_decode_engine_computes_no_prompt_alone_where_its_streams_shall_not_wait() -> None:
    made = first_turn(QUEUED, ROOMY, limits=PlanLimits(decode_alone=False))
    assert (made.reason, made.prefill_engine_id) == (PlanReason.FIRST_TURN, "p")


def test_a_decode_engine_that_has_computed_nothing_yet_is_thought_as_fast_as_a_prefill_engine() -> None:
    assert first_turn(QUEUED, replace(ROOMY, prefill=None)).reason is PlanReason.PREFILL_OVERLOADED
    slow = replace(ROOMY, prefill=Line(0.0, 1e-3, 100))
    assert first_turn(QUEUED, slow).reason is PlanReason.FIRST_TURN


def test_those_who_come_after_a_turn_to_a_prefill_engine_are_as_many_as_it_finds_there() -> None:
    few, many = (priced(4000, replace(MEASURED[0], running=n), MEASURED[1]) for n in (0, 10))
    assert [price.delay_s for price in few.prices] == [0.0, 0.0, 0.0]
    assert [price.delay_s for price in many.prices] == pytest.approx([0.0, 4.0, 12.0])


@pytest.mark.parametrize(
    ("backlog_tokens", "running", "samples_min", "path"),
    [
        (4_000, 2, 32, TurnPath.READBACK),
        (4_001, 2, 32, TurnPath.APPEND),
        (4_001, 1, 32, TurnPath.READBACK),
        (4_001, 2, 0, TurnPath.READBACK),
    ],
    ids=["done as soon", "done sooner", "more wait", "thresholds only"],
)
def test_before_rates_are_known_a_long_suffix_is_appended_while_prefill_engines_have_more_to_compute(
    backlog_tokens: int, running: int, samples_min: int, path: TurnPath
) -> None:
    queued = replace(PREFILL, backlog_tokens=backlog_tokens, running=running)
    busy = replace(DECODE, backlog_tokens=1_000, running=2)
    limits = PlanLimits(samples_min=samples_min)
    made = planned(LeaseSignal("d", 3_000, tokens=8_000), queued, busy, limits=limits)
    assert made.path is path
    assert (made.reason is PlanReason.PREFILL_OVERLOADED) == (path is TurnPath.APPEND)
