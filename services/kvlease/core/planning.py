"""Which path a turn takes, and on which engines: a pure function of summary signals.

Where enough was measured, the path with the least predicted time to the first token is taken, the delay of others
included; else thresholds decide.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
        delay_weight: what a second that a running stream waits counts for, beside a second to the first token.
    """

    append_tokens_max: int = 512
    reuse_tokens_min: int = 64
    decode_running_max: int = 128
    reads_max: int = 16
    samples_min: int = 32
    steady_share: float = 0.2
    delay_weight: float = 0.1


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
        keep: the turn may be retained.
        prompt_tokens: estimated tokens of the whole prompt, 0 when not known.
        last_path: of the conversation's latest turn, None without one.
    """

    lease: LeaseSignal | PlanReason
    engines: tuple[EngineSignal, ...]
    limits: PlanLimits = DEFAULT_LIMITS
    preferred_engine_id: str = ""
    batch: bool = False
    keep: bool = True
    prompt_tokens: int = 0
    last_path: TurnPath | None = None
    rates: ReadRates = ReadRates()


@value
class Price:
    """What a path is predicted to cost, in seconds.

    Attributes:
        alone: the decode engine computes the whole prompt.
        wait_s: until the engine that computes is free.
        read_s: READs, of the lease and of what is handed over.
        compute_s: of the tokens that are not reused.
        delay_s: what others wait for it, weighted: those that decode beside it, or come to the prefill engine after it.
    """

    path: TurnPath
    wait_s: float = 0.0
    read_s: float = 0.0
    compute_s: float = 0.0
    delay_s: float = 0.0
    alone: bool = False

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.wait_s + self.read_s + self.compute_s

    @property
    def total_s(self) -> float:
        """What is compared."""
        return self.ttft_s + self.delay_s


@value
class Plan:
    """One turn's path. Without a prefill engine, the decode engine does everything.

    Attributes:
        keep: the decode engine is asked to retain the turn.
        prices: of the paths that were open, when rates decided.
    """

    path: TurnPath
    reason: PlanReason
    decode_engine_id: str
    prefill_engine_id: str = ""
    keep: bool = True
    prices: tuple[Price, ...] = ()


def plan(signals: TurnSignals) -> Plan | None:
    """The plan of a turn, None when no engine decodes."""
    lease = signals.lease if isinstance(signals.lease, LeaseSignal) else None
    decode = _decode(signals, signals.engines)
    if decode is None:
        return None
    keep = signals.keep and decode.retain
    if signals.batch:
        return Plan(TurnPath.RECOMPUTE, PlanReason.BATCH, decode.engine_id, keep=False)
    prefill, refusal = _pair(signals, decode)
    prefill_engine_id = prefill.engine_id if prefill else ""
    chosen = _path(signals, decode, prefill)
    path, reason = chosen.path, chosen.reason
    if prefill is None and path is not TurnPath.APPEND:
        appends = (
            lease is not None and lease.suffix_tokens is not None and lease.engine_id == decode.engine_id
        )
        path, reason = TurnPath.APPEND if appends else TurnPath.RECOMPUTE, refusal
    if path is TurnPath.APPEND or reason is PlanReason.PREFILL_OVERLOADED:
        prefill_engine_id = ""
    return Plan(path, reason, decode.engine_id, prefill_engine_id, keep, chosen.prices)


def with_decode_anew(made: Plan, signals: TurnSignals, engines: Collection[EngineSignal]) -> Plan:
    """The plan once its prompt is computed elsewhere, for the decode engine that is best by then.

    While a prompt waits for a prefill engine, decode engines fill and empty: those that were planned at one time would
    all meet at the engine that was best then. An engine that holds a lease of the turn keeps it.

    Args:
        engines: as they are by then.
    """
    lease, prefill_id = signals.lease, made.prefill_engine_id
    if isinstance(lease, LeaseSignal) and lease.engine_id == made.decode_engine_id:
        return made
    source = next((e for e in engines if e.engine_id == prefill_id), None)
    fitting = [e for e in engines if source is None or (e.retain and e.layout_hash == source.layout_hash)]
    decode = _decode(signals, fitting)
    if decode is None or decode.engine_id == made.decode_engine_id:
        return made
    return replace(made, decode_engine_id=decode.engine_id, keep=signals.keep and decode.retain)


def _decode(signals: TurnSignals, engines: Collection[EngineSignal]) -> EngineSignal | None:
    """The decode engine of a turn among these: that of its lease, else one with room, rather the conversation's."""
    lease, tokens = signals.lease, signals.prompt_tokens
    affinity = lease.engine_id if isinstance(lease, LeaseSignal) else signals.preferred_engine_id
    if not isinstance(lease, LeaseSignal) and affinity:
        roomy = any(e.engine_id == affinity and e.has_room(tokens) for e in engines)
        affinity = affinity if roomy else ""
    running_max = signals.limits.decode_running_max
    return choose_decode(engines, affinity, running_max=running_max, prompt_tokens=tokens)


