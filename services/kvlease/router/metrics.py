"""Counts of turns for Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from kvlease.router.conversations import TurnRecord

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6)


class TurnMetrics:
    """The metrics of one router; labels are closed sets."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        labels = ("path", "reason", "ended")
        self._turns = Counter("kvlease_turns", "Turns by path and reason", labels, registry=self._registry)
        self._prompt_tokens = Counter(
            "kvlease_prompt_tokens", "Tokens of prompts", ("path",), registry=self._registry
        )
        self._reused_tokens = Counter(
            "kvlease_reused_tokens",
            "Tokens of prompts whose KV was not computed again",
            ("path",),
            registry=self._registry,
        )
        self._ttft = Histogram(
            "kvlease_ttft_seconds",
            "Time from the request to the first byte of the answer",
            ("path",),
            buckets=TTFT_BUCKETS_S,
            registry=self._registry,
        )

    def observe(self, record: TurnRecord) -> None:
        """Counts a turn that is over."""
        path = record.path.value
        self._turns.labels(path, record.reason.value, record.ended).inc()
        self._prompt_tokens.labels(path).inc(record.prompt_tokens)
        self._reused_tokens.labels(path).inc(record.reused_tokens)
        if record.ttft_s is not None:
            self._ttft.labels(path).observe(record.ttft_s)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)
