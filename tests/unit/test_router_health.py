"""Engines that make no progress are avoided, and come back by a probe."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from kvlease.core.records import Engine
from kvlease.router.engines import EngineTable
from kvlease.router.health import EngineHealth, HealthLimits
from kvlease.router.ports import LegError
from kvlease.runtime.clock import LoopClock
from kvlease.store.port import Batch, Change
from stubs.records import engine
from stubs.waiting import eventually

LIMITS = HealthLimits(stall_s=1.0, probe_interval_s=0.01, probe_timeout_s=0.1)


class FakeReply:
    """A body that comes piece by piece, as the test puts them; None ends it."""

    status = 200
    headers: Mapping[str, str] = {}

    def __init__(self, pieces: "asyncio.Queue[bytes | None]") -> None:
        self._pieces = pieces

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.chunks()])

    async def chunks(self) -> AsyncIterator[bytes]:
        while (piece := await self._pieces.get()) is not None:
            yield piece


class FakeEngines:
    """Answers requests at once, but those to `silent` URLs never."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.probes = 0
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._awake = asyncio.Event()

    def wake(self) -> None:
        """Silent engines answer what they have got, and all that comes."""
        self.silent.clear()
        self._awake.set()

    @asynccontextmanager
    async def call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> AsyncIterator[FakeReply]:
        probing = headers.get("X-Request-Id", "").startswith("probe-")
        self.probes += probing
        if url.partition("/v1/")[0] in self.silent:
            await self._awake.wait()
        if probing:
            pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
            pieces.put_nowait(None)
            yield FakeReply(pieces)
        else:
            yield FakeReply(self.pieces)


def one(engine_id: str) -> Engine:
    return replace(engine(engine_id), url=f"http://{engine_id}:1")


@pytest.fixture
def fakes() -> FakeEngines:
    return FakeEngines()


@pytest.fixture
def table() -> EngineTable:
    built = EngineTable(LoopClock(), suspect_s=2.0)
    built.apply(Batch((Change(one("engine-1")), Change(one("engine-2"))), snapshot=True))
    return built


@pytest.fixture
async def health(fakes: FakeEngines, table: EngineTable) -> AsyncIterator[EngineHealth]:
    built = EngineHealth(fakes, table, LoopClock(), LIMITS)
    task = asyncio.create_task(built.run())
    yield built
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def ask(health: EngineHealth, engine_id: str) -> bytes:
    async with health.call("POST", f"http://{engine_id}:1/v1/completions", {}, b"", 60.0) as reply:
        return await reply.body()


def suspects(table: EngineTable) -> set[str]:
    return {signal.engine_id for signal in table.signals("m") if signal.suspect}


async def test_requests_that_a_stalled_engine_keeps_waiting_are_given_up_and_others_are_not(
    fakes: FakeEngines, table: EngineTable, health: EngineHealth
) -> None:
    fakes.silent.add("http://engine-1:1")
    waiting = asyncio.gather(*(ask(health, "engine-1") for _ in range(3)), return_exceptions=True)
    for _ in range(2):
        fakes.pieces.put_nowait(b"x")
    fakes.pieces.put_nowait(None)
    assert await ask(health, "engine-2") == b"xx"
    async with asyncio.timeout(30):
        failures = await waiting
    assert all(isinstance(failure, LegError) and failure.sent for failure in failures)
    assert suspects(table) == {"engine-1"}


async def test_a_stalled_engine_comes_back_when_it_answers_a_probe(
    fakes: FakeEngines, table: EngineTable, health: EngineHealth
) -> None:
    fakes.silent.add("http://engine-1:1")
    with pytest.raises(LegError):
        await ask(health, "engine-1")
    await eventually(lambda: fakes.probes)
    assert suspects(table) == {"engine-1"}
    fakes.wake()
    await eventually(lambda: not suspects(table))
    fakes.pieces.put_nowait(None)
    assert await ask(health, "engine-1") == b""


async def test_an_engine_whose_client_is_slow_is_not_stalled(
    fakes: FakeEngines, table: EngineTable, health: EngineHealth
) -> None:
    fakes.pieces.put_nowait(b"x")
    async with health.call("POST", "http://engine-2:1/v1/completions", {}, b"", 60.0) as reply:
        async for _ in reply.chunks():
            # The client of engine 2 takes its time: at least as long as it takes engine 1 to be found out.
            fakes.silent.add("http://engine-1:1")
            with pytest.raises(LegError):
                await ask(health, "engine-1")
            break
    assert suspects(table) == {"engine-1"}


async def test_one_request_that_gets_on_speaks_for_all_of_its_engine(
    fakes: FakeEngines, table: EngineTable, health: EngineHealth
) -> None:
    slow = asyncio.create_task(ask(health, "engine-2"))
    fakes.silent.add("http://engine-1:1")
    stalled = asyncio.create_task(ask(health, "engine-1"))

    async def feed() -> None:
        while not stalled.done():
            async with health.call("POST", "http://engine-2:1/v1/completions", {}, b"", 60.0):
                await asyncio.sleep(0.001)

    async with asyncio.timeout(30):
        await feed()
    assert suspects(table) == {"engine-1"}
    assert not slow.done()
    slow.cancel()
    await asyncio.gather(slow, stalled, return_exceptions=True)


async def test_a_long_answer_is_waited_for_while_its_engine_answers_probes(
    fakes: FakeEngines, table: EngineTable, health: EngineHealth
) -> None:
    long = asyncio.create_task(ask(health, "engine-1"))
    await eventually(lambda: fakes.probes >= 2)
    assert not long.done()
    assert not suspects(table)
    fakes.pieces.put_nowait(b"x")
    fakes.pieces.put_nowait(None)
    assert await long == b"x"


async def test_an_engine_that_leaves_is_stalled_no_more(table: EngineTable) -> None:
    table.stall("engine-1")
    table.apply(Batch((Change(one("engine-1"), gone=True),)))
    table.apply(Batch((Change(one("engine-1")),)))
    assert not suspects(table)


async def test_leaving_early_leaves_nothing_behind(fakes: FakeEngines, health: EngineHealth) -> None:
    task = asyncio.create_task(ask(health, "engine-1"))
    await eventually(lambda: health.requests_in_flight)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert health.requests_in_flight == 0