def choose_decode(
    engines: Iterable[EngineSignal],
    affinity: str = "",
    without: Collection[str] = (),
    running_max: int = DEFAULT_LIMITS.decode_running_max,
    prompt_tokens: int = 0,
) -> EngineSignal | None:
    """The decode engine of a turn.

    The one that has its blocks unless that is overloaded while another one has less than half its load; else the
    one whose turns in flight need least of its KV, and of several the one that holds least.
    """
    able = [
        e for e in engines if e.role is EngineRole.DECODE and not e.draining and e.engine_id not in without
    ]
    idlest = min((e.load for e in able if not e.full and not e.suspect), default=0.0)

    def order(e: EngineSignal) -> tuple[bool, bool, bool, float, float, int, str]:
        overloaded = e.running >= running_max and e.load > 2 * idlest > 0
        stays = e.engine_id == affinity and not overloaded
        occupied = e.occupied(prompt_tokens)
        return e.suspect, e.full, not stays, occupied, e.load, e.held_tokens, e.engine_id

    return min(able, key=order, default=None)


def choose_prefill(
    engines: Iterable[EngineSignal],
    decode: EngineSignal,
    without: Collection[str] = (),
    prompt_tokens: int = 0,
) -> EngineSignal | None:
    """The prefill engine that would have computed the prompt first, among those that `decode` can read."""
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
    known = [e.prefill.unit_s for e in able if e.prefill is not None and e.prefill.unit_s > 0]
    usual_s = sum(known) / len(known) if known else 1.0

    def order(e: EngineSignal) -> tuple[bool, bool, float, float, str]:
        unit_s = e.prefill.unit_s if e.prefill is not None and e.prefill.unit_s > 0 else usual_s
        ahead = e.backlog_tokens + max(0, prompt_tokens - e.cached_tokens)
        return e.suspect, e.full, ahead * unit_s / e.warmth, e.load, e.engine_id

    return min(able, key=order, default=None)


def _pair(signals: TurnSignals, decode: EngineSignal) -> tuple[EngineSignal | None, PlanReason]:
    """The prefill engine, or why there is none."""
    prefills = [e for e in signals.engines if e.role is EngineRole.PREFILL and not e.draining]
    chosen = choose_prefill(prefills, decode, prompt_tokens=signals.prompt_tokens)
    if not decode.registered or (prefills and not any(e.registered for e in prefills)):
        return None, PlanReason.ENGINE_UNREGISTERED
    if not prefills:
        return None, PlanReason.NO_PREFILL_ENGINE
    if not any(e.layout_hash == decode.layout_hash for e in prefills):
        return None, PlanReason.LAYOUT_MISMATCH
    return chosen, PlanReason.RETAIN_REFUSED


@value
class _Choice:
    path: TurnPath
    reason: PlanReason
    prices: tuple[Price, ...] = ()


