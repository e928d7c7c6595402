"""Configuration of a router."""

from dataclasses import dataclass

from kvlease.core.errors import InvalidArgument
from kvlease.core.renewal import RenewalPolicy
from kvlease.core.reuse_rules import ReuseMode
from kvlease.core.signals import PlanLimits
from kvlease.router.admission import AdmissionLimits
from kvlease.router.headers import CREDENTIAL_HEADERS, EngineCredentials
from kvlease.router.health import HealthLimits
from kvlease.router.identity import SESSION_HEADERS
from kvlease.router.loads import LoadLimits
from kvlease.router.tenancy import parse_networks
from kvlease.router.turn import TurnLimits
from kvlease.runtime.admin import AdminSettings
from kvlease.runtime.config import ConfigError, require, require_host_port, setting
from kvlease.runtime.logging import LogFormat, LogLevel
from kvlease.runtime.telemetry import TracingSettings
from kvlease.runtime.tls import TlsSettings

RELOADED_SETTINGS = frozenset(
    {
        "append_tokens_max",
        "reuse_tokens_min",
        "decode_running_max",
        "reads_max",
        "rate_samples_min",
        "steady_share",
        "delay_weight",
        "decode_alone",
        "wait_for_offer_s",
        "turn_timeout_s",
        "prefill_timeout_s",
        "resume_streams",
        "audit_interval_s",
    }
)
"""Settings that SIGHUP changes in a router that runs: those of `turn_limits`."""

ABOVE_ZERO = (
    "body_bytes_max",
    "body_idle_s",
    "responses_max",
    "responses_bytes_max",
    "conversations_max",
    "decode_running_max",
    "reads_max",
    "queue_max",
    "decisions_max",
    "queue_wait_s",
    "prefill_timeout_s",
    "keys_poll_s",
    "workers",
    "stall_s",
    "probe_interval_s",
    "probe_timeout_s",
)
NOT_BELOW_ZERO = (
    "append_tokens_max",
    "reuse_tokens_min",
    "rate_samples_min",
    "delay_weight",
    "prefill_inflight_max",
    "decode_inflight_max",
    "slow_start_s",
    "audit_interval_s",
    "wait_for_offer_s",
    "suspect_s",
    "unregistered_s",
    "stop_grace_s",
    "tenant_metrics_max",
)


