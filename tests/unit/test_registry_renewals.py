"""Heartbeats of many sessions reach an engine as few calls, and only what a live session names is renewed."""

import asyncio
from dataclasses import dataclass, field

import pytest

from kvlease.core.errors import HolderUnreachable, QuotaExceeded
from kvlease.core.lease import MissReason
from kvlease.registry.renewals import (
    EngineDelta,
    EngineIds,
    EngineRenewals,
    Heartbeat,
    PendingBeat,
    RenewalSession,
)
from kvlease.runtime.clock import LoopClock


@dataclass
class Holder:
    """Stands for the way to one engine; answers when `open` is set."""

    open: asyncio.Event = field(default_factory=asyncio.Event)
    calls: list[tuple[list[int], float, list[str], float]] = field(default_factory=list)
    fault: Exception | None = None

    async def renew(
        self,
        engine_id: str,
        lease_ids: list[int],
        duration_s: float,
        pin_ids: list[str],
        reservation_s: float,
    ) -> dict[int, MissReason]:
        self.calls.append((lease_ids, duration_s, pin_ids, reservation_s))
        await self.open.wait()
        if self.fault is not None:
            raise self.fault
        return {lease_id: MissReason.EXPIRED for lease_id in lease_ids if lease_id >= 100}


def ids(*lease_ids: int, pins: tuple[str, ...] = ()) -> EngineIds:
    return EngineIds(dict.fromkeys(lease_ids), dict.fromkeys(pins))


async def renew(
    renewals: EngineRenewals, asked: EngineIds, duration_s: float = 20.0, *, urgent: bool = False
) -> dict[int, MissReason]:
    return await renewals.join("e", asked, duration_s, 30.0, urgent=urgent)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_comes_while_a_call_is_under_way_goes_as_one_union() -> None:
    holder = Holder()
    renewals = EngineRenewals(holder.renew, 0.0, LoopClock())
    first = asyncio.create_task(renew(renewals, ids(1)))
    await settle()
    second = asyncio.create_task(renew(renewals, ids(2, 3)))
    third = asyncio.create_task(renew(renewals, ids(3, 4, pins=("p",)), 25.0))
    await settle()
    holder.open.set()
    await asyncio.gather(first, second, third)
    assert holder.calls == [([1], 20.0, [], 30.0), ([2, 3, 4], 25.0, ["p"], 30.0)]


async def test_each_session_hears_of_its_own_misses_only() -> None:
    holder = Holder()
    holder.open.set()
    renewals = EngineRenewals(holder.renew, 0.0, LoopClock())
    beats = [
        PendingBeat(
            RenewalSession(10),
            7,
            ((frozenset(asked.lease_ids), renewals.join("e", asked, 20.0, 30.0, urgent=False)),),
        )
        for asked in (ids(1, 100), ids(2, 101))
    ]
    acks = [await beat.ack() for beat in beats]
    assert [ack.misses for ack in acks] == [{100: MissReason.EXPIRED}, {101: MissReason.EXPIRED}]
    assert len(holder.calls) == 1


@pytest.mark.parametrize("fault", [HolderUnreachable("away"), RuntimeError("a bug")])
async def test_an_unreachable_holder_is_a_miss_of_every_lease_asked_for(fault: Exception) -> None:
    holder = Holder(fault=fault)
    holder.open.set()
    renewals = EngineRenewals(holder.renew, 0.0, LoopClock())
    misses = await renew(renewals, ids(1, 2))
    assert misses == {1: MissReason.UNREACHABLE, 2: MissReason.UNREACHABLE}


async def test_an_urgent_renewal_does_not_wait_for_the_spacing() -> None:
    holder = Holder()
    holder.open.set()
    renewals = EngineRenewals(holder.renew, 3600.0, LoopClock())
    await renew(renewals, ids(1))
    waiting = asyncio.create_task(renew(renewals, ids(2)))
    await settle()
    assert len(holder.calls) == 1
    await renew(renewals, ids(3), urgent=True)
    await waiting
    assert holder.calls[1][0] == [2, 3]


async def test_closing_leaves_no_call_behind() -> None:
    holder = Holder()
    renewals = EngineRenewals(holder.renew, 0.0, LoopClock())
    waiting = asyncio.create_task(renew(renewals, ids(1)))
    await settle()
    await renewals.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def beat(*deltas: EngineDelta, full: bool = False, epoch: int = 1) -> Heartbeat:
    return Heartbeat("s", epoch, 1, full, deltas, 20.0, 30.0)


def test_deltas_add_up_and_a_full_list_replaces_them() -> None:
    session = RenewalSession(ids_max=10)
    assert session.apply(beat(EngineDelta("e", (1, 2), added_pin_ids=("p",)), full=True))
    assert session.apply(beat(EngineDelta("e", (3,), (1,), dropped_pin_ids=("p",))))
    assert list(session.engines()["e"].lease_ids) == [2, 3]
    assert not session.engines()["e"].pin_ids
    assert session.apply(beat(EngineDelta("f", (9,)), full=True, epoch=2))
    assert list(session.engines()) == ["f"]


def test_a_delta_of_another_epoch_changes_nothing() -> None:
    session = RenewalSession(ids_max=10)
    assert not session.apply(beat(EngineDelta("e", (1,))))
    assert session.apply(beat(EngineDelta("e", (1,)), full=True))
    assert not session.apply(beat(EngineDelta("e", (2,)), epoch=2))
    assert list(session.engines()["e"].lease_ids) == [1]


def test_an_engine_of_which_nothing_is_kept_is_asked_no_more() -> None:
    session = RenewalSession(ids_max=10)
    session.apply(beat(EngineDelta("e", (1,)), full=True))
    session.apply(beat(EngineDelta("e", (), (1,))))
    assert session.engines() == {}


def test_a_session_over_its_cap_is_refused() -> None:
    session = RenewalSession(ids_max=2)
    with pytest.raises(QuotaExceeded, match="renew 2 leases and pins, not 3"):
        session.apply(beat(EngineDelta("e", (1, 2, 3)), full=True))