def _path(signals: TurnSignals, decode: EngineSignal, prefill: EngineSignal | None) -> _Choice:
    lease, limits = signals.lease, signals.limits
    if isinstance(lease, PlanReason):
        return _without_lease(signals, lease, decode, prefill)
    holder = next((e for e in signals.engines if e.engine_id == lease.engine_id), None)
    if holder is None:
        return _Choice(TurnPath.RECOMPUTE, PlanReason.LEASE_LOST)
    if 0 < lease.tokens < limits.reuse_tokens_min:
        return _Choice(TurnPath.RECOMPUTE, PlanReason.BELOW_THRESHOLD)
    readable = max(holder.reads, prefill.reads if prefill else 0) < limits.reads_max
    if lease.suffix_tokens is None:
        return _read_unless_capped(PlanReason.HISTORY_EDITED, readable=readable)
    appendable = (
        decode.engine_id == lease.engine_id
        and decode.prefix_caching
        and decode.running < limits.decode_running_max
    )
    prices = _prices(signals, lease, lease.suffix_tokens, decode, prefill)
    open_prices = tuple(
        price
        for price in prices
        if (price.path is not TurnPath.APPEND or appendable)
        and (price.path is not TurnPath.READBACK or readable)
    )
    if open_prices:
        return _cheapest(open_prices, signals)
    if lease.suffix_tokens <= limits.append_tokens_max and appendable:
        return _Choice(TurnPath.APPEND, PlanReason.SHORT_SUFFIX)
    return _read_unless_capped(
        _why_not_append(limits, lease.suffix_tokens, holder, decode), readable=readable
    )


def _without_lease(
    signals: TurnSignals, why: PlanReason, decode: EngineSignal, prefill: EngineSignal | None
) -> _Choice:
    """Nothing is held: a prefill engine computes the prompt.

    Unless the decode engine alone is done before it could begin, and all together wait clearly less that way.
    """
    prices = _prices_without_lease(signals, decode, prefill)
    if prices:
        handed, alone = prices
        better = alone.total_s < handed.total_s * (1.0 - signals.limits.steady_share)
        if better and alone.ttft_s < handed.wait_s:
            return _Choice(TurnPath.RECOMPUTE, PlanReason.PREFILL_OVERLOADED, prices)
    return _Choice(TurnPath.RECOMPUTE, why, prices)


def _read_unless_capped(reason: PlanReason, *, readable: bool) -> _Choice:
    if readable:
        return _Choice(TurnPath.READBACK, reason)
    return _Choice(TurnPath.RECOMPUTE, PlanReason.READS_CAPPED)


def _why_not_append(
    limits: PlanLimits, suffix_tokens: int, holder: EngineSignal, decode: EngineSignal
) -> PlanReason:
    if suffix_tokens > limits.append_tokens_max:
        return PlanReason.LONG_SUFFIX
    if holder.running >= limits.decode_running_max:
        return PlanReason.DECODE_OVERLOADED
    if not decode.prefix_caching:
        return PlanReason.RETAIN_REFUSED
    return PlanReason.DRAINING if holder.draining else PlanReason.DECODE_FAILED


def _cheapest(prices: tuple[Price, ...], signals: TurnSignals) -> _Choice:
    """The least price; the conversation's last path stays while no other one is clearly cheaper.

    Recomputing is none to stay on: it is what every first turn does.
    """
    best = min(prices, key=lambda price: price.total_s)
    reusing = (price for price in prices if price.path is not TurnPath.RECOMPUTE)
    last = next((price for price in reusing if price.path is signals.last_path), best)
    if last is not best and last.total_s * (1.0 - signals.limits.steady_share) <= best.total_s:
        return _Choice(last.path, PlanReason.STEADY, prices)
    return _Choice(best.path, PlanReason.FASTEST, prices)


