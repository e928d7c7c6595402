"""What a router counts of its turns, and what it tells of its tables when it is scraped."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import Histogram

from kvlease.core.clock import Clock
from kvlease.core.renewal import RenewalTable
from kvlease.router.admission import Admission
from kvlease.router.background import Background
from kvlease.router.conversation import TurnRecord
from kvlease.router.conversations import ConversationTable
from kvlease.router.engines import EngineTable
from kvlease.router.measured import MeasuredEngines
from kvlease.router.ports import EnginePort
from kvlease.runtime import metric_catalogue as catalogue
from kvlease.runtime.metrics import CallTimer, Metrics, Sample

OTHER_TENANTS = "other"
TENANT_DIGITS = 16


class TenantLabels:
    """Labels of tenants, bounded in number: the first `tenants_max` that come have their own for good."""

    def __init__(self, tenants_max: int) -> None:
        self._tenants_max = tenants_max
        self._labels: dict[str, str] = {}

    def label(self, tenant: str) -> str:
        """The first digits of a tenant's digest, or `other`."""
        label = self._labels.get(tenant)
        if label is None:
            if len(self._labels) >= self._tenants_max:
                return OTHER_TENANTS
            label = self._labels[tenant] = tenant[:TENANT_DIGITS]
        return label


class TurnMetrics:
    """Counts turns as they end."""

    def __init__(self, metrics: Metrics, clock: Clock, tenants_max: int) -> None:
        self._clock = clock
        self._tenants = TenantLabels(tenants_max)
        self._turns = metrics.tally(catalogue.TURNS)
        self._ttft = metrics.histogram(catalogue.TTFT_SECONDS)
        self._ttft_of_path: dict[str, Histogram] = {}
        self._prompt = metrics.tally(catalogue.PROMPT_TOKENS)
        self._reused = metrics.tally(catalogue.REUSED_TOKENS)
        self._read = metrics.tally(catalogue.READ_TOKENS)
        self._recomputed = metrics.tally(catalogue.RECOMPUTED_TOKENS)
        self._tenant_prompt = metrics.tally(catalogue.TENANT_PROMPT_TOKENS)
        self._tenant_reused = metrics.tally(catalogue.TENANT_REUSED_TOKENS)
        self._retries = metrics.tally(catalogue.RETRIES)
        for leg in ("prefill", "decode"):
            self._retries.add(0, leg)  # known before the first one
        self._nonces = metrics.counter(catalogue.PROMPT_NONCES)
        self._refused = metrics.counter(catalogue.REFUSED_TURNS)
        self._audits = metrics.counter(catalogue.REUSE_AUDITS)
        self._legs = CallTimer(metrics, catalogue.LEG_SECONDS, clock.now_s)

    def observe(self, record: TurnRecord, tenant: str) -> None:
        """Counts a turn that is over."""
        path, label = record.path.value, self._tenants.label(tenant)
        self._turns.add(1, path, record.reason.value, record.ended)
        self._prompt.add(record.prompt_tokens, path)
        self._reused.add(record.reused_tokens, path)
        self._read.add(record.read_tokens, path)
        self._recomputed.add(max(0, record.prompt_tokens - record.reused_tokens), path)
        self._tenant_prompt.add(record.prompt_tokens, label)
        self._tenant_reused.add(record.reused_tokens, label)
        if record.prefill_retries:
            self._retries.add(record.prefill_retries, "prefill")
        if record.decode_retries:
            self._retries.add(record.decode_retries, "decode")
        if record.nonce:
            self._nonces.inc()
        if record.ttft_s is not None:
            self._ttft_of(path).observe(record.ttft_s)

    def _ttft_of(self, path: str) -> Histogram:
        child = self._ttft_of_path.get(path)
        if child is None:
            child = self._ttft_of_path[path] = self._ttft.labels(path)
        return child

    def refused(self, code: str) -> None:
        """Counts a turn that was not let in."""
        self._refused.labels(code).inc()

    def audited(self, outcome: str) -> None:
        """Counts a comparison of reused with cold."""
        self._audits.labels(outcome).inc()

    def engines(self, port: EnginePort, leg: str) -> EnginePort:
        """The port with which a leg calls engines, its calls timed."""
        return MeasuredEngines(port, self._legs, leg, self._clock)


class TableGauges:
    """What a router's tables hold at the moment of a scrape."""

    def __init__(
        self,
        engines: EngineTable,
        conversations: ConversationTable,
        renewals: RenewalTable,
        background: Background,
        admission: Admission,
    ) -> None:
        self._engines = engines
        self._conversations = conversations
        self._renewals = renewals
        self._background = background
        self._admission = admission

    def __call__(self) -> Iterator[Sample]:
        """What a scrape has of them."""
        yield from self._engine_samples()
        yield Sample(catalogue.CONVERSATIONS, len(self._conversations))
        yield Sample(catalogue.RECORDED_LEASES, self._conversations.recorded_leases)
        yield Sample(catalogue.RENEWED_LEASES, len(self._renewals))
        yield Sample(catalogue.DROPPED_DUTIES, self._background.dropped)
        yield Sample(catalogue.WAITING_TURNS, self._admission.waiting)

    def _engine_samples(self) -> Iterator[Sample]:
        counts: Counter[tuple[str, str]] = Counter()
        legs: Counter[str] = Counter()
        for engine, state, running in self._engines.states():
            counts[engine.role.value, state.value] += 1
            legs[engine.role.value] += running
        for labels, count in sorted(counts.items()):
            yield Sample(catalogue.ENGINES, count, labels)
        for role, count in sorted(legs.items()):
            yield Sample(catalogue.RUNNING_LEGS, count, (role,))
        yield from self._load_samples()

    def _load_samples(self) -> Iterator[Sample]:
        backlog: Counter[str] = Counter()
        reads: Counter[str] = Counter()
        for signal in self._engines.signals(""):
            backlog[signal.role.value] += signal.backlog_tokens
            reads[signal.role.value] += signal.reads
        for role in sorted(backlog):
            yield Sample(catalogue.BACKLOG_TOKENS, backlog[role], (role,))
            yield Sample(catalogue.RUNNING_READS, reads[role], (role,))
