"""The metrics of one process: counted as things happen, or asked for when they are scraped."""

import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family

from kvlease import __version__
from kvlease.core.lease import MissReason
from kvlease.runtime.metric_catalogue import BUILD_INFO, SCRAPE_FAILURES, Kind, Metric

_log = logging.getLogger(__name__)

# The times at which series began: they double the number of series, and no query of ours reads them.
cast(Any, prometheus_client).disable_created_metrics()

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Sample:
    """A value at the moment of a scrape; `labels` in the order of the metric's."""

    metric: Metric
    value: float
    labels: tuple[str, ...] = ()


Tell = Callable[[], Iterable[Sample]]
TellLater = Callable[[], Awaitable[Iterable[Sample]]]


class Metrics:
    """What one process counts. Every metric comes from the catalogue; asking for one twice gives the same."""

    def __init__(self, process: str) -> None:
        self._registry = CollectorRegistry()
        self._made: dict[str, Counter | Gauge | Histogram] = {}
        self._tellers: list[Tell] = []
        self._later_tellers: list[TellLater] = []
        ProcessCollector(registry=self._registry)
        self.gauge(BUILD_INFO).labels(process, __version__).set(1)
        self._failures = self.counter(SCRAPE_FAILURES)

    def counter(self, metric: Metric) -> Counter:
        """Something that only grows."""
        return cast(Counter, self._make(metric, Kind.COUNTER))

    def tally(self, metric: Metric) -> "Tally":
        """Something that only grows, and often."""
        tally = Tally(self.counter(metric))
        self.on_scrape(tally.settle)
        return tally

    def gauge(self, metric: Metric) -> Gauge:
        """Something that goes up and down."""
        return cast(Gauge, self._make(metric, Kind.GAUGE))

    def histogram(self, metric: Metric) -> Histogram:
        """How a quantity is spread."""
        return cast(Histogram, self._make(metric, Kind.HISTOGRAM))

    def on_scrape(self, tell: Tell) -> None:
        """Asks for values at each scrape."""
        self._tellers.append(tell)

    def on_scrape_later(self, tell: TellLater) -> None:
        """Asks for values at each scrape that have to be waited for; `tell` bounds the wait."""
        self._later_tellers.append(tell)

    async def exposition(self) -> bytes:
        """The text that Prometheus scrapes. What cannot be told is left out and counted."""
        samples: list[Sample] = []
        for tell in self._tellers:
            with self._counting_failures():
                samples.extend(tell())
        for tell_later in self._later_tellers:
            with self._counting_failures():
                samples.extend(await tell_later())
        told = _Scrape([*self._registry.collect(), *_families(samples)])
        return generate_latest(cast(CollectorRegistry, told))

    @contextmanager
    def _counting_failures(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception:
            # A scrape has to say what it can: it is what people look at when something is broken.
            _log.exception("a part of a scrape failed")
            self._failures.inc()

    def _make(self, metric: Metric, kind: Kind) -> Counter | Gauge | Histogram:
        if metric.kind is not kind:
            raise TypeError(f"{metric.name} is a {metric.kind.value}, not a {kind.value}")
        made = self._made.get(metric.name)
        if made is None:
            made = self._made[metric.name] = _make(metric, self._registry)
        return made


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if metric.kind is Kind.COUNTER:
        return Counter(metric.name, metric.meaning, metric.labels, registry=registry)
    if metric.kind is Kind.GAUGE:
        return Gauge(metric.name, metric.meaning, metric.labels, registry=registry)
    return Histogram(metric.name, metric.meaning, metric.labels, registry=registry, buckets=metric.buckets)


@dataclass(frozen=True, slots=True)
class _Scrape:
    """What `generate_latest` needs of a registry."""

    families: list[Family]

    def collect(self) -> Iterator[Family]:
        return iter(self.families)


def _families(samples: Iterable[Sample]) -> Iterable[Family]:
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for sample in samples:
        metric = sample.metric
        family = families.get(metric.name)
        if family is None:
            make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            family = families[metric.name] = make(metric.name, metric.meaning, labels=metric.labels)
        family.add_metric(sample.labels, sample.value)
    return families.values()


class Tally:
    """What a counter is to count, by the values of its labels: kept here, and counted when it is scraped.

    For what is counted many times in every request: the library's counters are slow.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._counts: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *labels: str) -> None:
        """Counts; an amount of 0 makes the series known."""
        counts = self._counts
        counts[labels] = counts.get(labels, 0) + amount

    def settle(self) -> Iterable[Sample]:
        """Lets the counter count; nothing more has to be told."""
        counts, self._counts = self._counts, {}
        for labels, amount in counts.items():
            self._counter.labels(*labels).inc(amount)
        return ()


# --- calls ----------------------------------------------------------------------------------------------------


class CallTimer:
    """Times calls into a histogram whose labels are `call` (or what stands for it) and `outcome`."""

    def __init__(
        self, metrics: Metrics, metric: Metric, now_s: Callable[[], float] = time.perf_counter
    ) -> None:
        self._seconds = metrics.histogram(metric)
        self._children: dict[tuple[str, str], Histogram] = {}
        self._now_s = now_s

    async def timed(self, name: str, call: Awaitable[Answer]) -> Answer:
        """The answer of a call. Its outcome is `ok`, the value of a miss, or the name of an error."""
        begun_s = self._now_s()
        outcome = "cancelled"
        try:
            answer = await call
            outcome = outcome_of(answer)
            return answer
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self.observe(name, outcome, self._now_s() - begun_s)

    def observe(self, name: str, outcome: str, seconds: float) -> None:
        """Notes a call that was timed elsewhere."""
        child = self._children.get((name, outcome))
        if child is None:
            child = self._children[name, outcome] = self._seconds.labels(name, outcome)
        child.observe(seconds)


def outcome_of(answer: Any) -> str:
    """How an answer is called in a label."""
    return answer.value if isinstance(answer, MissReason) else "ok"
