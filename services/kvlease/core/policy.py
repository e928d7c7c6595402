"""In which order leases are worth keeping.

An engine that lacks B bytes ends leases until it has them, and should lose as little time by it as possible.
Ending lease i costs what its conversation will wait longer: p_i * s_i seconds, with

    p_i  the probability that the conversation goes on while the lease would still be there,
    s_i  the time to compute its tokens again,

and frees b_i bytes, those that no other lease keeps. Choosing leases with the least sum of p_i * s_i and at least
B bytes is a knapsack; leases are small beside B or B is asked for again and again, so the greedy order is as good
as the best one to within one lease: least p_i * s_i / b_i first. That quotient, seconds per byte, is the value.

p is a conditional probability. Let r be the share of turns that are followed by another one, and F the
distribution of the gaps before it. A conversation that has been idle for a is still to come back within h with

    p(a, h) = r * (F(a + h) - F(a)) / (1 - r * F(a)).

F is learnt; before that it is a / (a + 60 s), whose hazard falls with a: among equal leases the one that was used
least recently goes first. h is how far ahead it pays to look: a while for a lease that is being renewed, and for
one that is renewed no longer only the rest of its time, since its router no longer waits for it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvlease.core.gaps import GapHistogram

HORIZON_S = 120.0
RENEWED_SHARE = 0.5
"""A lease with less of its duration left has missed renewals: its router has let it go, or is away."""

PRIOR_WEIGHT = 20.0
"""Turns that the prior counts for, in the distribution of gaps and in the share of turns that are followed."""

PRIOR_MEDIAN_S = 60.0
PRIOR_RETURNS = 0.5


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
        idle_s: since its last turn or READ.
        remaining_s: until it ends unless it is renewed.
        duration_s: what it was renewed for.
    """

    tokens: int
    exclusive_bytes: int
    idle_s: float
    remaining_s: float
    duration_s: float

    @property
    def horizon_s(self) -> float:
        """How far ahead its reuse is looked for."""
        renewed = self.remaining_s >= RENEWED_SHARE * self.duration_s
        return HORIZON_S if renewed else max(0.0, self.remaining_s)


class ReuseModel:
    """How likely conversations go on, learnt from how leases ended. Bounded memory."""

    def __init__(self) -> None:
        self._gaps = GapHistogram()
        self._went_on = PRIOR_RETURNS * PRIOR_WEIGHT
        self._turns = PRIOR_WEIGHT

    def went_on(self, idle_s: float) -> None:
        """A conversation that was idle for so long used its lease, or had its next turn."""
        self._gaps.add(idle_s)
        self._count(1.0)

    def given_up(self) -> None:
        """A lease expired unused."""
        self._count(0.0)

    def probability(self, idle_s: float, horizon_s: float) -> float:
        """That a conversation idle for so long goes on within the horizon; see the module."""
        share = self._went_on / self._turns
        before, after = self._share_within(idle_s), self._share_within(idle_s + horizon_s)
        return share * (after - before) / (1.0 - share * before)

    def _count(self, went_on: float) -> None:
        kept = 1.0 - 1.0 / (50.0 * PRIOR_WEIGHT)
        # The prior does not fade: a share of 0 or 1 would be a certainty that nobody has.
        prior = PRIOR_RETURNS * PRIOR_WEIGHT
        self._went_on = prior + (self._went_on - prior) * kept + went_on
        self._turns = PRIOR_WEIGHT + (self._turns - PRIOR_WEIGHT) * kept + 1.0

    def _share_within(self, gap_s: float) -> float:
        known, prior = self._gaps.weight, gap_s / (gap_s + PRIOR_MEDIAN_S)
        return (known * self._gaps.share_within(gap_s) + PRIOR_WEIGHT * prior) / (known + PRIOR_WEIGHT)


def keep_value(use: LeaseUse, model: ReuseModel, cost: PrefillCost) -> float:
    """Seconds saved per byte by keeping a lease; infinite when its end would free nothing."""
    if use.exclusive_bytes <= 0:
        return math.inf
    expected_s = model.probability(use.idle_s, use.horizon_s) * cost.seconds(use.tokens)
    return expected_s / use.exclusive_bytes


def eviction_order(uses: Mapping[int, LeaseUse], model: ReuseModel, cost: PrefillCost) -> tuple[int, ...]:
    """Lease ids from the least to the most worth keeping; among equals the one idle for longest goes first."""
    ranked = sorted((keep_value(use, model, cost), -use.idle_s, lease_id) for lease_id, use in uses.items())
    return tuple(lease_id for _, _, lease_id in ranked)
