"""Whether engines make progress: one that answers health checks may serve nobody all the same.

An engine is stalled when requests wait for it, no byte of any of them has come for a bound, and it does not answer a
probe either: a completion of one token. (A long answer that is no stream gives no byte until it is whole.) The
requests that wait are given up, so that they can be served elsewhere; the engine gets no others while there is a
choice, and comes back when it answers a probe.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from types import TracebackType

from kvlease.core.clock import Clock
from kvlease.core.records import Engine
from kvlease.router.engines import RANK_HEADER, EngineTable
from kvlease.router.headers import CLIENTS_CREDENTIALS, EngineCredentials, engine_headers
from kvlease.router.ports import EnginePort, EngineReply, LegError

CHECKS_PER_STALL = 8
CHECK_INTERVAL_MAX_S = 1.0
PROBE_PATH = "/v1/completions"

log = logging.getLogger(__name__)
Address = tuple[str, str]
"""Base URL and data-parallel rank: an engine, whatever it registered as."""


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """Bounds of progress.

    Attributes:
        stall_s: an engine that gives no byte for this long, though requests wait, is stalled.
        probe_interval_s: how often a stalled engine is probed.
        probe_timeout_s: bound of one probe.
    """

    stall_s: float = 60.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 5.0


@dataclass(slots=True)
class _Seat:
    """The requests of one engine.

    Attributes:
        progress_s: when a byte came last.
        waiting: the requests that wait for bytes, and since when. One whose client is slow is not among them.
    """

    progress_s: float
    waiting: dict["_WatchedCall", float] = field(default_factory=dict["_WatchedCall", float])
    users: int = 0

    def is_stalled(self, now_s: float, stall_s: float) -> bool:
        """Whether requests wait, and nothing has come of any of them for so long."""
        oldest_s = min(self.waiting.values(), default=now_s)
        return now_s - max(oldest_s, self.progress_s) >= stall_s


class EngineHealth:
    """An `EnginePort` that watches the one below; `run` acts on what it sees."""

    def __init__(
        self,
        port: EnginePort,
        engines: EngineTable,
        clock: Clock,
        limits: HealthLimits,
        credentials: EngineCredentials = CLIENTS_CREDENTIALS,
    ) -> None:
        self._port = port
        self._engines = engines
        self._clock = clock
        self._limits = limits
        self._credentials = credentials
        self._seats: dict[Address, _Seat] = {}

    @property
    def requests_in_flight(self) -> int:
        """Requests at all engines."""
        return sum(seat.users for seat in self._seats.values())

    def call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> AbstractAsyncContextManager[EngineReply]:
        """Sends a request. `LegError` also when the engine stalls."""
        address = _base(url), headers.get(RANK_HEADER, "")
        inner = self._port.call(method, url, headers, body, timeout_s)
        return _WatchedCall(self, inner, address, self._clock)

    def take_seat(self, address: Address) -> _Seat:
        """A request to an engine begins; ends with `leave_seat`."""
        seat = self._seats.get(address)
        if seat is None:
            seat = self._seats[address] = _Seat(self._clock.now_s())
        seat.users += 1
        return seat

    def leave_seat(self, address: Address, seat: _Seat) -> None:
        """A request to an engine is over."""
        seat.users -= 1
        if not seat.users:
            del self._seats[address]

    async def run(self) -> None:
        """Takes stalled engines out of rotation and probes them until cancelled."""
        interval_s = min(CHECK_INTERVAL_MAX_S, self._limits.stall_s / CHECKS_PER_STALL)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._probe_stalled())
            while True:
                await asyncio.sleep(interval_s)
                await self._check()

    # --- inside -------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        """Asks engines of which nothing comes for one token; those that do not answer are stalled."""
        if not self._seats:
            return
        silent = [engine for engine in self._engines.all() if self._silent_seat(engine) is not None]
        await asyncio.gather(*(self._ask_or_give_up(engine) for engine in silent))

    def _silent_seat(self, engine: Engine) -> _Seat | None:
        """The engine's seat when nothing has come for too long."""
        seat = self._seats.get((engine.url, self._engines.headers(engine).get(RANK_HEADER, "")))
        stalled = seat is not None and seat.is_stalled(self._clock.now_s(), self._limits.stall_s)
        return seat if stalled else None

    async def _ask_or_give_up(self, engine: Engine) -> None:
        answered, engine_id = await self._answers(engine), engine.holder.engine_id
        seat = self._silent_seat(engine)
        if seat is None:
            return
        if answered:
            seat.progress_s = self._clock.now_s()
            return
        log.warning("engine stalls", extra={"engine_id": engine_id, "waiting": len(seat.waiting)})
        self._engines.stall(engine_id)
        for request in seat.waiting:
            request.give_up()
        seat.waiting.clear()

    async def _probe_stalled(self) -> None:
        while True:
            await asyncio.sleep(self._limits.probe_interval_s)
            stalled = [engine for engine in self._engines.all() if self._engines.is_stalled(engine)]
            await asyncio.gather(*(self._probe(engine) for engine in stalled))

    async def _probe(self, engine: Engine) -> None:
        if await self._answers(engine):
            log.info("engine answers again", extra={"engine_id": engine.holder.engine_id})
            self._engines.recover(engine.holder.engine_id)

    async def _answers(self, engine: Engine) -> bool:
        """Asks for one token; any answer that is no fault of the engine's is progress."""
        timeout_s = self._limits.probe_timeout_s
        headers = {
            **engine_headers((), f"probe-{engine.holder.engine_id}", self._credentials),
            **self._engines.headers(engine),
        }
        body = json.dumps({"model": engine.model, "prompt": "x", "max_tokens": 1, "temperature": 0}).encode()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._port.call("POST", engine.url + PROBE_PATH, headers, body, timeout_s) as reply,
            ):
                await reply.body()
                return reply.status < 500
        except (LegError, TimeoutError):
            return False


