"""Dashboards and alert rules are what their sources say, and every query finds its metrics in real scrapes."""

import asyncio
import json
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import promql_parser
import pytest
import pytest_asyncio
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvlease.core.lease import LeaseKind, LeaseState
from kvlease.core.records import EngineRole
from kvlease.core.signals import TurnPath
from kvlease.dev.main import SERVED_MODEL, simulated_engine
from kvlease.dev.stack import Stack, StackPlan
from kvlease.operator import conversation
from kvlease.operator.command import Output
from kvlease.router.engines import EngineState
from kvlease.runtime.metric_catalogue import CATALOGUE, Metric

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

DEPLOY = Path(__file__).parents[2] / "deploy"
BOUND_S = 60.0
OF_PROMETHEUS = {"up": {"job", "instance"}}
"""Series that Prometheus itself has of each target."""

TARGET_LABELS = {"job", "instance"}
VALUES = {
    "path": {path.value for path in TurnPath},
    "role": {role.value for role in EngineRole},
    "kind": {kind.value for kind in LeaseKind},
    "ended": {"well", "badly", "refused", "aborted"},
    "state": {
        *(state.value for state in LeaseState),
        *(state.value for state in EngineState),
        *("held", "reading", "quarantined", "free", "provisional", "confirmed"),
    },
    "cause": {"pressure", "budget", "tenant"},
}
"""Labels whose values are closed sets."""


