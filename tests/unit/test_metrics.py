"""What a process's metrics promise, whatever they count."""

import logging
from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvlease import __version__
from kvlease.core.lease import MissReason
from kvlease.router.metrics import TenantLabels
from kvlease.runtime.metric_catalogue import (
    CATALOGUE,
    CONVERSATIONS,
    ENGINE_EVICTIONS,
    STORE_CALL_SECONDS,
    TURNS,
    Kind,
)
from kvlease.runtime.metrics import CallTimer, Metrics, Sample

UNITS = ("seconds", "bytes", "tokens", "blocks")


async def scraped(metrics: Metrics) -> dict[str, list[tuple[dict[str, str], float]]]:
    text = (await metrics.exposition()).decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def test_a_scrape_says_which_process_runs_and_in_which_version() -> None:
    told = await scraped(Metrics("registry"))
    assert told["kvlease_build_info"] == [({"process": "registry", "version": __version__}, 1.0)]
    assert "process_resident_memory_bytes" in told


async def test_values_are_asked_for_at_each_scrape() -> None:
    metrics, counted = Metrics("router"), iter((3, 4))
    metrics.on_scrape(lambda: [Sample(CONVERSATIONS, next(counted))])
    assert [(await scraped(metrics))["kvlease_conversations"][0][1] for _ in range(2)] == [3, 4]


async def test_what_is_counted_often_is_told_in_full_at_each_scrape() -> None:
    metrics = Metrics("router")
    turns = metrics.tally(TURNS)
    for expected in (2.0, 4.0):
        for _ in range(2):
            turns.add(1, "append", "short_suffix", "well")
        turns.add(0, "recompute", "first_turn", "well")
        told = {labels["path"]: value for labels, value in (await scraped(metrics))[f"{TURNS.name}_total"]}
        assert told == {"append": expected, "recompute": 0.0}


async def test_a_part_that_cannot_be_told_is_counted_and_hides_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics("sidecar")

    async def told() -> Iterable[Sample]:
        return [Sample(ENGINE_EVICTIONS, 2, ("engine-1", "budget"))]

    async def broken() -> Iterable[Sample]:
        raise RuntimeError("a bug")

    metrics.on_scrape_later(broken)
    metrics.on_scrape_later(told)
    with caplog.at_level(logging.ERROR):
        scrape = await scraped(metrics)
    assert scrape["kvlease_scrape_failures_total"] == [({}, 1.0)]
    assert scrape["kvlease_engine_evictions_total"] == [({"engine_id": "engine-1", "cause": "budget"}, 2.0)]
    assert "a part of a scrape failed" in caplog.text


async def test_calls_are_timed_by_what_became_of_them() -> None:
    metrics, now_s = Metrics("registry"), iter((0.0, 0.5, 1.0, 3.0, 4.0, 4.0))
    timer = CallTimer(metrics, STORE_CALL_SECONDS, lambda: next(now_s))

    async def answer(value: object) -> object:
        return value

    async def fail() -> None:
        raise TimeoutError

    await timer.timed("pin", answer("fine"))
    await timer.timed("pin", answer(MissReason.EVICTED))
    with pytest.raises(TimeoutError):
        await timer.timed("pin", fail())
    told = await scraped(metrics)
    seconds = {labels["outcome"]: value for labels, value in told["kvlease_store_call_seconds_sum"]}
    assert seconds == {"ok": 0.5, "evicted": 2.0, "TimeoutError": 0.0}


def test_a_metric_is_only_made_as_what_the_catalogue_calls_it() -> None:
    with pytest.raises(TypeError, match="kvlease_turns"):
        Metrics("router").gauge(TURNS)


def test_tenants_keep_their_label_and_their_number_is_bounded() -> None:
    labels = TenantLabels(2)
    first, second = "a" * 64, "b" * 64
    assert [labels.label(tenant) for tenant in (first, second, "c" * 64, first)] == [
        "a" * 16,
        "b" * 16,
        "other",
        "a" * 16,
    ]


def test_the_names_of_metrics_follow_prometheus() -> None:
    names = [metric.name for metric in CATALOGUE]
    assert len(set(names)) == len(names)
    for metric in CATALOGUE:
        assert metric.name.startswith("kvlease_")
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        if metric.kind is Kind.HISTOGRAM:
            assert metric.name.endswith(UNITS)
            assert list(metric.buckets) == sorted(metric.buckets)
