"""What each path of a turn is predicted to cost, by measured rates."""

from kvlease.core.rates import Line
from kvlease.core.signals import EngineSignal, LeaseSignal, TurnPath, TurnSignals
from kvlease.core.values import value


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


def prices_with_lease(
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


def prices_without_lease(
    signals: TurnSignals, decode: EngineSignal, prefill: EngineSignal | None
) -> tuple[Price, ...]:
    """What the prompt costs at a prefill engine, and at the decode engine alone; nothing unless both can be told.

    What an engine has not computed yet takes it as long as its like. A whole prompt holds up those that decode beside
    it for so long that they notice: it is worth it only where all together wait for less, so their delay has no weight.
    """
    limits, prompt = signals.limits, signals.prompt_tokens
    computing = prefill.prefill if prefill is not None else None
    if (
        prefill is None
        or computing is None
        or not prompt
        or not limits.samples_min
        or not limits.decode_alone
    ):
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
