"""Writes the dashboards of this folder: `.venv/bin/python deploy/dashboards/build.py`.

Metrics come from the catalogue, so that a renamed one breaks this and not a dashboard; a test says when the JSON
files are not what this writes, and compares every query with scrapes of a system that runs.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlease.runtime import metric_catalogue as m
from kvlease.runtime.metric_catalogue import Kind, Metric

HERE = Path(__file__).parent
RATE = "$__rate_interval"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, GRID = 8, 8, 24
_CHOSEN = 'engine_id=~"$engine_id"'
"""The engines that the dashboard's variable names."""


@dataclass(frozen=True, slots=True)
class Query:
    """One line, or one per value of its labels; `legend` is Grafana's format."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph.

    Attributes:
        unit: of the axis, as Grafana names it.
        meaning: what it tells, and what to think of it.
    """

    title: str
    unit: str
    meaning: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page. `variables` choose values of a label, as (label, metric that has it)."""

    name: str
    title: str
    panels: tuple[Panel, ...]
    variables: tuple[tuple[str, Metric], ...] = ()


# --- queries --------------------------------------------------------------------------------------------------


def rate(metric: Metric, by: Sequence[str] = (), where: str = "") -> str:
    """Events per second."""
    name = f"{metric.name}_count" if metric.kind is Kind.HISTOGRAM else metric.series[0]
    return f"sum{_by(by)} (rate({name}{_where(where)}[{RATE}]))"


def quantile(share: float, metric: Metric, by: Sequence[str] = (), where: str = "") -> str:
    """A quantile of what a histogram measured."""
    inner = f"sum{_by(('le', *by))} (rate({metric.name}_bucket{_where(where)}[{RATE}]))"
    return f"histogram_quantile({share:g}, {inner})"


def total(metric: Metric, by: Sequence[str] = (), where: str = "") -> str:
    """The sum of a gauge."""
    return f"sum{_by(by)} ({metric.name}{_where(where)})"


def highest(metric: Metric, by: Sequence[str] = (), where: str = "") -> str:
    """The highest of a gauge that several processes tell, each of the whole fleet."""
    return f"max{_by(by)} ({metric.name}{_where(where)})"


def share_of_blocks(state: str) -> str:
    """What part of an engine's blocks is in a state."""
    part = total(m.ENGINE_BLOCKS, ("engine_id",), f'state="{state}",{_CHOSEN}')
    return f"{part} / {total(m.ENGINE_CAPACITY_BLOCKS, ('engine_id',), _CHOSEN)}"


def _by(labels: Sequence[str]) -> str:
    return f" by ({', '.join(labels)})" if labels else ""


def _where(matchers: str) -> str:
    return f"{{{matchers}}}" if matchers else ""


# --- panels ---------------------------------------------------------------------------------------------------

TURNS_BY_PATH = Panel(
    "Turns by path",
    "reqps",
    "append: the decode engine went on from its own cache. readback: KV was READ from a lease. recompute: the whole "
    "prompt was prefilled.",
    (Query(rate(m.TURNS, ("path",)), "{{path}}"),),
)
REUSED_SHARE = Panel(
    "Prompt tokens not computed again",
    "percentunit",
    "What leases and prefix caches save. It falls when leases are lost, evicted or expire before the next turn.",
    (Query(f"{rate(m.REUSED_TOKENS)} / {rate(m.PROMPT_TOKENS)}", "reused"),),
)
READ_BYTES = Panel(
    "KV READ from leases",
    "Bps",
    "Bytes that engines really READ from each other. Readback turns without bytes mean that KV does not move.",
    (Query(rate(m.ENGINE_READ_BYTES), "READ"),),
)
READ_OUTCOMES = Panel(
    "READs by outcome",
    "ops",
    "read is good, local and below_threshold need no READ; everything else was recomputed.",
    (Query(rate(m.ENGINE_READ_OUTCOMES, ("outcome",)), "{{outcome}}"),),
)
EVICTIONS = Panel(
    "Evictions by cause",
    "ops",
    "pressure: requests need blocks, so leases leave early: more decode engines, or fewer conversations kept. "
    "budget, tenant: caps of leases.",
    (Query(rate(m.ENGINE_EVICTIONS, ("cause",)), "{{cause}}"),),
)