def _prices(
    signals: TurnSignals,
    lease: LeaseSignal,
    suffix_tokens: int,
    decode: EngineSignal,
    prefill: EngineSignal | None,
) -> tuple[Price, ...]:
    """What each path would cost; nothing unless all of it is known, since guesses compare with nothing."""
    limits = signals.limits
    if prefill is None or not lease.tokens or not limits.samples_min:
        return ()
    pairs, rates = signals.rates.pairs, signals.rates
    readback = pairs.get((lease.engine_id, prefill.engine_id), rates.readback)
    handover = pairs.get((prefill.engine_id, decode.engine_id), rates.handover)
    appending, computing = decode.prefill, prefill.prefill
    if appending is None or computing is None or readback is None or handover is None:
        return ()
    if min(line.samples for line in (appending, computing, readback, handover)) < limits.samples_min:
        return ()
    prompt = max(signals.prompt_tokens, lease.tokens + suffix_tokens)
    # The decode engine that holds the lease has the prefix in its own cache: only the rest is handed over.
    handed = suffix_tokens if decode.engine_id == lease.engine_id else prompt
    handed_s = handover.seconds(max(1, handed))
    read_s = readback.seconds(lease.tokens - prefill.cached_tokens) + handed_s
    suffix = max(1, suffix_tokens)
    return (
        # Only what is computed holds up those that decode: the rest is the turn's own way there and back.
        Price(
            TurnPath.APPEND,
            wait_s=appending.unit_s * decode.backlog_tokens,
            compute_s=appending.seconds(suffix),
            delay_s=limits.delay_weight * decode.running * appending.unit_s * suffix,
        ),
        _price_of_prefill(TurnPath.READBACK, prefill, computing, suffix, read_s),
        _price_of_prefill(
            TurnPath.RECOMPUTE, prefill, computing, max(1, prompt - prefill.cached_tokens), handed_s
        ),
    )


def _price_of_prefill(
    path: TurnPath, prefill: EngineSignal, computing: Line, tokens: int, read_s: float
) -> Price:
    """What it costs to have tokens computed by a prefill engine.

    The longer the queue before a turn, the more come while it waits: as many as it finds there (Little's law). Each
    of them waits for its tokens, too.
    """
    return Price(
        path,
        wait_s=computing.unit_s * prefill.backlog_tokens,
        read_s=read_s,
        compute_s=computing.seconds(tokens),
        delay_s=prefill.running * computing.unit_s * tokens,
    )


def _prices_without_lease(
    signals: TurnSignals, decode: EngineSignal, prefill: EngineSignal | None
) -> tuple[Price, ...]:
    """What the prompt costs at a prefill engine, and at the decode engine alone; nothing unless both can be told.

    What an engine has not computed yet takes it as long as its like. A whole prompt holds up those that decode beside
    it for so long that they notice: it is worth it only where all together wait for less, so their delay has no weight.
    """
    limits, prompt = signals.limits, signals.prompt_tokens
    computing = prefill.prefill if prefill is not None else None
    if prefill is None or computing is None or not prompt or not limits.samples_min:
        return ()
    if computing.samples < limits.samples_min or not decode.kv_tokens or not decode.has_room(prompt):
        return ()
    if decode.running >= limits.decode_running_max:
        return ()
    own = decode.prefill
    own = own if own is not None and own.samples >= limits.samples_min else computing
    handover = signals.rates.pairs.get((prefill.engine_id, decode.engine_id), signals.rates.handover)
    handed_s = handover.seconds(prompt) if handover is not None else 0.0
    return (
        _price_of_prefill(
            TurnPath.RECOMPUTE, prefill, computing, max(1, prompt - prefill.cached_tokens), handed_s
        ),
        Price(
            TurnPath.RECOMPUTE,
            wait_s=own.unit_s * decode.backlog_tokens,
            compute_s=own.seconds(prompt),
            delay_s=decode.running * own.unit_s * prompt,
            alone=True,
        ),
    )
