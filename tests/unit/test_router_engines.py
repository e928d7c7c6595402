"""The engines that a router knows: those that are registered, and the last resort."""

from dataclasses import replace

from kvlease.core.ids import Holder
from kvlease.core.records import Engine, EngineRole, KvLayout
from kvlease.router.engines import UNREGISTERED_MAX, EngineTable
from kvlease.store.port import Batch, Change
from kvlease.testing.clock import ManualClock

LAYOUT = KvLayout(32, "float32", 1, 1, 1024, "layout")


def engine(engine_id: str, url: str = "http://d:1", role: EngineRole = EngineRole.DECODE) -> Engine:
    return Engine(
        holder=Holder(engine_id, "boot", 1),
        role=role,
        model="m",
        url=url,
        sidecar_address="d:2",
        layout=LAYOUT,
        vllm_version="0",
        total_blocks=8,
    )


def comes(*engines: Engine, snapshot: bool = False) -> Batch[Engine]:
    return Batch(tuple(Change(one, gone=False) for one in engines), snapshot=snapshot)


def goes(one: Engine) -> Batch[Engine]:
    return Batch((Change(one, gone=True),), snapshot=False)


def test_an_engine_whose_record_is_gone_serves_without_leases_for_a_while() -> None:
    clock = ManualClock()
    table = EngineTable(clock, suspect_s=2.0, unregistered_s=10.0)
    table.apply(comes(engine("d")))
    table.apply(goes(engine("d")))
    (signal,) = table.signals("m")
    assert (signal.registered, signal.retain, signal.suspect) == (False, False, True)
    assert table.get("d") == engine("d")
    assert not table.holds(engine("d").holder)
    assert table.all() == []
    clock.advance(10.0)
    assert table.signals("m") == ()
    assert table.get("d") is None


def test_an_engine_that_a_snapshot_lacks_is_the_last_resort_too() -> None:
    table = EngineTable(ManualClock(), suspect_s=2.0)
    table.apply(comes(engine("d"), engine("e", "http://e:1")))
    table.apply(comes(engine("e", "http://e:1"), snapshot=True))
    assert {signal.engine_id: signal.registered for signal in table.signals("m")} == {"e": True, "d": False}


def test_an_engine_that_registers_again_is_as_good_as_before() -> None:
    table = EngineTable(ManualClock(), suspect_s=2.0)
    table.apply(comes(engine("d")))
    table.apply(goes(engine("d")))
    table.apply(comes(engine("d")))
    (signal,) = table.signals("m")
    assert (signal.registered, signal.retain, signal.suspect) == (True, True, False)


def test_whoever_registers_at_an_address_replaces_the_engine_that_was_there() -> None:
    table = EngineTable(ManualClock(), suspect_s=2.0)
    table.apply(comes(engine("d")))
    table.apply(goes(engine("d")))
    other_rank = replace(engine("r"), data_parallel_rank=1)
    table.apply(comes(other_rank))
    assert {signal.engine_id for signal in table.signals("m")} == {"d", "r"}
    table.apply(comes(engine("successor")))
    assert {signal.engine_id for signal in table.signals("m")} == {"r", "successor"}


def test_engines_that_left_are_remembered_up_to_a_bound() -> None:
    table = EngineTable(ManualClock(), suspect_s=2.0)
    engines = [engine(f"d{number}", f"http://d{number}:1") for number in range(UNREGISTERED_MAX + 1)]
    table.apply(comes(*engines))
    for one in engines:
        table.apply(goes(one))
    assert len(table.signals("m")) == UNREGISTERED_MAX
    assert table.get("d0") is None