class _WatchedCall(AbstractAsyncContextManager[EngineReply]):
    """One request, which can be given up while it waits for bytes. Also its answer: each byte of it is progress.

    Giving up cancels the task that waits, and only turns that cancellation into an error, as a timeout does.
    """

    __slots__ = (
        "_address",
        "_cancelling",
        "_given_up",
        "_health",
        "_inner",
        "_now_s",
        "_reply",
        "_seat",
        "_task",
        "headers",
        "status",
    )

    def __init__(
        self,
        health: EngineHealth,
        inner: AbstractAsyncContextManager[EngineReply],
        address: Address,
        clock: Clock,
    ) -> None:
        self._health = health
        self._now_s = clock.now_s
        self._inner = inner
        self._address = address
        self._seat: _Seat | None = None
        self._reply: EngineReply | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._given_up = False
        self.status = 0
        self.headers: Mapping[str, str] = {}

    async def __aenter__(self) -> EngineReply:
        self._seat = self._health.take_seat(self._address)
        self._task = asyncio.current_task()
        self._cancelling = self._task.cancelling() if self._task is not None else 0
        self.wait()
        try:
            self._reply = await self._inner.__aenter__()
        except BaseException as error:
            self._leave()
            if self._was_given_up(error):
                raise LegError("the engine makes no progress", sent=True) from error
            raise
        self.progress()
        self.status, self.headers = self._reply.status, self._reply.headers
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._inner.__aexit__(kind, error, traceback)
        finally:
            self._leave()
        if self._was_given_up(error):
            raise LegError("the engine makes no progress", sent=True) from error

    def give_up(self) -> None:
        """Ends the wait with a `LegError`."""
        if self._task is not None and not self._given_up:
            self._given_up = True
            self._task.cancel()

    async def body(self) -> bytes:
        """The whole body."""
        if self._reply is None:
            return b""
        self.wait()
        body = await self._reply.body()
        self.progress()
        return body

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if self._reply is None:
            raise LegError("there is no answer yet", sent=True)
        return _WatchedChunks(self, self._reply.chunks())

    def wait(self) -> None:
        """Bytes are waited for from here on."""
        if self._seat is not None:
            self._seat.waiting[self] = self._now_s()

    def progress(self) -> None:
        """Bytes came."""
        if self._seat is not None:
            self._seat.waiting.pop(self, None)
            self._seat.progress_s = self._now_s()

    def _leave(self) -> None:
        if self._seat is not None:
            self._seat.waiting.pop(self, None)
            self._health.leave_seat(self._address, self._seat)

    def _was_given_up(self, error: BaseException | None) -> bool:
        """Whether the cancellation is ours alone."""
        if not self._given_up or self._task is None:
            return False
        return self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError)


class _WatchedChunks(AsyncIterator[bytes]):
    """A body as it comes. A class, not a generator: a loop keeps account of those."""

    __slots__ = ("_call", "_inner")

    def __init__(self, call: _WatchedCall, inner: AsyncIterator[bytes]) -> None:
        self._call = call
        self._inner = inner

    async def __anext__(self) -> bytes:
        self._call.wait()
        chunk = await self._inner.__anext__()
        self._call.progress()
        return chunk


def _base(url: str) -> str:
    """The engine's own URL, which the path of an API follows."""
    return url.partition("/v1/")[0]
