"""What a sidecar tells of its engines when it is scraped, and how its questions to connectors are timed."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kvlease.core.attachment import HandshakeReport
from kvlease.core.errors import HolderUnreachable
from kvlease.core.holding import PinAsk
from kvlease.core.lease import LeaseState, MissReason
from kvlease.core.records import Engine, HolderGauges, LeaseRecord, PinOutcome
from kvlease.runtime import metric_catalogue as catalogue
from kvlease.runtime.metrics import CallTimer, Metrics, Sample
from kvlease.sidecar.engine import AttachedEngine
from kvlease.sidecar.ports import ConnectorLink
from kvlease.sidecar.sidecar import Sidecar

_COUNTERS = {
    "reads": catalogue.ENGINE_READS,
    "bytes_read": catalogue.ENGINE_READ_BYTES,
    "mismatches": catalogue.ENGINE_MISMATCHES,
}
"""Counters of connectors that have no label."""

_LABELLED = {
    "outcome_": catalogue.ENGINE_READ_OUTCOMES,
    "evictions_": catalogue.ENGINE_EVICTIONS,
}
"""Prefix of a connector's counters -> the metric whose label is what follows."""


class LeaseEndings:
    """Counts the leases that ended."""

    def __init__(self, metrics: Metrics) -> None:
        self._endings = metrics.counter(catalogue.LEASE_ENDINGS)

    def __call__(self, record: LeaseRecord, state: LeaseState) -> None:
        """One lease has ended in a terminal state."""
        self._endings.labels(record.kind.value, state.value).inc()


class HandshakeTimes:
    """Times the handshakes that workers did before a turn needed them."""

    def __init__(self, metrics: Metrics) -> None:
        self._seconds = metrics.histogram(catalogue.HANDSHAKE_SECONDS)

    def __call__(self, report: HandshakeReport) -> None:
        """One worker has reported, or did not in time."""
        self._seconds.labels(report.outcome.value).observe(report.took_s)


class EngineGauges:
    """Asks every attached engine for its gauges, all at once; each link bounds the wait."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar

    async def __call__(self) -> Iterable[Sample]:
        """What a scrape has of the engines."""
        engines = self._sidecar.engines()
        found = await asyncio.gather(*map(_gauges_of, engines))
        pairs = zip(engines, found, strict=True)
        return [sample for engine, gauges in pairs for sample in _samples(engine, gauges)]


async def _gauges_of(engine: AttachedEngine) -> HolderGauges | None:
    try:
        return await engine.read_gauges()
    except HolderUnreachable:
        return None


def _samples(attached: AttachedEngine, gauges: HolderGauges | None) -> Iterator[Sample]:
    engine_id = attached.engine.holder.engine_id
    yield Sample(catalogue.ENGINE_INFO, 1, _info(attached.engine))
    yield Sample(catalogue.ENGINE_UP, float(gauges is not None), (engine_id,))
    leases = Counter((kind.value, provisional) for kind, provisional in attached.leases())
    for (kind, provisional), count in sorted(leases.items()):
        state = "provisional" if provisional else "confirmed"
        yield Sample(catalogue.ENGINE_LEASES, count, (engine_id, kind, state))
    if gauges is not None:
        yield from _gauge_samples(engine_id, gauges)


def _info(engine: Engine) -> tuple[str, ...]:
    return (
        engine.holder.engine_id,
        engine.role.value,
        engine.model,
        engine.vllm_version,
        engine.layout.layout_hash,
        "yes" if engine.retain else "no",
    )


def _gauge_samples(engine_id: str, gauges: HolderGauges) -> Iterator[Sample]:
    for state in ("held", "reading", "quarantined", "free"):
        blocks: int = getattr(gauges, f"{state}_blocks")
        yield Sample(catalogue.ENGINE_BLOCKS, blocks, (engine_id, state))
    yield Sample(catalogue.ENGINE_CAPACITY_BLOCKS, gauges.total_blocks, (engine_id,))
    yield Sample(catalogue.ENGINE_RUNNING, gauges.running_requests, (engine_id,))
    for name, metric in _COUNTERS.items():
        yield Sample(metric, gauges.counters.get(name, 0), (engine_id,))
    for name, value in sorted(gauges.counters.items()):
        for prefix, metric in _LABELLED.items():
            if name.startswith(prefix):
                yield Sample(metric, value, (engine_id, name.removeprefix(prefix)))


class MeasuredLink:
    """A `ConnectorLink` whose questions are timed by outcome."""

    def __init__(self, inner: ConnectorLink, timer: CallTimer) -> None:
        self._inner = inner
        self._timer = timer

    async def pin(self, ask: PinAsk) -> PinOutcome:
        """Asks the holder's table for a pin."""
        return await self._timer.timed("pin", self._inner.pin(ask))

    def unpin(self, lease_id: int, pin_id: str) -> None:
        """Tells that a pin has ended."""
        self._inner.unpin(lease_id, pin_id)

    async def renew(
        self, lease_ids: Sequence[int], duration_s: float, pin_ids: Sequence[str], reservation_s: float
    ) -> dict[int, MissReason]:
        """Renews leases and the reservations of pins."""
        call = self._inner.renew(lease_ids, duration_s, pin_ids, reservation_s)
        return await self._timer.timed("renew", call)

    async def release(self, lease_id: int, *, superseded: bool) -> MissReason | None:
        """Ends a lease."""
        call = self._inner.release(lease_id, superseded=superseded)
        return await self._timer.timed("supersede" if superseded else "release", call)

    def order_evictions(self, lease_ids: Sequence[int]) -> None:
        """Tells the order of eviction."""
        self._inner.order_evictions(lease_ids)

    async def read_gauges(self) -> HolderGauges:
        """The holder's gauges and counters."""
        return await self._timer.timed("read_gauges", self._inner.read_gauges())

    def close(self, reason: str) -> None:
        """Ends the attachment."""
        self._inner.close(reason)