@dataclass(frozen=True)
class RouterConfig(TracingSettings, TlsSettings, AdminSettings):
    """Settings of one router. All durations are seconds."""

    listen: str = setting("127.0.0.1:8080", "host:port of the OpenAI API; port 0: any free one")
    workers: int = setting(
        1, "processes that share the address; one uses one core, and each has its own limits and metrics"
    )
    share_listen: bool = setting(False, "other processes may listen at the address, too; workers do")
    grpc_listen: str = setting("127.0.0.1:7710", "host:port of the RoutingService; port 0: any free one")
    registry: str = setting(
        "127.0.0.1:7700",
        "host:port of each registry, with commas; one is asked until it fails, then the next",
    )
    registry_call_s: float = setting(0.5, "bound of one call to the registry; a readback waits for its pin")
    append_tokens_max: int = setting(
        512, "longest suffix that a decode engine prefills itself, until rates are measured"
    )
    reuse_tokens_min: int = setting(64, "leases of fewer tokens are not worth a READ")
    decode_running_max: int = setting(128, "turns in flight at which a decode engine prefills nothing itself")
    reads_max: int = setting(
        16, "READs in flight at one engine, as source or as sink, past which no lease is read back"
    )
    rate_samples_min: int = setting(
        32, "measurements of each rate from which on predicted times choose paths, not thresholds; 0: never"
    )
    steady_share: float = setting(
        0.2, "another path than the conversation's last one must be faster by this share: paths do not flap"
    )
    delay_weight: float = setting(
        0.1,
        "what a second that a running stream waits for an append counts for, beside one to the first token",
    )
    decode_alone: bool = setting(
        True,
        "a decode engine with room computes a whole prompt where prefill engines would begin with it only after it is "
        "done, and all together wait less; false: its streams never wait for one",
    )
    decisions_max: int = setting(1000, "decisions kept in memory for `kvlease explain`")
    decisions_file: str = setting(
        "", "file to which each decision is added as a line of JSON when its turn has ended; empty: none"
    )
    prefill_inflight_max: int = setting(
        0, "requests that this router keeps in flight at one prefill engine; 0: any number"
    )
    decode_inflight_max: int = setting(0, "and at one decode engine; more wait in the queue")
    queue_max: int = setting(
        1000, "turns that wait here when decode engines are at decode_inflight_max; one tenant's: half of it"
    )
    queue_wait_s: float = setting(30.0, "how long one waits before it is answered 503")
    slow_start_s: float = setting(
        30.0, "an engine that joins gets its whole share of turns after so long: its caches are cold"
    )
    heartbeat_interval_s: float = setting(5.0, "how often leases are renewed")
    lease_duration_s: float = setting(20.0, "what a heartbeat renews a lease for: survives two lost beats")
    reservation_s: float = setting(30.0, "what a heartbeat renews the reservation of a pin for")
    provisional_s: float = setting(6.0, "how long an engine keeps a turn that nobody confirmed")
    gap_floor_s: float = setting(30.0, "a conversation stays live at least this long after a turn")
    gap_cap_s: float = setting(600.0, "and at most this long, whatever is predicted or asked for")
    gap_returns_per_hour: float = setting(
        1.0, "a conversation stays live while an hour of keeping it is expected to bring so many next turns"
    )
    tool_call_max_s: float = setting(
        600.0, "a conversation that waits for its tools stays live this long; gap_cap_s bounds it"
    )
    wait_for_offer_s: float = setting(0.02, "a pin may wait this long for a lease granted a moment ago")
    turn_timeout_s: float = setting(1800.0, "bound of one turn, its streamed answer included")
    prefill_timeout_s: float = setting(120.0, "bound of one try of the prefill leg")
    resume_streams: bool = setting(
        False,
        "a stream whose engine fails goes on at another one; costs token ids beside each event. Off: it ends in "
        "an error event",
    )
    suspect_s: float = setting(2.0, "an engine is avoided this long after a call to it failed")
    stall_s: float = setting(
        60.0,
        "an engine that gives no byte this long, though requests wait for it, is avoided until it answers a "
        "probe; above the longest prefill",
    )
    probe_interval_s: float = setting(1.0, "how often a stalled engine is asked for one token")
    probe_timeout_s: float = setting(5.0, "bound of one such probe")
    unregistered_s: float = setting(300.0, "an engine whose sidecar is gone is the last resort this long")
    body_bytes_max: int = setting(32 << 20, "longest body of a request: images travel in it")
    body_idle_s: float = setting(
        60.0, "a client that sends nothing of its body for so long is given up (408)"
    )
    body_timeout_s: float = setting(
        300.0, "and one whose body has not come in full by then, however it trickles"
    )
    conversations_max: int = setting(
        100_000, "conversations remembered; beyond, the least recent is forgotten"
    )
    session_headers: str = setting(
        ", ".join(SESSION_HEADERS),
        "headers that may name the conversation, with commas; the first present counts. The default has what "
        "Claude Code, Codex and OpenCode send",
    )
    strip_prompt_nonces: bool = setting(
        False,
        "take Claude Code's attribution line out of the head of a prompt: it changes with every request, and "
        "nothing after it can be reused. Off: prompts are the client's own",
    )
    responses_max: int = setting(
        10_000, "responses kept for previous_response_id; the least recent leave first"
    )
    responses_bytes_max: int = setting(256 << 20, "bytes of JSON of responses kept; likewise")
    pass_unknown_paths: bool = setting(
        True, "paths under /v1 that are not known here go to an engine; those that operate one never do"
    )
    pass_priority: bool = setting(
        False,
        "the priority field of a turn reaches engines, which serve the lowest first where they schedule by it: any "
        "tenant's requests then come before others' for the asking. Off: it is removed",
    )
    cors_origins: str = setting(
        "*",
        "origins of browsers that may read answers, with commas; *: all, as at an engine: no cookie ever "
        "authorises a request; empty: none",
    )
    reuse: ReuseMode = setting(
        ReuseMode.ON, "off: nothing is kept or read; verify-only: turns are kept, but computed anew; or on"
    )
    reuse_file: str = setting(
        "",
        "TOML file of [[rule]] tables with model, tenant (both may be left out) and reuse; the first counts",
    )
    audit_interval_s: float = setting(
        60.0, "with verify-only: a turn is asked again, reused and cold, at most this often; 0: never"
    )
    isolate_tenants: bool = setting(True, "salt the engines' own prefix caches with the tenant")
    keys_file: str = setting(
        "", "TOML file of tenants and the hashes of their keys; empty: every key is a tenant of its own"
    )
    keys_poll_s: float = setting(2.0, "how often keys_file and reuse_file are looked at for changes")
    tenant_header: str = setting("", "header in which a trusted gateway names the tenant; empty: none does")
    tenant_header_networks: str = setting(
        "127.0.0.0/8,::1/128", "networks that the gateway is in, with commas; anybody else is refused"
    )
    engine_api_key: str = setting(
        "",
        "key for the engines, in place of the client's; empty: the client's, unless a file or a gateway has "
        "checked it",
        secret=True,
    )
    tenant_metrics_max: int = setting(
        50, "tenants with series of their own in the metrics; those that come later are counted together"
    )
    stop_grace_s: float = setting(
        5.0, "turns in flight get this long to end when the router stops, then an error"
    )
    log_level: LogLevel = setting(LogLevel.INFO, "debug, info, warning or error")
    log_format: LogFormat = setting(LogFormat.JSON, "json, or text for a terminal")

    def validate(self) -> None:
        """Checks relations between settings.

        Raises:
            ConfigError: one is broken.
        """
        self.validate_tracing()
        self.validate_admin()
        try:
            self.renewal_policy()
        except InvalidArgument as error:
            raise ConfigError(str(error)) from error
        require(
            self.prefill_timeout_s < self.turn_timeout_s,
            f"prefill_timeout_s ({self.prefill_timeout_s:g}) must be below turn_timeout_s "
            f"({self.turn_timeout_s:g})",
        )
        require(
            self.wait_for_offer_s < self.registry_call_s,
            f"wait_for_offer_s ({self.wait_for_offer_s:g}) must be below registry_call_s "
            f"({self.registry_call_s:g})",
        )
        require(
            self.body_idle_s < self.body_timeout_s,
            f"body_idle_s ({self.body_idle_s:g}) must be below body_timeout_s ({self.body_timeout_s:g})",
        )
        self._validate_tenancy()
        require(
            self.stall_s < self.prefill_timeout_s,
            f"stall_s ({self.stall_s:g}) must be below prefill_timeout_s ({self.prefill_timeout_s:g}): no "
            f"other request would see a stall",
        )
        for name in ABOVE_ZERO:
            require(getattr(self, name) > 0, f"{name} ({getattr(self, name):g}) must be above 0")
        for name in NOT_BELOW_ZERO:
            require(getattr(self, name) >= 0, f"{name} ({getattr(self, name):g}) must not be below 0")
        require(0 <= self.steady_share < 1, f"steady_share ({self.steady_share:g}) must be from 0 to below 1")
        require(bool(self.registries()), f"registry ({self.registry!r}) must name at least one host:port")
        addresses = [("registry", address) for address in self.registries()]
        for name, value in (("listen", self.listen), ("grpc_listen", self.grpc_listen), *addresses):
            require_host_port(name, value)

    def _validate_tenancy(self) -> None:
        require(
            not (self.keys_file and self.tenant_header),
            f"keys_file ({self.keys_file!r}) and tenant_header ({self.tenant_header!r}) exclude each other",
        )
        try:
            networks = parse_networks(self.tenant_header_networks)
        except InvalidArgument as error:
            raise ConfigError(f"tenant_header_networks: {error}") from error
        require(
            bool(networks) or not self.tenant_header,
            f"tenant_header ({self.tenant_header!r}) needs tenant_header_networks "
            f"({self.tenant_header_networks!r})",
        )

    def registries(self) -> tuple[str, ...]:
        """Addresses of the registries."""
        return tuple(address for part in self.registry.split(",") if (address := part.strip()))

    def renewal_policy(self) -> RenewalPolicy:
        """The durations of the heartbeat.

        Raises:
            InvalidArgument: they do not fit each other.
        """
        return RenewalPolicy(
            interval_s=self.heartbeat_interval_s,
            duration_s=self.lease_duration_s,
            reservation_s=self.reservation_s,
            provisional_s=self.provisional_s,
            gap_floor_s=self.gap_floor_s,
            gap_cap_s=self.gap_cap_s,
            gap_returns_per_hour=self.gap_returns_per_hour,
            tool_call_max_s=self.tool_call_max_s,
        )

    def engine_credentials(self) -> EngineCredentials:
        """What stands for the caller towards engines: their own key, the client's, or nothing."""
        hidden: frozenset[str] = frozenset()
        if self.keys_file or self.tenant_header or self.engine_api_key:
            hidden = CREDENTIAL_HEADERS | ({self.tenant_header.lower()} - {""})
        return EngineCredentials(hidden, self.engine_api_key)

    def health_limits(self) -> HealthLimits:
        """The bounds of an engine's progress."""
        return HealthLimits(self.stall_s, self.probe_interval_s, self.probe_timeout_s)

    def load_limits(self) -> LoadLimits:
        """The bounds of an engine's load."""
        return LoadLimits(
            prefill_inflight_max=self.prefill_inflight_max,
            decode_inflight_max=self.decode_inflight_max,
            slow_start_s=self.slow_start_s,
            samples_min=max(1, self.rate_samples_min),
        )

    def admission_limits(self) -> AdmissionLimits:
        """The bounds of the queue."""
        return AdmissionLimits(self.queue_max, self.queue_wait_s)

    def turn_limits(self) -> TurnLimits:
        """The bounds of a turn."""
        plan = PlanLimits(
            append_tokens_max=self.append_tokens_max,
            reuse_tokens_min=self.reuse_tokens_min,
            decode_running_max=self.decode_running_max,
            reads_max=self.reads_max,
            samples_min=self.rate_samples_min,
            steady_share=self.steady_share,
            delay_weight=self.delay_weight,
            decode_alone=self.decode_alone,
        )
        return TurnLimits(
            plan,
            self.turn_timeout_s,
            self.prefill_timeout_s,
            self.wait_for_offer_s,
            self.resume_streams,
            self.audit_interval_s,
        )
