"""What a turn's plan is made of: its lease, the engines, the time that work takes them, and the limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvlease.core.lease import MissReason
from kvlease.core.rates import Line
from kvlease.core.records import EngineRole
from kvlease.core.values import value


class TurnPath(Enum):
    """What moves in a turn."""

    APPEND = "append"
    READBACK = "readback"
    RECOMPUTE = "recompute"


class PlanReason(Enum):
    """Why a turn takes its path. A closed set: it labels metrics."""

    FIRST_TURN = "first_turn"
    LEASE_MISSING = "lease_missing"
    LEASE_EXPIRED = "lease_expired"
    LEASE_RELEASED = "lease_released"
    LEASE_EVICTED = "lease_evicted"
    LEASE_LOST = "lease_lost"
    MODEL_CHANGED = "model_changed"
    READING_CAP = "reading_cap"
    HOLDER_UNREACHABLE = "holder_unreachable"
    BELOW_THRESHOLD = "below_threshold"
    HISTORY_EDITED = "history_edited"
    SHORT_SUFFIX = "short_suffix"
    LONG_SUFFIX = "long_suffix"
    DECODE_OVERLOADED = "decode_overloaded"
    NO_PREFILL_ENGINE = "no_prefill_engine"
    LAYOUT_MISMATCH = "layout_mismatch"
    RETAIN_REFUSED = "retain_refused"
    ENGINE_UNREGISTERED = "engine_unregistered"
    BATCH = "batch"
    PROMPT_LOGPROBS = "prompt_logprobs"
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_failed"
    DRAINING = "draining"
    PREFILL_OVERLOADED = "prefill_overloaded"
    FASTEST = "fastest"
    STEADY = "steady"
    READS_CAPPED = "reads_capped"
    REUSE_OFF = "reuse_off"
    VERIFY_ONLY = "verify_only"


REASON_OF_MISS: dict[MissReason, PlanReason] = {
    MissReason.UNKNOWN: PlanReason.LEASE_MISSING,
    MissReason.RELEASED: PlanReason.LEASE_RELEASED,
    MissReason.EXPIRED: PlanReason.LEASE_EXPIRED,
    MissReason.EVICTED: PlanReason.LEASE_EVICTED,
    MissReason.LOST: PlanReason.LEASE_LOST,
    MissReason.DRAINING: PlanReason.LEASE_RELEASED,
    MissReason.READING_CAP: PlanReason.READING_CAP,
    MissReason.HOLDER_CHANGED: PlanReason.LEASE_LOST,
    MissReason.UNREACHABLE: PlanReason.HOLDER_UNREACHABLE,
    MissReason.FORBIDDEN: PlanReason.LEASE_MISSING,
}
"""What a miss at the holder says of the turn."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Thresholds of the planner.

    Attributes:
        append_tokens_max: longest suffix that D prefills itself; a longer one would hold up its decoding. Counts
            until rates are measured.
        reuse_tokens_min: leases of fewer tokens are not worth a READ.
        decode_running_max: turns in flight at which D prefills nothing itself, and another D is looked for.
        reads_max: READs in flight at one engine, as source or as sink, past which no lease is read back.
        samples_min: measurements of each rate from which on predicted times decide; 0: thresholds always do.
        steady_share: another path than the conversation's last one must be faster by this share.
        delay_weight: what a second that a running stream waits for an append counts for, beside one to the first token.
        decode_alone: a decode engine may compute a whole prompt while prefill engines are overloaded.
    """

    append_tokens_max: int = 512
    reuse_tokens_min: int = 64
    decode_running_max: int = 128
    reads_max: int = 16
    samples_min: int = 32
    steady_share: float = 0.2
    delay_weight: float = 0.1
    decode_alone: bool = True


DEFAULT_LIMITS = PlanLimits()

ROOM_SHARE = 0.8
"""Turns in flight may bring so much of a decode engine's KV with them before it is thought to be out of room: the rest
is for their replies, and for the handed over turns that cannot go elsewhere."""


@value
class EngineSignal:
    """An engine as the planner sees it.

    Attributes:
        running: turns in flight.
        running_tokens: tokens of KV that they need, as far as is known.
        kv_tokens: tokens of KV that it has room for; 0: not known.
        suspect: a call to it failed a moment ago; chosen only when there is no other.
        registered: False when only the engine itself is left, without a sidecar that speaks for it.
        draining: gets no new turns; its leases are read.
        full: as many turns in flight as it may have.
        warmth: share of the turns of its like that it gets, above 0 and at most 1; less after it joined.
        backlog_tokens: tokens of prompts that it has to compute before a new one.
        cached_tokens: tokens of this prompt that its own prefix cache is likely to hold.
        held_tokens: tokens of the leases that it holds.
        reads: READs in flight, as source or as sink.
        prefill: how long it takes to compute tokens of a prompt, None when nothing is known.
    """

    engine_id: str
    role: EngineRole
    layout_hash: str
    retain: bool = True
    prefix_caching: bool = True
    running: int = 0
    running_tokens: int = 0
    kv_tokens: int = 0
    suspect: bool = False
    registered: bool = True
    draining: bool = False
    full: bool = False
    warmth: float = 1.0
    backlog_tokens: int = 0
    cached_tokens: int = 0
    held_tokens: int = 0
    reads: int = 0
    prefill: Line | None = None

    @property
    def load(self) -> float:
        """Turns in flight with one more, as an engine that is wholly warmed up would feel them."""
        return (self.running + 1) / self.warmth

    def occupied(self, tokens: int) -> float:
        """Share of its KV that turns in flight need with one more, likewise; tokens, when its room is not known."""
        return (self.running_tokens + max(1, tokens)) / (self.kv_tokens or 1) / self.warmth

    def has_room(self, tokens: int) -> bool:
        """Whether another turn is unlikely to wait for others to end; so it is where nothing is known."""
        return not self.kv_tokens or self.occupied(tokens) <= ROOM_SHARE


@value
class LeaseSignal:
    """A lease that is believed to be held, or pending.

    Attributes:
        tokens: tokens of the lease, 0 when not known.
        suffix_tokens: estimated tokens after the leased history; None when the request does not extend it.
    """

    engine_id: str
    suffix_tokens: int | None
    tokens: int = 0


@value
class ReadRates:
    """How long KV takes from one engine to another, as the sink's first token feels it.

    Attributes:
        readback: leases read by prefill engines, of any pair; None when nothing is known.
        handover: prompts read by decode engines, of any pair.
        pairs: by (source, sink), where enough is known of them.
    """

    readback: Line | None = None
    handover: Line | None = None
    pairs: Mapping[tuple[str, str], Line] = field(default_factory=dict[tuple[str, str], Line])


@value
class TurnSignals:
    """All that a plan depends on.

    Attributes:
        lease: the lease to reuse, or the reason that there is none.
        engines: the engines that may serve the turn.
        preferred_engine_id: decode engine of the conversation's latest turn; its cache may hold more than
            leases say.
        batch: the request holds several prompts, which share no lease.
        whole_prompt: the decode engine has to compute every token of the prompt, whatever is held of it.
        keep: the turn may be retained.
        prompt_tokens: estimated tokens of the whole prompt, 0 when not known.
        last_path: of the conversation's latest turn, None without one.
    """

    lease: LeaseSignal | PlanReason
    engines: tuple[EngineSignal, ...]
    limits: PlanLimits = DEFAULT_LIMITS
    preferred_engine_id: str = ""
    batch: bool = False
    whole_prompt: bool = False
    keep: bool = True
    prompt_tokens: int = 0
    last_path: TurnPath | None = None
    rates: ReadRates = ReadRates()
