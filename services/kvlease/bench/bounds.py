"""What no policy can exceed: a clairvoyant that keeps exactly what will be continued, for exactly as long.

A turn that is continued offers its shared tokens for its bytes times its gap. Without a limit on the bytes at one time,
taking the offers in order of tokens per GiB and second, the last one in part, is the best that there is. Within a
budget the bytes kept at any moment are limited, too. For any price p(t) of a GiB at time t the reuse is at most

    sum over offers of max(0, tokens - bytes * integral of p over its gap) + budget * integral of p,

so that any price gives a bound (weak duality of the linear program); the prices are improved step by step, in slots of
a minute, and the least bound counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kvlease.bench.trace import Visit

SLOT_S = 60.0
STEPS = 150


@dataclass(frozen=True, slots=True)
class Offer:
    """A turn that is continued.

    Attributes:
        tokens: saved if it is kept until then.
    """

    begin_s: float
    end_s: float
    gib: float
    tokens: int

    @property
    def gib_s(self) -> float:
        """What keeping it occupies."""
        return self.gib * (self.end_s - self.begin_s)


def offers_of(visits: Sequence[Visit]) -> list[Offer]:
    """The turns that are continued, each by the first request that does so."""
    offers: dict[int, Offer] = {}
    for visit in visits:
        if visit.parent >= 0 and visit.parent not in offers:
            parent = visits[visit.parent]
            offers[visit.parent] = Offer(parent.at_s, visit.at_s, parent.gib, visit.shared_tokens)
    return list(offers.values())


def tokens_at_most(offers: Sequence[Offer], gib_s: float) -> float:
    """The most tokens that can be saved for so many GiB and seconds."""
    tokens = 0.0
    for offer in _by_worth(offers):
        if offer.gib_s >= gib_s:
            return tokens + offer.tokens * (gib_s / offer.gib_s if offer.gib_s else 1.0)
        gib_s -= offer.gib_s
        tokens += offer.tokens
    return tokens


def gib_s_at_least(offers: Sequence[Offer], tokens: float) -> float:
    """The fewest GiB times seconds for which so many tokens can be saved; as many as there are for more."""
    gib_s = 0.0
    for offer in _by_worth(offers):
        if offer.tokens >= tokens:
            return gib_s + offer.gib_s * tokens / offer.tokens
        tokens -= offer.tokens
        gib_s += offer.gib_s
    return gib_s


def tokens_within(offers: Sequence[Offer], budget_gib: float) -> float:
    """A bound on the tokens that can be saved with so many GiB at any moment."""
    if not offers:
        return 0.0
    origin_s = min(offer.begin_s for offer in offers)
    slots = int((max(offer.end_s for offer in offers) - origin_s) / SLOT_S) + 1
    # The price at which the constraint on the sum of all moments alone would be met is a good one to begin with.
    price = _price_of(offers, budget_gib * slots * SLOT_S)
    prices, best, step = [price] * slots, float("inf"), price / 4
    for number in range(STEPS):
        bound, used_gib_s = _dual(offers, budget_gib, prices, origin_s)
        best = min(best, bound)
        fullness = [used / (budget_gib * SLOT_S) - 1.0 for used in used_gib_s]
        shrink = step / (1.0 + number / 10)
        prices = [
            max(0.0, p + shrink * max(-1.0, min(1.0, f))) for p, f in zip(prices, fullness, strict=True)
        ]
    return best


def _dual(
    offers: Sequence[Offer], budget_gib: float, prices: Sequence[float], origin_s: float
) -> tuple[float, list[float]]:
    """The bound at some prices, and what is kept at them in each slot, in GiB and seconds."""
    paid = [0.0, *accumulate(price * SLOT_S for price in prices)]

    def paid_until(time_s: float) -> float:
        place = (time_s - origin_s) / SLOT_S
        slot = min(int(place), len(prices) - 1)
        return paid[slot] + (place - slot) * SLOT_S * prices[slot]

    bound = budget_gib * paid[-1]
    # How the kept GiB changes at each slot's begin, and what the parts of slots add to it.
    used, rise = [0.0] * len(prices), [0.0] * (len(prices) + 1)
    for offer in offers:
        gain = offer.tokens - offer.gib * (paid_until(offer.end_s) - paid_until(offer.begin_s))
        if gain <= 0:
            continue
        bound += gain
        for time_s, sign in ((offer.begin_s, 1.0), (offer.end_s, -1.0)):
            slot = min(int((time_s - origin_s) / SLOT_S), len(prices) - 1)
            used[slot] += sign * offer.gib * (origin_s + (slot + 1) * SLOT_S - time_s)
            rise[slot + 1] += sign * offer.gib
    full = [0.0, *accumulate(rise)]
    return bound, [part + before * SLOT_S for part, before in zip(used, full[1:], strict=False)]


def _price_of(offers: Sequence[Offer], gib_s: float) -> float:
    """Tokens per GiB and second of the offer that is the last to be taken for so much."""
    worth = 0.0
    for offer in _by_worth(offers):
        worth = offer.tokens / offer.gib_s if offer.gib_s else 0.0
        gib_s -= offer.gib_s
        if gib_s <= 0:
            return worth
    return worth / 2


def _by_worth(offers: Sequence[Offer]) -> list[Offer]:
    return sorted(offers, key=lambda offer: offer.gib_s / max(1, offer.tokens))


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float | None:
    """The second number at a first one between neighbours, None outside of them."""
    for (low, first), (high, second) in pairwise(sorted(points)):
        if low <= at <= high:
            return first if high == low else first + (second - first) * (at - low) / (high - low)
    return None
