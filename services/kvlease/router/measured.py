"""Times what a router asks of the registry and of engines."""

from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType

from aiohttp import web

from kvlease.core.clock import Clock
from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine, LeaseRecord, PinOutcome
from kvlease.core.renewal import Beat
from kvlease.router.ports import BeatAck, EnginePort, EngineReply, RegistryPort, RenewalStream
from kvlease.runtime import metric_catalogue as catalogue
from kvlease.runtime.metrics import CallTimer, Metrics, Sample
from kvlease.store.port import Batch

BEATS_MAX = 256
"""Beats without an answer whose time of sending is remembered."""

NoteAck = Callable[[BeatAck, float | None], None]
"""Takes an answer and how many seconds it took, None when its beat is not remembered."""


OnPrepare = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


def count_answers(metrics: Metrics) -> OnPrepare:
    """Counts each answer of an application when its head is sent; to be put into `on_response_prepare`."""
    answered = metrics.tally(catalogue.HTTP_REQUESTS)

    async def count(request: web.Request, response: web.StreamResponse) -> None:
        resource = request.match_info.route.resource
        path = "" if resource is None else resource.canonical.rstrip("/")
        # Whatever has no route of its own is one path: its number is not bounded.
        answered.add(1, "other" if path in ("", "/{path}") else path, str(response.status))

    return count


class MeasuredRegistry:
    """A `RegistryPort` whose calls are timed by outcome, and whose heartbeats are timed until their answers."""

    def __init__(self, inner: RegistryPort, metrics: Metrics, clock: Clock) -> None:
        self._inner = inner
        self._clock = clock
        self._timer = CallTimer(metrics, catalogue.REGISTRY_CALL_SECONDS, clock.now_s)
        self._lag = metrics.histogram(catalogue.RENEWAL_SECONDS)
        self._misses = metrics.counter(catalogue.RENEWAL_MISSES)
        self._answered_s = clock.now_s()
        metrics.on_scrape(self._silence)

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """Takes a pin at the holder."""
        return await self._timer.timed("pin", self._inner.pin(ask, wait_for_offer_s))

    async def unpin(self, holder: Holder, lease_id: int, pin_id: str) -> None:
        """Ends a pin."""
        await self._timer.timed("unpin", self._inner.unpin(holder, lease_id, pin_id))

    async def release(self, lease_id: int, engine_id: str, tenant: str) -> MissReason | None:
        """Releases a lease."""
        return await self._timer.timed("release", self._inner.release(lease_id, engine_id, tenant))

    def watch_engines(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[Engine]]]:
        """First a snapshot, then every change."""
        return self._inner.watch_engines()

    def watch_leases(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[LeaseRecord]]]:
        """First a snapshot, then every change."""
        return self._inner.watch_leases()

    @asynccontextmanager
    async def renew(self) -> AsyncGenerator[RenewalStream, None]:
        """Opens a stream of heartbeats."""
        async with self._inner.renew() as stream:
            yield _MeasuredRenewals(stream, self._clock, self._note)

    def _note(self, ack: BeatAck, lag_s: float | None) -> None:
        self._answered_s = self._clock.now_s()
        if lag_s is not None:
            self._lag.observe(lag_s)
        for miss in ack.misses.values():
            self._misses.labels(miss.value).inc()

    def _silence(self) -> list[Sample]:
        silence_s = self._clock.now_s() - self._answered_s
        return [Sample(catalogue.RENEWAL_SILENCE_SECONDS, silence_s)]


class _MeasuredRenewals:
    """One stream; an answer to a beat answers the beats before it."""

    def __init__(self, inner: RenewalStream, clock: Clock, note: NoteAck) -> None:
        self._inner = inner
        self._clock = clock
        self._note = note
        self._sent_s: OrderedDict[int, float] = OrderedDict()

    async def send(self, beat: Beat) -> None:
        """Sends one beat."""
        self._sent_s[beat.sequence] = self._clock.now_s()
        if len(self._sent_s) > BEATS_MAX:
            self._sent_s.popitem(last=False)
        await self._inner.send(beat)

    async def acks(self) -> AsyncIterator[BeatAck]:
        """The answers, until the stream ends."""
        async for ack in self._inner.acks():
            sent_s = self._sent_s.pop(ack.sequence, None)
            self._note(ack, None if sent_s is None else self._clock.now_s() - sent_s)
            yield ack


class MeasuredEngines:
    """An `EnginePort` of one leg: the time to the head of each answer, by outcome."""

    def __init__(self, inner: EnginePort, timer: CallTimer, leg: str, clock: Clock) -> None:
        self._inner = inner
        self._timer = timer
        self._leg = leg
        self._clock = clock

    def call(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, timeout_s: float
    ) -> AbstractAsyncContextManager[EngineReply]:
        """Sends a request."""
        call = self._inner.call(method, url, headers, body, timeout_s)
        return _MeasuredCall(call, self._timer, self._leg, self._clock)


class _MeasuredCall(AbstractAsyncContextManager[EngineReply]):
    __slots__ = ("_clock", "_inner", "_leg", "_timer")

    def __init__(
        self,
        inner: AbstractAsyncContextManager[EngineReply],
        timer: CallTimer,
        leg: str,
        clock: Clock,
    ) -> None:
        self._inner = inner
        self._timer = timer
        self._leg = leg
        self._clock = clock

    async def __aenter__(self) -> EngineReply:
        begun_s, outcome = self._clock.now_s(), "cancelled"
        try:
            reply = await self._inner.__aenter__()
            outcome = f"{reply.status // 100}xx"
            return reply
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._timer.observe(self._leg, outcome, self._clock.now_s() - begun_s)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        return await self._inner.__aexit__(kind, error, traceback)