def builder() -> ModuleType:
    spec = spec_from_file_location("dashboard_build", DEPLOY / "dashboards" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def dashboard_queries() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for path in sorted((DEPLOY / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            found += [(f"{path.stem}: {panel['title']}", target["expr"]) for target in panel["targets"]]
    return found


def alert_rules() -> list[dict[str, Any]]:
    groups = [
        group
        for path in sorted((DEPLOY / "alerts").glob("*.yaml"))
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    return [rule for group in groups for rule in group["rules"]]


QUERIES = [*dashboard_queries(), *((rule["alert"], rule["expr"]) for rule in alert_rules())]


@dataclass(frozen=True, slots=True)
class Asked:
    """One selector of a query, and the labels that are grouped by above it."""

    name: str
    matchers: dict[str, str]
    grouped: frozenset[str]


def selectors(node: Any, grouped: frozenset[str] = frozenset()) -> Iterator[Asked]:
    if isinstance(node, promql_parser.VectorSelector):
        matchers = {
            matcher.name: matcher.value
            for matcher in node.matchers.matchers
            if matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.NotEqual)
        }
        others = {matcher.name for matcher in node.matchers.matchers} - set(matchers)
        yield Asked(node.name, matchers, grouped | others)
        return
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        grouped = grouped | frozenset(node.modifier.labels)
    for part in ("expr", "lhs", "rhs", "vector_selector"):
        if hasattr(node, part):
            yield from selectors(getattr(node, part), grouped)
    for argument in getattr(node, "args", ()):
        yield from selectors(argument, grouped)


def parsed(expression: str) -> Any:
    return promql_parser.parse(expression.replace("$__rate_interval", "5m").replace("$engine_id", ".*"))


@dataclass(frozen=True, slots=True)
class Scrapes:
    """What all processes told: labels by series, of those that have a value, and every name that is announced."""

    labels: dict[str, set[str]]
    values: dict[tuple[str, str], float]
    announced: set[str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system() -> AsyncIterator[Stack]:
    """A whole system with simulated engines that has run three turns on three paths."""
    running = Stack(StackPlan(1, 1, simulated_engine), print)
    await running.start()
    try:
        async with aiohttp.ClientSession() as session:
            await converse(session, running.router_url)
        yield running
    finally:
        await running.stop()


async def converse(session: aiohttp.ClientSession, url: str) -> None:
    messages = [{"role": "user", "content": "Tell me about lighthouses. " * 20}]
    for more in ("And now briefly.", "x" * 4000, ""):
        body = {"model": SERVED_MODEL, "messages": messages, "conversation_id": "c", "max_tokens": 8}
        async with session.post(url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            answer = await response.json()
        messages += [answer["choices"][0]["message"], {"role": "user", "content": more}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scrapes(system: Stack) -> Scrapes:
    """Scraped once every end of a lease has reached its sidecar: the last of what turns leave to be told."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(BOUND_S):
        while True:
            found = await scraped(session, system.admin_urls().values())
            if value(found, "kvlease_lease_endings_total", state=LeaseState.RELEASED.value):
                return found
            await asyncio.sleep(0.05)


async def scraped(session: aiohttp.ClientSession, urls: Iterable[str]) -> Scrapes:
    found = Scrapes({}, {}, set())
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            assert response.status == 200
            text = await response.text()
        for family in text_string_to_metric_families(text):
            found.announced.add(family.name)
            for sample in family.samples:
                found.labels.setdefault(sample.name, set()).update(sample.labels)
                key = (sample.name, json.dumps(sample.labels, sort_keys=True))
                found.values[key] = found.values.get(key, 0.0) + sample.value
    return found


def value(scrapes: Scrapes, name: str, **labels: str) -> float:
    """The sum of the series whose labels have these values."""
    return sum(
        number
        for (series, told), number in scrapes.values.items()
        if series == name and labels.items() <= json.loads(told).items()
    )


def metric_of(series: str) -> Metric | None:
    return next((metric for metric in CATALOGUE if series in metric.series), None)


async def test_the_dashboards_are_what_their_source_writes() -> None:
    for path, text in builder().rendered().items():
        assert path.read_text() == text, f"run .venv/bin/python deploy/dashboards/build.py for {path.name}"


@pytest.mark.parametrize(("where", "expression"), QUERIES)
async def test_every_query_asks_for_series_and_labels_that_processes_have(
    where: str, expression: str, scrapes: Scrapes
) -> None:
    asked = list(selectors(parsed(expression)))
    assert asked
    for one in asked:
        if one.name in OF_PROMETHEUS:
            assert set(one.matchers) | one.grouped <= OF_PROMETHEUS[one.name]
            continue
        metric = metric_of(one.name)
        assert metric is not None, one.name
        assert metric.name in scrapes.announced, f"{metric.name} is in no scrape"
        known = {*metric.labels, *TARGET_LABELS, *(("le",) if one.name.endswith("_bucket") else ())}
        assert set(one.matchers) | one.grouped <= known, one
        for label, wanted in one.matchers.items():
            assert wanted in VALUES.get(label, {wanted}), one


async def test_what_processes_tell_has_the_labels_of_the_catalogue(scrapes: Scrapes) -> None:
    told = {name: labels for name, labels in scrapes.labels.items() if name.startswith("kvlease_")}
    for name, labels in told.items():
        metric = metric_of(name)
        assert metric is not None, f"{name} is not in the catalogue"
        assert labels - {"le"} == set(metric.labels), name


async def test_every_metric_of_the_catalogue_is_told_by_somebody(scrapes: Scrapes) -> None:
    assert {metric.name for metric in CATALOGUE} - scrapes.announced == set()


async def test_turns_by_path_their_tokens_and_the_bytes_that_moved_are_counted(scrapes: Scrapes) -> None:
    turns = {path: value(scrapes, "kvlease_turns_total", path=path, ended="well") for path in VALUES["path"]}
    assert turns == {"recompute": 1, "append": 1, "readback": 1}
    prompt, reused, computed = (
        value(scrapes, f"kvlease_{kind}_tokens_total") for kind in ("prompt", "reused", "recomputed")
    )
    assert reused > 0
    assert prompt == reused + computed
    assert value(scrapes, "kvlease_tenant_reused_tokens_total") == reused
    assert value(scrapes, "kvlease_engine_read_bytes_total") > 0
    assert value(scrapes, "kvlease_engine_read_outcomes_total", outcome="read") > 0
    assert value(scrapes, "kvlease_engine_blocks", state="held") > 0
    assert value(scrapes, "kvlease_ttft_seconds_count") == 3
    assert value(scrapes, "kvlease_registry_call_seconds_count", call="pin", outcome="ok") == 1
    assert value(scrapes, "kvlease_lease_endings_total", state=LeaseState.RELEASED.value) > 0


async def test_an_operator_sees_the_turns_of_a_conversation_and_why(
    system: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    assert system.router is not None
    arguments = Namespace(
        conversation_id="c",
        tenant=conversation.tenant_digest("anonymous"),
        routing=system.router.grpc_address,
        output=Output.JSON,
        timeout_s=60.0,
        tls_dir="",
    )
    capsys.readouterr()
    assert await conversation._show(arguments) == 0
    turns = json.loads(capsys.readouterr().out)
    assert [turn["path"] for turn in turns] == ["recompute", "append", "readback"]
    assert turns[0]["reason"] == "first_turn"
    assert {turn["ended"] for turn in turns} == {"well"}
    assert all(turn["ttft_ms"] > 0 for turn in turns)


async def test_each_alert_says_what_is_seen_and_what_to_do() -> None:
    rules = alert_rules()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "action"}
