"""In which order leases are worth keeping.

An engine has so many bytes to keep leases in, and they should save as much time as possible. A lease i is kept until
its conversation goes on, or until it is given up h seconds from now. It saves s_i seconds, the time to compute its
tokens again, with probability p_i(a, h), where a is for how long its conversation has been idle; and it occupies b_i
bytes, those that no other lease keeps, for t_i(a, h) seconds on average. Filling bytes and time with what saves most
is a knapsack; leases are small beside the whole, so the greedy order is as good as the best one to within one lease:
that with the least

    value_i = max over h of p_i(a, h) / t_i(a, h) * s_i / b_i        (seconds saved per byte and second)

goes first. With r the share of turns that are followed by another one, and F the distribution of the gaps before it,

    p(a, h) = r * (F(a + h) - F(a)) / (1 - r * F(a))
    t(a, h) = integral from a to a + h of (1 - r * F(u)) du / (1 - r * F(a)),

so p / t, the rate of reuse, needs no conditioning. Where reuse grows less likely with every second, h is short and the
rate is the hazard: the least recently used of equal leases goes first. Where nobody comes back before a minute, a
conversation that has waited for that minute is worth more than a fresh one, and so some are kept for long enough to
be of use, where all of them would be kept for too short.

r and F are learnt, r by the number of turns that a conversation has had: of first turns few are followed, of tenth
turns most. A lease whose renewals have ceased counts less the less of its time is left: its router expects nothing of
it any more.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvlease.core.reuse import ReuseModel

RENEWED_SHARE = 0.5
"""A lease with less of its duration left has missed renewals: its router has let it go, or is away."""

LET_GO_SHARE = 0.1
"""What such a lease is worth beside one that is renewed, before its time runs down."""


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Time to compute a prompt: linear in its tokens, and quadratic through attention.

    Attributes:
        token_s: to compute one token alone; a constant where nobody measured it, which leaves the order as it is.
        attention_tokens: length at which attention costs as much as all the rest: about 60,000 for a model of
            8 billion parameters (2 * 8e9 operations a token against 2 * 32 layers * 4096 a pair).
    """

    token_s: float = 1e-4
    attention_tokens: float = 60_000.0

    def seconds(self, tokens: int) -> float:
        """Time to compute a prompt of so many tokens."""
        return self.token_s * tokens * (1.0 + tokens / self.attention_tokens)


@dataclass(frozen=True, slots=True)
class LeaseUse:
    """What the value of a lease depends on.

    Attributes:
        exclusive_bytes: bytes that only this lease keeps.
        turns: earlier turns of its conversation, as far as they are known.
        idle_s: since its last turn or READ.
        remaining_s: until it ends unless it is renewed.
        duration_s: what it was renewed for.
    """

    tokens: int
    exclusive_bytes: int
    turns: int
    idle_s: float
    remaining_s: float
    duration_s: float

    @property
    def expectation(self) -> float:
        """What its router expects of it: 1 while it is renewed, and down to 0 at its end otherwise."""
        left = self.remaining_s / self.duration_s if self.duration_s > 0 else 0.0
        return 1.0 if left >= RENEWED_SHARE else LET_GO_SHARE * max(0.0, left)


def keep_value(use: LeaseUse, model: ReuseModel, cost: PrefillCost) -> float:
    """Seconds saved per byte and second by keeping a lease; infinite when its end would free nothing."""
    if use.exclusive_bytes <= 0:
        return math.inf
    saved_s = use.expectation * cost.seconds(use.tokens)
    return model.rate(use.turns, use.idle_s) * saved_s / use.exclusive_bytes


def eviction_order(uses: Mapping[int, LeaseUse], model: ReuseModel, cost: PrefillCost) -> tuple[int, ...]:
    """Lease ids from the least to the most worth keeping; among equals the one idle for longest goes first."""
    if len(uses) < 2:
        return tuple(uses)
    ranked = sorted((keep_value(use, model, cost), -use.idle_s, lease_id) for lease_id, use in uses.items())
    return tuple(lease_id for _, _, lease_id in ranked)
