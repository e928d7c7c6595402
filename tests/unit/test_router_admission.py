"""Turns are let in while there is room; the others wait in turn, and are told when to try again."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from kvlease.core.ids import Holder
from kvlease.core.records import Engine, EngineRole, KvLayout
from kvlease.router.admission import Admission, AdmissionLimits, Overloaded
from kvlease.router.engines import EngineTable
from kvlease.router.loads import EngineLoads, LoadLimits
from kvlease.router.tenancy import Allowance, TenancyByCredential
from kvlease.runtime.clock import LoopClock
from kvlease.store.port import Batch, Change
from stubs.waiting import eventually

LAYOUT = KvLayout(32, "float32", 1, 1, 1024, "layout")


class Tenants(TenancyByCredential):
    def __init__(self, **allowances: Allowance) -> None:
        self._allowances = allowances

    def allowance(self, tenant: str) -> Allowance:
        return self._allowances.get(tenant, Allowance())


def admission(
    inflight_max: int = 1, queue_max: int = 10, queue_wait_s: float = 20.0, **tenants: Allowance
) -> Admission:
    clock = LoopClock()
    table = EngineTable(clock, 2.0, loads=EngineLoads(clock, LoadLimits(decode_inflight_max=inflight_max)))
    engine = Engine(Holder("d", "boot"), EngineRole.DECODE, "m", "http://d", "s:1", LAYOUT)
    table.apply(Batch((Change(engine),), snapshot=True))
    return Admission(table, Tenants(**tenants), clock, AdmissionLimits(queue_max, queue_wait_s))


async def turn(gate: Admission, order: list[str], tenant: str, name: str) -> None:
    async with gate.admitted(tenant, "m"):
        order.append(name)
        await asyncio.sleep(0)


async def refused(gate: Admission, tenant: str = "t") -> Overloaded:
    with pytest.raises(Overloaded) as refusal:
        async with gate.admitted(tenant, "m"):
            pass
    return refusal.value


async def test_without_a_limit_nobody_waits() -> None:
    gate = admission(inflight_max=0)
    async with AsyncExitStack() as stack:
        for _ in range(100):
            await stack.enter_async_context(gate.admitted("t", "m"))
        assert gate.waiting == 0


async def test_a_turn_beyond_the_limit_waits_until_another_one_ends_and_tenants_take_turns() -> None:
    gate, order = admission(), list[str]()
    async with asyncio.TaskGroup() as tasks, gate.admitted("first", "m"):
        for number in range(3):
            tasks.create_task(turn(gate, order, "loud", f"loud {number}"))
        await eventually(lambda: gate.waiting == 3)
        tasks.create_task(turn(gate, order, "quiet", "quiet 0"))
        await eventually(lambda: gate.waiting == 4)
        assert order == []
    assert set(order[:2]) == {"loud 0", "quiet 0"}
    assert len(order) == 4
    assert gate.waiting == 0


async def test_a_full_queue_refuses_with_a_time_to_try_again() -> None:
    gate, order = admission(queue_max=2), list[str]()
    async with asyncio.TaskGroup() as tasks, gate.admitted("t", "m"):
        tasks.create_task(turn(gate, order, "a", "a"))
        await eventually(lambda: gate.waiting == 1)
        own = await refused(gate, "a")
        assert (own.status, own.code) == (429, "tenant_queue_full")
        tasks.create_task(turn(gate, order, "b", "b"))
        await eventually(lambda: gate.waiting == 2)
        full = await refused(gate, "c")
        assert (full.status, full.code) == (503, "queue_full")
        assert full.retry_after_s > 0
    assert sorted(order) == ["a", "b"]


async def test_a_turn_that_waited_too_long_is_refused() -> None:
    gate = admission(queue_wait_s=0.01)
    async with gate.admitted("t", "m"):
        late = await refused(gate)
    assert (late.status, late.code) == (503, "queue_timeout")
    assert gate.waiting == 0


async def test_a_tenant_has_no_more_turns_in_flight_than_it_may() -> None:
    gate = admission(inflight_max=0, capped=Allowance(running_max=1))
    async with gate.admitted("capped", "m"):
        own = await refused(gate, "capped")
        assert (own.status, own.code) == (429, "tenant_running_max")
        async with gate.admitted("other", "m"):
            pass
    async with gate.admitted("capped", "m"):
        pass


async def test_a_client_that_leaves_the_queue_leaves_its_place_to_others() -> None:
    gate, order = admission(), list[str]()
    async with asyncio.TaskGroup() as tasks, gate.admitted("t", "m"):
        leaver = asyncio.create_task(turn(gate, order, "leaver", "leaver"))
        await eventually(lambda: gate.waiting == 1)
        tasks.create_task(turn(gate, order, "stayer", "stayer"))
        await eventually(lambda: gate.waiting == 2)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        assert gate.waiting == 1
    assert order == ["stayer"]
    async with gate.admitted("t", "m"):
        assert gate.waiting == 0
