"""Which path a turn takes, and on which engines: a pure function of summary signals."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum

from kvlease.core.lease import MissReason
from kvlease.core.records import EngineRole


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
    PREFILL_FAILED = "prefill_failed"
    DECODE_FAILED = "decode_failed"


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
        append_tokens_max: longest suffix that D prefills itself; a longer one would hold up its decoding.
        reuse_tokens_min: leases of fewer tokens are not worth a READ.
        decode_running_max: turns in flight at which D prefills nothing itself.
    """

    append_tokens_max: int = 512
    reuse_tokens_min: int = 64
    decode_running_max: int = 128


DEFAULT_LIMITS = PlanLimits()


@dataclass(frozen=True, slots=True)
class EngineSignal:
    """An engine as the planner sees it.

    Attributes:
        running: turns in flight.
        suspect: a call to it failed a moment ago; chosen only when there is no other.
        registered: False when only the engine itself is left, without a sidecar that speaks for it.
        draining: gets no new turns; its leases are read.
    """

    engine_id: str
    role: EngineRole
    layout_hash: str
    retain: bool = True
    prefix_caching: bool = True
    running: int = 0
    suspect: bool = False
    registered: bool = True
    draining: bool = False


@dataclass(frozen=True, slots=True)
class LeaseSignal:
    """A lease that is believed to be held, or pending.

    Attributes:
        tokens: tokens of the lease, 0 when not known.
        suffix_tokens: estimated tokens after the leased history; None when the request does not extend it.
    """

    engine_id: str
    suffix_tokens: int | None
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class TurnSignals:
    """All that a plan depends on.

    Attributes:
        lease: the lease to reuse, or the reason that there is none.
        engines: the engines that may serve the turn.
        preferred_engine_id: decode engine of the conversation's latest turn; its cache may hold more than
            leases say.
        batch: the request holds several prompts, which share no lease.
    """

    lease: LeaseSignal | PlanReason
    engines: tuple[EngineSignal, ...]
    limits: PlanLimits = DEFAULT_LIMITS
    preferred_engine_id: str = ""
    batch: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """One turn's path. Without a prefill engine, the decode engine does everything.

    Attributes:
        keep: the decode engine is asked to retain the turn.
    """

    path: TurnPath
    reason: PlanReason
    decode_engine_id: str
    prefill_engine_id: str = ""
    keep: bool = True


def plan(signals: TurnSignals) -> Plan | None:
    """The plan of a turn, None when no engine decodes."""
    lease = signals.lease if isinstance(signals.lease, LeaseSignal) else None
    affinity = lease.engine_id if lease else signals.preferred_engine_id
    decode = choose_decode(signals.engines, affinity)
    if decode is None:
        return None
    if signals.batch:
        return Plan(TurnPath.RECOMPUTE, PlanReason.BATCH, decode.engine_id, keep=False)
    prefill, refusal = _pair(signals.engines, decode)
    prefill_engine_id = prefill.engine_id if prefill else ""
    path, reason = _path(signals, decode)
    if prefill is None and path is not TurnPath.APPEND:
        appends = (
            lease is not None and lease.suffix_tokens is not None and lease.engine_id == decode.engine_id
        )
        path, reason = TurnPath.APPEND if appends else TurnPath.RECOMPUTE, refusal
    if path is TurnPath.APPEND:
        prefill_engine_id = ""
    return Plan(path, reason, decode.engine_id, prefill_engine_id, keep=decode.retain)


def choose_decode(
    engines: Iterable[EngineSignal], affinity: str = "", without: Collection[str] = ()
) -> EngineSignal | None:
    """The decode engine of a turn.

    The one that has its blocks, else the one with the fewest turns in flight.
    """
    able = [
        e for e in engines if e.role is EngineRole.DECODE and not e.draining and e.engine_id not in without
    ]
    return min(able, key=lambda e: (e.suspect, e.engine_id != affinity, e.running, e.engine_id), default=None)


def choose_prefill(
    engines: Iterable[EngineSignal], decode: EngineSignal, without: Collection[str] = ()
) -> EngineSignal | None:
    """The prefill engine with the fewest turns in flight among those that `decode` can read."""
    able = [
        e
        for e in engines
        if e.role is EngineRole.PREFILL
        and not e.draining
        and e.engine_id not in without
        and e.retain
        and decode.retain
        and e.layout_hash == decode.layout_hash
    ]
    return min(able, key=lambda e: (e.suspect, e.running, e.engine_id), default=None)


def _pair(engines: tuple[EngineSignal, ...], decode: EngineSignal) -> tuple[EngineSignal | None, PlanReason]:
    prefills = [e for e in engines if e.role is EngineRole.PREFILL and not e.draining]
    chosen = choose_prefill(prefills, decode)
    if not decode.registered or (prefills and not any(e.registered for e in prefills)):
        return None, PlanReason.ENGINE_UNREGISTERED
    if not prefills:
        return None, PlanReason.NO_PREFILL_ENGINE
    if not any(e.layout_hash == decode.layout_hash for e in prefills):
        return None, PlanReason.LAYOUT_MISMATCH
    return chosen, PlanReason.RETAIN_REFUSED


def _path(signals: TurnSignals, decode: EngineSignal) -> tuple[TurnPath, PlanReason]:
    lease, limits = signals.lease, signals.limits
    if isinstance(lease, PlanReason):
        return TurnPath.RECOMPUTE, lease
    if not any(e.engine_id == lease.engine_id for e in signals.engines):
        return TurnPath.RECOMPUTE, PlanReason.LEASE_LOST
    if 0 < lease.tokens < limits.reuse_tokens_min:
        return TurnPath.RECOMPUTE, PlanReason.BELOW_THRESHOLD
    if lease.suffix_tokens is None:
        return TurnPath.READBACK, PlanReason.HISTORY_EDITED
    if lease.suffix_tokens > limits.append_tokens_max:
        return TurnPath.READBACK, PlanReason.LONG_SUFFIX
    if decode.running >= limits.decode_running_max:
        return TurnPath.READBACK, PlanReason.DECODE_OVERLOADED
    if decode.engine_id != lease.engine_id or not decode.prefix_caching:
        return (
            TurnPath.READBACK,
            PlanReason.DECODE_FAILED if decode.prefix_caching else PlanReason.RETAIN_REFUSED,
        )
    return TurnPath.APPEND, PlanReason.SHORT_SUFFIX