_BADLY = rate(m.TURNS, where='ended!="well"')
FLEET = Dashboard(
    "fleet",
    "kvlease: fleet",
    (
        TURNS_BY_PATH,
        Panel(
            "Requests by status",
            "reqps",
            "What clients get, turns and everything else; 401 and 429 never became a turn.",
            (Query(rate(m.HTTP_REQUESTS, ("path", "status")), "{{status}} {{path}}"),),
        ),
        Panel(
            "Turns that did not end well",
            "percentunit",
            "badly: an error or an engine that broke off; refused: a fault of the request; aborted: the client left.",
            (
                Query(f"{_BADLY} / {rate(m.TURNS)}", "share"),
                Query(rate(m.TURNS, ("ended",)), "{{ended}} per second"),
            ),
        ),
        Panel(
            "TTFT, median and p95",
            "s",
            "Time to the first byte by path. readback has to beat recompute.",
            (
                Query(quantile(0.5, m.TTFT_SECONDS, ("path",)), "{{path}} p50"),
                Query(quantile(0.95, m.TTFT_SECONDS, ("path",)), "{{path}} p95"),
            ),
        ),
        REUSED_SHARE,
        READ_BYTES,
        Panel(
            "Engines",
            "short",
            "By role and state, as routers and registries see them: the highest count that one tells.",
            (Query(highest(m.ENGINES, ("role", "state")), "{{role}} {{state}}"),),
        ),
        Panel(
            "Turns in flight",
            "short",
            "Requests at the engines of each role, over all routers.",
            (Query(total(m.RUNNING_LEGS, ("role",)), "{{role}}"),),
        ),
        Panel(
            "Queue",
            "short",
            "Tokens of prompts that engines of each role have to compute yet: with it TTFT grows.",
            (Query(total(m.BACKLOG_TOKENS, ("role",)), "{{role}}"),),
        ),
        Panel(
            "READs under way",
            "short",
            "From or to engines of each role; their number per engine is capped.",
            (Query(total(m.RUNNING_READS, ("role",)), "{{role}}"),),
        ),
        Panel(
            "Legs by outcome",
            "reqps",
            "What engines answer; failed: no answer. A failed leg is tried at another engine once.",
            (Query(rate(m.LEG_SECONDS, ("leg", "outcome")), "{{leg}} {{outcome}}"),),
        ),
        Panel(
            "Retries",
            "ops",
            "Tries of a leg after its first.",
            (Query(rate(m.RETRIES, ("leg",)), "{{leg}}"),),
        ),
        Panel(
            "Renewal lag",
            "s",
            "From a heartbeat to the answer that holders applied it. Leases outlive two lost beats.",
            (
                Query(quantile(0.95, m.RENEWAL_SECONDS), "p95"),
                Query(highest(m.RENEWAL_SILENCE_SECONDS), "longest silence"),
            ),
        ),
        Panel(
            "Calls to the store, p95",
            "s",
            "By call. A slow store delays records, never turns.",
            (Query(quantile(0.95, m.STORE_CALL_SECONDS, ("call",)), "{{call}}"),),
        ),
        Panel(
            "gRPC calls answered, p95",
            "s",
            "By method, over registries, sidecars and routers.",
            (Query(quantile(0.95, m.RPC_SECONDS, ("method",)), "{{method}}"),),
        ),
        Panel(
            "gRPC calls refused",
            "reqps",
            "By method and status.",
            (Query(rate(m.RPC_SECONDS, ("method", "status"), 'status!="OK"'), "{{method}} {{status}}"),),
        ),
        Panel(
            "What runs",
            "short",
            "Processes by version.",
            (Query(f"count by (process, version) ({m.BUILD_INFO.name})", "{{process}} {{version}}"),),
        ),
    ),
)
"""Is the fleet well, and is it worth it?"""


