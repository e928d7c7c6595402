"""The heartbeat's task: beats on time, at once when woken, complete after a break."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvlease.core.errors import HolderUnreachable, KvleaseError
from kvlease.core.lease import MissReason
from kvlease.core.renewal import Beat, Belief, RenewalPolicy, RenewalTable
from kvlease.router import heartbeat as heartbeat_module
from kvlease.router.heartbeat import Heartbeat
from kvlease.router.ports import BeatAck
from kvlease.runtime.clock import LoopClock
from stubs.registry import StubRegistry, StubRenewals
from stubs.waiting import eventually

LONG_S = 3600.0


@pytest.fixture
def table() -> RenewalTable:
    return RenewalTable(RenewalPolicy())


@asynccontextmanager
async def running(table: RenewalTable, registry: StubRegistry, interval_s: float) -> AsyncIterator[Heartbeat]:
    beats = Heartbeat(table, registry, LoopClock(), interval_s)
    task = asyncio.create_task(beats.run())
    try:
        yield beats
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_beat_goes_out_at_once_when_woken(table: RenewalTable) -> None:
    registry = StubRegistry()
    async with running(table, registry, LONG_S) as beats:
        await eventually(lambda: len(registry.beats) == 1)
        table.expect(LoopClock().now_s(), 7, "d")
        beats.wake()
        await eventually(lambda: registry.confirmed == [7])
        await eventually(lambda: table.belief(LoopClock().now_s(), 7) is Belief.HELD)


async def test_beats_go_out_every_interval(table: RenewalTable) -> None:
    registry = StubRegistry()
    async with running(table, registry, 0.001):
        await eventually(lambda: len(registry.beats) >= 3)
    assert [beat.sequence for beat in registry.beats[:3]] == [1, 2, 3]
    assert [beat.full for beat in registry.beats[:3]] == [True, False, False]


async def test_a_lease_that_was_not_there_yet_is_asked_for_again_before_the_interval(
    table: RenewalTable,
) -> None:
    registry = StubRegistry()
    registry.misses = {7: MissReason.UNKNOWN}
    async with running(table, registry, LONG_S) as beats:
        table.expect(LoopClock().now_s(), 7, "d")
        beats.wake()
        await eventually(lambda: registry.confirmed == [7])
        registry.misses = {}
        await eventually(lambda: table.belief(LoopClock().now_s(), 7) is Belief.HELD)
    assert registry.confirmed == [7], "told once"


class BreakingRegistry(StubRegistry):
    """Breaks its first stream at the second beat."""

    def __init__(self, fault: Exception) -> None:
        super().__init__()
        self.streams = 0
        self.fault = fault

    @asynccontextmanager
    async def renew(self) -> AsyncIterator[StubRenewals]:
        self.streams += 1
        yield BreakingRenewals(self, self.fault, breaks=self.streams == 1)


class BreakingRenewals(StubRenewals):
    def __init__(self, registry: StubRegistry, fault: Exception, *, breaks: bool) -> None:
        super().__init__(registry)
        self._fault = fault
        self._left = 1 if breaks else 1_000_000

    async def send(self, beat: Beat) -> None:
        if self._left == 0:
            raise self._fault
        self._left -= 1
        await super().send(beat)


@pytest.mark.parametrize("fault", [HolderUnreachable("broken"), RuntimeError("a bug")])
async def test_a_broken_stream_is_opened_again_with_a_complete_beat(
    table: RenewalTable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Exception
) -> None:
    monkeypatch.setattr(heartbeat_module, "RECONNECT_S", 0.0)
    registry = BreakingRegistry(fault)
    table.expect(LoopClock().now_s(), 7, "d")
    async with running(table, registry, 0.001):
        await eventually(lambda: len(registry.beats) >= 2)
    first, second = registry.beats[:2]
    assert (second.full, second.epoch) == (True, first.epoch + 1)
    assert registry.confirmed[:2] == [7, 7]
    told = {getattr(record, "reason", None) for record in caplog.records}
    assert told == ({"the registry does not answer: broken"} if isinstance(fault, KvleaseError) else {None})


class LingeringRegistry(StubRegistry):
    """Its stream breaks at once, and takes its time to end.

    Attributes:
        ending: the stream is being ended.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ending = asyncio.Event()

    @asynccontextmanager
    async def renew(self) -> AsyncIterator[StubRenewals]:
        yield LingeringRenewals(self)


class LingeringRenewals(StubRenewals):
    def __init__(self, registry: LingeringRegistry) -> None:
        super().__init__(registry)
        self._ending = registry.ending
        self._received = asyncio.Event()

    async def send(self, beat: Beat) -> None:
        await self._received.wait()
        raise HolderUnreachable("broken")

    async def acks(self) -> AsyncIterator[BeatAck]:
        try:
            self._received.set()
            await asyncio.Event().wait()
            yield BeatAck(0)
        finally:
            self._ending.set()
            await asyncio.sleep(0.01)


async def test_a_heartbeat_that_is_told_to_stop_while_a_broken_stream_ends_stops(table: RenewalTable) -> None:
    registry = LingeringRegistry()
    task = asyncio.create_task(Heartbeat(table, registry, LoopClock(), LONG_S).run())
    await registry.ending.wait()
    task.cancel()
    _, running = await asyncio.wait({task}, timeout=10.0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not running


class SilentRegistry(StubRegistry):
    """Answers no beat of its first stream."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = 0

    @asynccontextmanager
    async def renew(self) -> AsyncIterator[StubRenewals]:
        self.streams += 1
        yield SilentRenewals(self) if self.streams == 1 else StubRenewals(self)


class SilentRenewals(StubRenewals):
    async def acks(self) -> AsyncIterator[BeatAck]:
        await asyncio.Event().wait()
        yield BeatAck(0)


async def test_a_registry_that_answers_no_beat_is_left_before_its_leases_end(
    table: RenewalTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_module, "RECONNECT_S", 0.0)
    monkeypatch.setattr(heartbeat_module, "SILENCE_MAX_S", 0.01)
    registry = SilentRegistry()
    table.expect(LoopClock().now_s(), 7, "d")
    async with running(table, registry, LONG_S):
        await eventually(lambda: table.belief(LoopClock().now_s(), 7) is Belief.HELD)
    assert [beat.full for beat in registry.beats[:2]] == [True, True]


def test_a_registry_may_fall_silent_and_no_belief_in_a_lease_ends() -> None:
    policy = RenewalPolicy()
    left_after_s = policy.interval_s + heartbeat_module.SILENCE_MAX_S + heartbeat_module.RECONNECT_S
    assert left_after_s < 0.8 * policy.duration_s
