"""For how long an idle conversation is worth keeping, learnt from those that went on and those that did not.

Keeping a conversation for a second more saves its prefill with the probability that it goes on in that second, its
hazard h, and occupies its bytes for that second. Tokens saved and bytes occupied are nearly in proportion, so that one
price p, in returns per second of keeping, says for all conversations what keeping is worth: one that is kept for t
seconds gains

    G(t) = (1 - S(t)) - p * integral from 0 to t of S(u) du,        S(t) = exp(-integral from 0 to t of h(u) du),

and it is kept for the t with the most of it, at the end of its turn. Nothing comes back once it was let go, so there is
no other choice; where h falls with time, t is where h reaches the price.

The hazard is a prior times factors, each a ratio of the returns that were seen to those that were expected without it:

    h(u | turn) = prior(u | turns) * age(u) * prompt * new * reply * pace(u) * tenant(u),

that is Poisson regression on logarithmic buckets, solved online, one factor against the others, with a gamma prior that
holds each at 1 until it is known better: (seen + k) / (expected + k). A conversation's own pace is the gap before its
last turn; pace and tenant have a factor for each of a few ranges of idle time, for people and programs differ in when
they return, not only in how often. The prior is r * F: with chances of going on that differ from one conversation to
the next, evenly but for a weight on those that end at once, those that went on k times go on with
r = (1 + k) / (3 + k) (the beta-geometric law of Fader and Hardie, 2007), after a log-logistic gap F.

Idle conversations are followed whether they are kept or not, and each bucket of idle time counts as soon as it has
passed: learning from returns alone, or from those that were kept, would find what it did to be right. Pure: times are
seconds of the caller's clock; memory is bounded.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvlease.core.errors import InvalidArgument
from kvlease.core.values import value

FIRST_EDGE_S = 8.0
BUCKETS_PER_DOUBLING = 2
BUCKETS = 19
"""Buckets of idle time, up to 8 s and then each 41 % wider than the one before, to 4096 s."""

EDGES_S = (0.0, *(FIRST_EDGE_S * 2 ** (edge / BUCKETS_PER_DOUBLING) for edge in range(BUCKETS)))
"""Where they begin and end. A conversation that is idle for longer than the last one has ended, as far as we know."""

ENDS_S = EDGES_S[1:]
WIDTHS_S = tuple(end_s - begin_s for begin_s, end_s in pairwise(EDGES_S))

RANGE_EDGES_S = (16.0, 64.0, 256.0, 1024.0)
"""Between the ranges of idle time, and of gaps."""

RANGES = len(RANGE_EDGES_S) + 1

PRIOR_MEDIAN_S = 180.0
PRIOR_SHAPE = 1.5
"""Of the gaps that are expected while nothing is known."""

TURNS_TOLD_APART = 32
AGE_WEIGHT = 20.0
CLASS_WEIGHT = 5.0
TENANT_WEIGHT = 20.0
PACE_WEIGHT = 50.0
"""Returns that hold a factor at 1: of a bucket of idle time, of a class of turns, and of who goes on, in each range."""

MEMORY = 2000.0
"""Returns that a factor remembers: each that is seen or expected fades the others."""

BITS_MAX = 24
FOLLOWED_MAX = 65_536
TENANTS_MAX = 1000

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class KeepPolicy:
    """How long a conversation is kept after a turn.

    Attributes:
        returns_per_hour: the price: an hour of keeping must be expected to bring so many returns.
        floor_s: kept at least this long.
        cap_s: kept at most this long.
    """

    returns_per_hour: float = 1.0
    floor_s: float = 30.0
    cap_s: float = 600.0

    def __post_init__(self) -> None:
        if not 0 < self.returns_per_hour < math.inf:
            raise InvalidArgument(
                f"returns_per_hour is {self.returns_per_hour}: it must be above 0 and finite"
            )
        if not 0 < self.floor_s <= self.cap_s:
            raise InvalidArgument(
                f"floor_s is {self.floor_s} and cap_s {self.cap_s}: the floor is above 0, and not above the cap"
            )


@value
class TurnEnd:
    """What is known of a conversation when its turn ends.

    Attributes:
        turns: earlier turns.
        prompt_tokens: of the turn, 0 when the engine told none.
        new_tokens: those among them that no earlier turn held.
        last_gap_s: before the turn; None when there was none.
    """

    tenant: str
    turns: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    reply_tokens: int = 0
    last_gap_s: float | None = None


class _Factor:
    """Returns seen beside those expected without it, by range of idle time; old ones fade."""

    __slots__ = ("_expected", "_seen", "_weight", "ratios")

    def __init__(self, weight: float, ranges: int) -> None:
        self._weight = weight
        self._seen = [0.0] * ranges
        self._expected = [0.0] * ranges
        self.ratios = [1.0] * ranges

    def count(self, place: int, seen: float, expected: float) -> None:
        """Takes what was seen and what all factors expected, this one among them."""
        expected /= self.ratios[place]
        kept = max(0.0, 1.0 - (seen + expected) / (2 * MEMORY))
        self._seen[place] = self._seen[place] * kept + seen
        self._expected[place] = self._expected[place] * kept + expected
        self.ratios[place] = (self._seen[place] + self._weight) / (self._expected[place] + self._weight)


@dataclass(slots=True)
class _Idle:
    """A conversation that is followed; the factors of its class, with one range and with all of them."""

    key: Hashable
    since_s: float
    prior: Sequence[float]
    whole: Sequence[_Factor]
    ranged: Sequence[_Factor]
    followed: bool = True


@dataclass(slots=True)
class _Classes:
    """Factors of the classes of turns; tenants that had no turn for longest leave first."""

    whole: dict[tuple[str, int], _Factor] = field(default_factory=dict[tuple[str, int], _Factor])
    paces: dict[int, _Factor] = field(default_factory=dict[int, _Factor])
    tenants: OrderedDict[str, _Factor] = field(default_factory=OrderedDict[str, _Factor])

    def of_turn(self, turn: TurnEnd) -> tuple[_Factor, ...]:
        """Factors of the turn itself, alike at any idle time."""
        return (
            self._whole("prompt", turn.prompt_tokens),
            self._whole("later" if turn.turns else "first", turn.new_tokens),
            self._whole("reply", turn.reply_tokens),
        )

    def of_owner(self, turn: TurnEnd) -> tuple[_Factor, _Factor]:
        """Factors of who goes on, by range of idle time."""
        place = -1 if turn.last_gap_s is None else _range_of(turn.last_gap_s)
        pace = self.paces.get(place)
        if pace is None:
            pace = self.paces[place] = _Factor(PACE_WEIGHT, RANGES)
        tenant = self.tenants.get(turn.tenant)
        if tenant is None:
            tenant = self.tenants[turn.tenant] = _Factor(TENANT_WEIGHT, RANGES)
            if len(self.tenants) > TENANTS_MAX:
                self.tenants.popitem(last=False)
        self.tenants.move_to_end(turn.tenant)
        return pace, tenant

    def _whole(self, kind: str, tokens: int) -> _Factor:
        named = (
            kind,
            min(max(0, tokens).bit_length(), BITS_MAX),
        )  # each class is twice as wide as the one before
        factor = self.whole.get(named)
        if factor is None:
            factor = self.whole[named] = _Factor(CLASS_WEIGHT, 1)
        return factor


class PauseModel:
    """When idle conversations go on. `begin` follows one, `went_on` and time itself teach."""

    def __init__(self) -> None:
        self._ages = _Factor(AGE_WEIGHT, BUCKETS)
        self._classes = _Classes()
        self._idle: OrderedDict[Hashable, _Idle] = OrderedDict()
        # Those within each bucket, the one idle for longest first. All pass the buckets in the same order.
        self._within = [deque[_Idle](maxlen=FOLLOWED_MAX) for _ in range(BUCKETS)]

    def __len__(self) -> int:
        return len(self._idle)

    def begin(self, now_s: float, key: Hashable, turn: TurnEnd) -> None:
        """A turn of the conversation `key` has ended: it is idle."""
        self.advance(now_s)
        self.forget(key)
        idle = _Idle(
            key, now_s, _prior(turn.turns), self._classes.of_turn(turn), self._classes.of_owner(turn)
        )
        self._idle[key] = idle
        self._within[0].append(idle)
        if len(self._idle) > FOLLOWED_MAX:
            self.forget(next(iter(self._idle)))

    def went_on(self, now_s: float, key: Hashable) -> None:
        """The conversation has its next turn; nothing when it is not followed."""
        self.advance(now_s)
        idle = self._idle.get(key)
        if idle is None:
            return
        self.forget(key)
        idle_s = now_s - idle.since_s
        if idle_s >= EDGES_S[-1]:
            return  # so many turns ended at once that it fell out of a bucket
        bucket = next(bucket for bucket in range(BUCKETS) if idle_s < EDGES_S[bucket + 1])
        part = (idle_s - EDGES_S[bucket]) / (EDGES_S[bucket + 1] - EDGES_S[bucket])
        self._count(idle, bucket, part, 1.0)

    def forget(self, key: Hashable) -> None:
        """Follows the conversation no longer: nothing is learnt of what it does."""
        idle = self._idle.pop(key, None)
        if idle is not None:
            idle.followed = False

    def advance(self, now_s: float) -> None:
        """Learns of conversations that did not go on until now."""
        for bucket, within in enumerate(self._within):
            end_s = ENDS_S[bucket]
            while within and (not within[0].followed or now_s - within[0].since_s >= end_s):
                idle = within.popleft()
                if not idle.followed:
                    continue
                self._count(idle, bucket, 1.0, 0.0)
                if bucket + 1 < BUCKETS:
                    self._within[bucket + 1].append(idle)
                else:
                    self.forget(idle.key)

    def keep_s(self, turn: TurnEnd, policy: KeepPolicy) -> float:
        """Seconds for which a conversation is worth keeping after a turn."""
        whole = math.prod(factor.ratios[0] for factor in self._classes.of_turn(turn))
        pace, tenant = self._classes.of_owner(turn)
        ranged = [whole * (ours * theirs) for ours, theirs in zip(pace.ratios, tenant.ratios, strict=True)]
        price = policy.returns_per_hour / SECONDS_PER_HOUR
        prior, ages = _prior(turn.turns), self._ages.ratios
        exp, away, gain, most, best_s = math.exp, 1.0, 0.0, 0.0, policy.floor_s
        for bucket, end_s in enumerate(ENDS_S):
            still = away * exp(-prior[bucket] * ages[bucket] * ranged[RANGE_OF_BUCKET[bucket]])
            gain += (away - still) - price * (away + still) / 2 * WIDTHS_S[bucket]
            away = still
            if gain > most:
                most, best_s = gain, end_s
            if end_s >= policy.cap_s:
                break
        return min(max(best_s, policy.floor_s), policy.cap_s)

    def _count(self, idle: _Idle, bucket: int, part: float, seen: float) -> None:
        """Learns that a conversation passed a part of a bucket, and of the return at its end."""
        place = RANGE_OF_BUCKET[bucket]
        expected = part * idle.prior[bucket] * self._ages.ratios[bucket]
        for factor in idle.whole:
            expected *= factor.ratios[0]
        for factor in idle.ranged:
            expected *= factor.ratios[place]
        self._ages.count(bucket, seen, expected)
        for factor in idle.whole:
            factor.count(0, seen, expected)
        for factor in idle.ranged:
            factor.count(place, seen, expected)


def _range_of(seconds: float) -> int:
    return sum(seconds >= edge_s for edge_s in RANGE_EDGES_S)


RANGE_OF_BUCKET = tuple(_range_of(begin_s) for begin_s in EDGES_S[:-1])


def _prior_hazards(turns: int) -> tuple[float, ...]:
    """Returns that are expected in each bucket of a conversation that is idle at its begin."""
    returns = (1.0 + turns) / (3.0 + turns)
    shares = [edge_s**PRIOR_SHAPE / (edge_s**PRIOR_SHAPE + PRIOR_MEDIAN_S**PRIOR_SHAPE) for edge_s in EDGES_S]
    away = [1.0 - returns * share for share in shares]
    return tuple(math.log(before / after) for before, after in pairwise(away))


PRIOR_HAZARDS = tuple(_prior_hazards(turns) for turns in range(TURNS_TOLD_APART))


def _prior(turns: int) -> tuple[float, ...]:
    return PRIOR_HAZARDS[min(max(0, turns), TURNS_TOLD_APART - 1)]