CONVERSATIONS = Dashboard(
    "conversations",
    "kvlease: conversations",
    (
        Panel(
            "Turns by path and reason",
            "reqps",
            "Why each path was taken: the names are those of `X-Kvlease-Route`.",
            (Query(rate(m.TURNS, ("path", "reason")), "{{path}}: {{reason}}"),),
        ),
        REUSED_SHARE,
        Panel(
            "Prompt tokens",
            "short",
            "Per second: READ from leases, found in an engine's own cache, computed.",
            (
                Query(rate(m.READ_TOKENS), "READ"),
                Query(f"{rate(m.REUSED_TOKENS)} - {rate(m.READ_TOKENS)}", "own cache"),
                Query(rate(m.RECOMPUTED_TOKENS), "computed"),
            ),
        ),
        Panel(
            "Conversations and leases",
            "short",
            "Conversations that routers remember, leases that they keep alive, leases that are recorded.",
            (
                Query(total(m.CONVERSATIONS), "conversations"),
                Query(total(m.RENEWED_LEASES), "renewed"),
                Query(highest(m.RECORDED_LEASES), "recorded"),
            ),
        ),
        Panel(
            "Leases ended",
            "ops",
            "By state. expired: the next turn came too late; lost: an engine went or was reset.",
            (Query(rate(m.LEASE_ENDINGS, ("state",), 'kind="conversation"'), "{{state}}"),),
        ),
        EVICTIONS,
        Panel(
            "Pins by outcome",
            "ops",
            "A readback begins with a pin of its lease; what is not ok was recomputed.",
            (Query(rate(m.REGISTRY_CALL_SECONDS, ("outcome",), 'call="pin"'), "{{outcome}}"),),
        ),
        Panel(
            "Pins, p95",
            "s",
            "A readback waits for its pin.",
            (Query(quantile(0.95, m.REGISTRY_CALL_SECONDS, where='call="pin"'), "p95"),),
        ),
        READ_OUTCOMES,
        Panel(
            "Renewals that missed",
            "ops",
            "Why a lease could not be kept alive.",
            (Query(rate(m.RENEWAL_MISSES, ("reason",)), "{{reason}}"),),
        ),
        Panel(
            "Tokens saved by tenant",
            "short",
            "Per second, the ten that save most; tenants by the first digits of their digest.",
            (Query(f"topk(10, {rate(m.TENANT_REUSED_TOKENS, ('tenant',))})", "{{tenant}}"),),
        ),
        Panel(
            "Share saved by tenant",
            "percentunit",
            "Of each tenant's prompt tokens, those that were not computed again.",
            (
                Query(
                    f"{rate(m.TENANT_REUSED_TOKENS, ('tenant',))} / "
                    f"{rate(m.TENANT_PROMPT_TOKENS, ('tenant',))}",
                    "{{tenant}}",
                ),
            ),
        ),
    ),
)
"""Do conversations find their leases, and if not, why?"""


