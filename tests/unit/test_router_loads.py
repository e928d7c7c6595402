"""What legs teach a router of its engines: load, warmth, rates, and what their caches hold."""

from dataclasses import replace

import pytest

from kvlease.core.cost import TokenEstimate
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState
from kvlease.core.prefixes import PrefixMemory
from kvlease.core.records import Engine, EngineRole, KvLayout, LeaseRecord
from kvlease.core.signals import EngineSignal
from kvlease.core.turn import TurnReport
from kvlease.router.engines import EngineTable
from kvlease.router.loads import READ_COUNTED_S, REPLY_TOKENS, EngineLoads, LoadLimits
from kvlease.store.port import Batch, Change
from kvlease.testing.clock import ManualClock

LAYOUT = KvLayout(32, "float32", 1, 1, 1024, "layout")
P = EngineSignal("p", EngineRole.PREFILL, "layout")


def engine(engine_id: str, role: EngineRole = EngineRole.PREFILL) -> Engine:
    return Engine(Holder(engine_id, "boot"), role, "m", f"http://{engine_id}", "s:1", LAYOUT)


def test_a_prefill_leg_teaches_the_rate_of_computing_without_the_time_of_its_read() -> None:
    clock = ManualClock()
    loads = EngineLoads(clock, LoadLimits(samples_min=2))
    for _ in range(2):
        begun_s = clock.now_s()
        clock.advance(1.5)
        report = TurnReport(3000, 0, 2000, 2000, "read", 3000, read_s=0.5)
        loads.prefilled(engine("p"), "d", begun_s, report, ())
    line = loads.load(engine("p")).prefill
    assert line is not None
    assert line.seconds(1000) == pytest.approx(1.0)
    rates = loads.read_rates("layout")
    assert rates.pairs[("d", "p")].seconds(2000) == pytest.approx(0.5)
    assert rates.readback is not None
    assert rates.handover is None


def test_legs_that_overlap_do_not_make_an_engine_look_slow() -> None:
    clock = ManualClock()
    loads = EngineLoads(clock)
    begun_s = clock.now_s()
    for _ in range(3):
        clock.advance(1.0)
        loads.prefilled(engine("p"), "", begun_s, TurnReport(1000, 0, 0, 0, "none"), ())
    line = loads.load(engine("p")).prefill
    assert line is not None
    assert line.seconds(1000) == pytest.approx(1.0)


def test_prompts_and_reads_count_while_they_are_in_flight() -> None:
    loads = EngineLoads(ManualClock())
    with loads.computing("p", 500), loads.computing("p", 200), loads.reading("d", "p"):
        load = loads.load(engine("p"))
        assert (load.backlog_tokens, load.reads) == (700, 1)
        assert loads.load(engine("d", EngineRole.DECODE)).reads == 1
    load = loads.load(engine("p"))
    assert (load.backlog_tokens, load.reads) == (0, 0)


def test_turns_count_at_a_decode_engine_with_their_prompts_and_a_reply_each() -> None:
    loads = EngineLoads(ManualClock())
    decode = engine("d", EngineRole.DECODE)
    with loads.occupying("d", 1_000), loads.occupying("d", 0):
        assert loads.load(decode).running_tokens == 1_000 + 2 * REPLY_TOKENS
    assert loads.load(decode).running_tokens == 0


def test_an_engine_is_full_at_its_limit_and_sooner_while_it_warms_up() -> None:
    clock = ManualClock()
    loads = EngineLoads(clock, LoadLimits(prefill_inflight_max=10, slow_start_s=30.0))
    busy = engine("p")
    assert not loads.load(busy, running=5).full
    loads.joined("p", warm=False)
    assert loads.load(busy, running=5).warmth == pytest.approx(0.1)
    assert loads.load(busy, running=5).full
    clock.advance(18.0)
    assert loads.load(busy, running=5).warmth == pytest.approx(0.6)
    assert not loads.load(busy, running=5).full
    clock.advance(30.0)
    assert loads.load(busy, running=10).full


def test_engines_that_were_there_before_the_router_are_warm_and_those_that_join_are_not() -> None:
    table = EngineTable(ManualClock(), suspect_s=2.0)
    table.apply(Batch((Change(engine("old")),), snapshot=True))
    table.apply(Batch((Change(engine("new")),), snapshot=False))
    assert {e.engine_id: e.warmth for e in table.signals("m")} == {"old": 1.0, "new": 0.1}


def test_the_longest_beginning_that_an_engine_computed_is_expected_in_its_cache() -> None:
    memory = PrefixMemory()
    memory.remember("p", (1, 2, 3, 4))
    memory.remember("q", (1, 2))
    assert memory.cached_bytes((1, 2, 3, 4, 5), (10, 20, 30, 40, 50)) == {"p": 40, "q": 20}
    assert memory.cached_bytes((1, 9), (10, 20)) == {"p": 10, "q": 10}
    assert memory.cached_bytes((8, 9), (10, 20)) == {}


def test_prefixes_are_remembered_up_to_a_bound() -> None:
    memory = PrefixMemory(keys_max=2)
    for key in (1, 2, 3):
        memory.remember("p", (key,))
    assert memory.cached_bytes((1,), (10,)) == {}
    assert memory.cached_bytes((3,), (10,)) == {"p": 10}


def record(lease_id: int, engine_id: str, tokens: int) -> LeaseRecord:
    holder = Holder(engine_id, "boot")
    return LeaseRecord(lease_id, LeaseKind.CONVERSATION, LeaseState.HELD, holder, "t", b"c", tokens)


def test_what_an_engine_holds_is_the_sum_of_its_recorded_leases() -> None:
    loads = EngineLoads(ManualClock())
    holder = engine("d", EngineRole.DECODE)
    one, two = record(1, "d", 100), record(2, "d", 200)
    loads.apply_leases(Batch((Change(one), Change(two)), snapshot=True))
    assert loads.load(holder).held_tokens == 300
    loads.apply_leases(Batch((Change(replace(one, tokens=150)), Change(two, gone=True)), snapshot=False))
    assert loads.load(holder).held_tokens == 150
    loads.apply_leases(Batch((), snapshot=True))
    assert loads.load(holder).held_tokens == 0


def test_a_read_whose_end_nobody_tells_of_counts_for_a_while_only() -> None:
    clock = ManualClock()
    loads = EngineLoads(clock)
    with loads.reading("p", "d"):
        clock.advance(READ_COUNTED_S / 2)
        with loads.reading("p", "e"):
            assert loads.load(engine("p")).reads == 2
            clock.advance(READ_COUNTED_S / 2)
            assert loads.load(engine("p")).reads == 1
        assert loads.load(engine("p")).reads == 0
        clock.advance(READ_COUNTED_S)
    assert loads.load(engine("p")).reads == 0


def test_the_prefix_cache_of_each_engine_is_known_as_far_as_is_likely() -> None:
    loads = EngineLoads(ManualClock())
    loads.prefilled(engine("p"), "", 0.0, TurnReport(1000, 0, 0, 0, "none"), (1, 2))
    assert loads.cached_tokens((1, 2, 3), (100, 200, 300), TokenEstimate(0.5)) == {"p": 100}
    assert loads.cached_tokens((3,), (300,), TokenEstimate(0.5)) == {}
