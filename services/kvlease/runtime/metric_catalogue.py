"""Every metric of every process: its name, what it counts, and the labels that it has.

The names are Prometheus's own: a unit last, counters without the `_total` that they get when they are scraped.
Labels are closed sets (paths, reasons, roles), ids of the engines of one pod, or the digests of a bounded number
of tenants: never ids of conversations or leases. `docs/metrics.md` has this as a table.
"""

from dataclasses import dataclass
from enum import Enum

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)
CALL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
HANDSHAKE_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0)


class Kind(Enum):
    """How the values of a metric behave."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Attributes:
        name: without the suffixes that a scrape adds.
        processes: who has it, as `kvlease <process>` names them.
        buckets: upper bounds of a histogram.
    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...]
    processes: tuple[str, ...]
    buckets: tuple[float, ...] = ()

    @property
    def series(self) -> tuple[str, ...]:
        """The names under which a scrape has it."""
        if self.kind is Kind.COUNTER:
            return (f"{self.name}_total",)
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))
        return (self.name,)


def _counter(name: str, meaning: str, labels: tuple[str, ...], *processes: str) -> Metric:
    return Metric(name, Kind.COUNTER, meaning, labels, processes)


def _gauge(name: str, meaning: str, labels: tuple[str, ...], *processes: str) -> Metric:
    return Metric(name, Kind.GAUGE, meaning, labels, processes)


def _histogram(
    name: str, meaning: str, labels: tuple[str, ...], buckets: tuple[float, ...], *processes: str
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, meaning, labels, processes, buckets)


# --- every process --------------------------------------------------------------------------------------------

BUILD_INFO = _gauge(
    "kvlease_build_info",
    "1; the labels say what runs",
    ("process", "version"),
    "router",
    "registry",
    "sidecar",
)
SCRAPE_FAILURES = _counter(
    "kvlease_scrape_failures",
    "Parts of a scrape that could not be told",
    (),
    "router",
    "registry",
    "sidecar",
)
RPC_SECONDS = _histogram(
    "kvlease_rpc_server_seconds",
    "Time from a unary call to its answer, by gRPC status",
    ("method", "status"),
    CALL_BUCKETS_S,
    "router",
    "registry",
    "sidecar",
)

# --- what processes call --------------------------------------------------------------------------------------

STORE_CALL_SECONDS = _histogram(
    "kvlease_store_call_seconds",
    "Time of a call to the store; outcome ok or the error",
    ("call", "outcome"),
    CALL_BUCKETS_S,
    "registry",
    "sidecar",
)
SIDECAR_CALL_SECONDS = _histogram(
    "kvlease_sidecar_call_seconds",
    "Time of a call to a sidecar; outcome ok, why a pin missed, or the error",
    ("call", "outcome"),
    CALL_BUCKETS_S,
    "registry",
    "sidecar",
)
CONNECTOR_CALL_SECONDS = _histogram(
    "kvlease_connector_call_seconds",
    "Time of a question to an engine's connector; outcome ok, why a pin missed, or the error",
    ("call", "outcome"),
    CALL_BUCKETS_S,
    "sidecar",
)
HANDSHAKE_SECONDS = _histogram(
    "kvlease_handshake_seconds",
    "Time of a NIXL handshake that an engine's worker did before a turn needed it; outcome done, known (they had "
    "shaken hands before), failed or late (the first READ waits for it, or tries again)",
    ("outcome",),
    HANDSHAKE_BUCKETS_S,
    "sidecar",
)
REGISTRY_CALL_SECONDS = _histogram(
    "kvlease_registry_call_seconds",
    "Time of a router's call to the registry; outcome ok, why a pin or release missed, or the error",
    ("call", "outcome"),
    CALL_BUCKETS_S,
    "router",
)
LEG_SECONDS = _histogram(
    "kvlease_leg_seconds",
    "Time from a leg's request to the head of the engine's answer; outcome the class of its status, or failed",
    ("leg", "outcome"),
    TTFT_BUCKETS_S,
    "router",
)

# --- requests and turns ---------------------------------------------------------------------------------------

HTTP_REQUESTS = _counter(
    "kvlease_http_requests",
    "Requests of clients that were answered, by route and status; turns that were refused before they began, too",
    ("path", "status"),
    "router",
)
TURNS = _counter(
    "kvlease_turns",
    "Turns that are over, by path, reason and end: well, badly, refused (the fault of the request), aborted",
    ("path", "reason", "ended"),
    "router",
)
TTFT_SECONDS = _histogram(
    "kvlease_ttft_seconds",
    "Time from a turn's begin to the first byte of its answer",
    ("path",),
    TTFT_BUCKETS_S,
    "router",
)
PROMPT_TOKENS = _counter("kvlease_prompt_tokens", "Tokens of prompts", ("path",), "router")
REUSED_TOKENS = _counter(
    "kvlease_reused_tokens", "Tokens of prompts whose KV was not computed again", ("path",), "router"
)
READ_TOKENS = _counter(
    "kvlease_read_tokens", "Those of the reused tokens that were READ from a lease", ("path",), "router"
)
RECOMPUTED_TOKENS = _counter(
    "kvlease_recomputed_tokens", "Tokens of prompts that were computed", ("path",), "router"
)
TENANT_PROMPT_TOKENS = _counter(
    "kvlease_tenant_prompt_tokens",
    "Tokens of prompts by tenant; the tenants past the bound are `other`",
    ("tenant",),
    "router",
)
TENANT_REUSED_TOKENS = _counter(
    "kvlease_tenant_reused_tokens",
    "What a tenant saved: tokens of its prompts that were not computed again",
    ("tenant",),
    "router",
)
PROMPT_NONCES = _counter(
    "kvlease_prompt_nonces",
    "Turns whose prompt began with what changes in every request, so that nothing could be reused",
    (),
    "router",
)
RETRIES = _counter("kvlease_leg_retries", "Tries of a leg after the first of its turn", ("leg",), "router")
REUSE_AUDITS = _counter(
    "kvlease_reuse_audits",
    "Turns of verify-only asked again, reused and cold, by outcome; alert on differs_at_once",
    ("outcome",),
    "router",
)
REFUSED_TURNS = _counter(
    "kvlease_refused_turns", "Turns that were not let in, by the code of their answer", ("code",), "router"
)

# --- what a router knows --------------------------------------------------------------------------------------

WAITING_TURNS = _gauge("kvlease_waiting_turns", "Turns that wait for room at a decode engine", (), "router")
RUNNING_LEGS = _gauge(
    "kvlease_running_legs", "Requests in flight at an engine of this role", ("role",), "router"
)
BACKLOG_TOKENS = _gauge(
    "kvlease_backlog_tokens",
    "The queue: tokens of prompts that engines of this role have to compute yet, as far as this router sent them",
    ("role",),
    "router",
)
RUNNING_READS = _gauge(
    "kvlease_running_reads",
    "READs under way from or to engines of this role, as far as this router ordered them",
    ("role",),
    "router",
)
CONVERSATIONS = _gauge("kvlease_conversations", "Conversations that are remembered", (), "router")
RECORDED_LEASES = _gauge(
    "kvlease_recorded_leases", "Confirmed leases of the whole fleet, as the watch told", (), "router"
)
RENEWED_LEASES = _gauge(
    "kvlease_renewed_leases", "Leases that this router keeps alive or tries to", (), "router"
)
RENEWAL_SECONDS = _histogram(
    "kvlease_renewal_ack_seconds",
    "Renewal lag: time from a heartbeat to the answer that every holder has applied it",
    (),
    CALL_BUCKETS_S,
    "router",
)
RENEWAL_MISSES = _counter(
    "kvlease_renewal_misses", "Leases that a heartbeat could not renew", ("reason",), "router"
)
RENEWAL_SILENCE_SECONDS = _gauge(
    "kvlease_renewal_silence_seconds", "Time since the last answer to a heartbeat", (), "router"
)
DROPPED_DUTIES = _counter(
    "kvlease_dropped_duties", "Unpins and releases dropped because too many were under way", (), "router"
)

# --- engines --------------------------------------------------------------------------------------------------

ENGINES = _gauge(
    "kvlease_engines",
    "Engines by role and state: ready or draining; routers also tell suspect (a call failed a moment ago), stalled "
    "(no progress), unregistered (without a sidecar)",
    ("role", "state"),
    "router",
    "registry",
)
ENGINE_INFO = _gauge(
    "kvlease_engine_info",
    "1 per attached engine; the labels say what it is",
    ("engine_id", "role", "model", "vllm_version", "layout_hash", "retain"),
    "sidecar",
)
ENGINE_UP = _gauge(
    "kvlease_engine_up",
    "Whether the engine's connector answered when it was asked",
    ("engine_id",),
    "sidecar",
)
ENGINE_BLOCKS = _gauge(
    "kvlease_engine_blocks",
    "Blocks of an engine: held by leases, reading (held and pinned), quarantined, free",
    ("engine_id", "state"),
    "sidecar",
)
ENGINE_CAPACITY_BLOCKS = _gauge(
    "kvlease_engine_capacity_blocks", "All blocks of an engine", ("engine_id",), "sidecar"
)
ENGINE_RUNNING = _gauge(
    "kvlease_engine_running_requests", "Requests that an engine computes", ("engine_id",), "sidecar"
)
ENGINE_LEASES = _gauge(
    "kvlease_engine_leases",
    "Leases that an engine holds, by kind and state: provisional or confirmed",
    ("engine_id", "kind", "state"),
    "sidecar",
)
ENGINE_READS = _counter("kvlease_engine_reads", "READs that an engine began", ("engine_id",), "sidecar")
ENGINE_READ_BYTES = _counter(
    "kvlease_engine_read_bytes", "Bytes of KV that an engine READ: it really moved", ("engine_id",), "sidecar"
)
ENGINE_READ_OUTCOMES = _counter(
    "kvlease_engine_read_outcomes",
    "What became of the READs that were ordered",
    ("engine_id", "outcome"),
    "sidecar",
)
ENGINE_MISMATCHES = _counter(
    "kvlease_engine_mismatches",
    "Leases of which less than expected belonged to the prompt",
    ("engine_id",),
    "sidecar",
)
ENGINE_EVICTIONS = _counter(
    "kvlease_engine_evictions",
    "Leases that an engine evicted, by cause: pressure (a request needs blocks), budget (the share for "
    "leases), tenant (a tenant's cap)",
    ("engine_id", "cause"),
    "sidecar",
)
LEASE_ENDINGS = _counter(
    "kvlease_lease_endings",
    "Leases that ended: released (superseded ones among them), expired, evicted, lost; draining: while a READ "
    "went on, for whichever cause",
    ("kind", "state"),
    "sidecar",
)

CATALOGUE: tuple[Metric, ...] = tuple(value for value in vars().copy().values() if isinstance(value, Metric))
"""Every metric, in the order above."""


def catalogue_table() -> str:
    """The catalogue as a table in Markdown."""
    lines = ["| Metric | Kind | Labels | Processes | What it says |", "|---|---|---|---|---|"]
    for metric in CATALOGUE:
        name = metric.series[0] if metric.kind is Kind.COUNTER else metric.name
        labels = ", ".join(f"`{label}`" for label in metric.labels) or "-"
        processes = ", ".join(metric.processes)
        lines.append(f"| `{name}` | {metric.kind.value} | {labels} | {processes} | {metric.meaning} |")
    return "\n".join(lines)