ENGINES = Dashboard(
    "engines",
    "kvlease: engines",
    (
        Panel(
            "Engines",
            "short",
            "What is attached to a sidecar.",
            (
                Query(
                    f"max by (engine_id, role, model, vllm_version, layout_hash, retain) "
                    f"({m.ENGINE_INFO.name}{{{_CHOSEN}}})"
                ),
            ),
            kind="table",
        ),
        Panel(
            "Engines that answer",
            "short",
            "1 while the engine's connector answers its sidecar.",
            (Query(highest(m.ENGINE_UP, ("engine_id",), _CHOSEN), "{{engine_id}}"),),
        ),
        Panel(
            "Blocks held by leases",
            "percentunit",
            "Of the engine's blocks. The rest is free for requests.",
            (Query(share_of_blocks("held"), "{{engine_id}}"),),
        ),
        Panel(
            "Blocks being read",
            "percentunit",
            "Pinned: they cannot be evicted. The cap is a setting of the connector (a quarter).",
            (Query(share_of_blocks("reading"), "{{engine_id}}"),),
        ),
        Panel(
            "Blocks in quarantine",
            "short",
            "Destinations of READs that were given up and may still be written to. They must come back.",
            (
                Query(
                    total(m.ENGINE_BLOCKS, ("engine_id",), f'state="quarantined",{_CHOSEN}'),
                    "{{engine_id}}",
                ),
            ),
        ),
        Panel(
            "Requests computing",
            "short",
            "As the engine counts them.",
            (Query(total(m.ENGINE_RUNNING, ("engine_id",), _CHOSEN), "{{engine_id}}"),),
        ),
        Panel(
            "Leases",
            "short",
            "By kind and state.",
            (Query(total(m.ENGINE_LEASES, ("kind", "state"), _CHOSEN), "{{kind}} {{state}}"),),
        ),
        Panel(
            "KV READ",
            "Bps",
            "By the engine that reads.",
            (Query(rate(m.ENGINE_READ_BYTES, ("engine_id",), _CHOSEN), "{{engine_id}}"),),
        ),
        Panel(
            "READs begun",
            "ops",
            "By the engine that reads.",
            (Query(rate(m.ENGINE_READS, ("engine_id",), _CHOSEN), "{{engine_id}}"),),
        ),
        READ_OUTCOMES,
        Panel(
            "Leases that did not fit the prompt",
            "ops",
            "Digests showed that less of the lease than expected belongs to the prompt: edited histories.",
            (Query(rate(m.ENGINE_MISMATCHES, ("engine_id",), _CHOSEN), "{{engine_id}}"),),
        ),
        EVICTIONS,
        Panel(
            "Questions to connectors, p95",
            "s",
            "A connector answers between two steps of its engine.",
            (Query(quantile(0.95, m.CONNECTOR_CALL_SECONDS, ("call",)), "{{call}}"),),
        ),
        Panel(
            "Calls to other sidecars, p95",
            "s",
            "A decode engine's pin at the prefill engine's sidecar, among others.",
            (Query(quantile(0.95, m.SIDECAR_CALL_SECONDS, ("call",)), "{{call}}"),),
        ),
    ),
    variables=(("engine_id", m.ENGINE_INFO),),
)
"""What do engines keep, and do they READ?"""

DASHBOARDS = (FLEET, CONVERSATIONS, ENGINES)


# --- Grafana's JSON -------------------------------------------------------------------------------------------


def dashboard_json(dashboard: Dashboard) -> dict[str, Any]:
    """What Grafana provisions."""
    return {
        "uid": f"kvlease-{dashboard.name}",
        "title": dashboard.title,
        "tags": ["kvlease"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_datasource_variable(), *map(_variable, dashboard.variables)]},
        "panels": [_panel_json(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _variable(variable: tuple[str, Metric]) -> dict[str, Any]:
    label, metric = variable
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": f"label_values({metric.name}, {label})", "refId": "values"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel_json(number: int, panel: Panel) -> dict[str, Any]:
    columns = GRID // WIDTH
    instant = panel.kind == "table"
    targets = [
        {
            "refId": chr(ord("A") + place),
            "datasource": DATASOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
            "instant": instant,
            "range": not instant,
            **({"format": "table"} if instant else {}),
        }
        for place, query in enumerate(panel.queries)
    ]
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.meaning,
        "type": panel.kind,
        "datasource": DATASOURCE,
        "gridPos": {
            "x": number % columns * WIDTH,
            "y": number // columns * HEIGHT,
            "w": WIDTH,
            "h": HEIGHT,
        },
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def rendered() -> dict[Path, str]:
    """What each file should hold."""
    return {
        HERE / f"{dashboard.name}.json": json.dumps(dashboard_json(dashboard), indent=2) + "\n"
        for dashboard in DASHBOARDS
    }


def main() -> None:
    """Writes the files."""
    for path, text in rendered().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
