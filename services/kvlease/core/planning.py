"""Which path a turn takes, and on which engines: a pure function of summary signals.

Where enough was measured, the path with the least predicted time to the first token is taken, the delay of others
included; else thresholds decide.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace

from kvlease.core.pricing import Price, prices_with_lease, prices_without_lease
from kvlease.core.records import EngineRole
from kvlease.core.signals import (
    DEFAULT_LIMITS,
    EngineSignal,
    LeaseSignal,
    PlanLimits,
    PlanReason,
    TurnPath,
    TurnSignals,
)
from kvlease.core.values import value


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
    if signals.whole_prompt:
        return Plan(TurnPath.RECOMPUTE, PlanReason.PROMPT_LOGPROBS, decode.engine_id, keep=keep)
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
    if prefill_id and source is None:
        return made  # what fits the KV that waits at it cannot be told
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
    prices = prices_with_lease(signals, lease, lease.suffix_tokens, decode, prefill)
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
    if (
        appendable
        and prefill is not None
        and limits.samples_min
        and _waits(prefill, decode, lease.suffix_tokens)
    ):
        return _Choice(TurnPath.APPEND, PlanReason.PREFILL_OVERLOADED)
    return _read_unless_capped(
        _why_not_append(limits, lease.suffix_tokens, holder, decode), readable=readable
    )


def _waits(prefill: EngineSignal, decode: EngineSignal, tokens: int) -> bool:
    """Whether a decode engine is done with so many tokens before a prefill engine begins, to the good of all together.

    While rates are not known, a token is thought to take each engine as long.
    """
    done = decode.backlog_tokens + tokens
    return done < prefill.backlog_tokens and decode.running <= prefill.running


def _without_lease(
    signals: TurnSignals, why: PlanReason, decode: EngineSignal, prefill: EngineSignal | None
) -> _Choice:
    """Nothing is held: a prefill engine computes the prompt.

    Unless the decode engine alone is done before it could begin, and all together wait clearly less that way.
    """
    prices = prices_without_lease(signals, decode, prefill)
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
