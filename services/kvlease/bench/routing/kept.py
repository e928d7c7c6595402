"""What a simulated decode engine keeps of turns that have ended, and what goes when room is needed."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kvlease.bench.trace import BYTES_PER_TOKEN
from kvlease.core.policy import LeaseUse, PrefillCost, eviction_order
from kvlease.core.reuse import RETURNS_WITHIN_S, ReuseHistory, ReuseModel

DURATION_S = 20.0
"""What a live lease is renewed for."""


class Order(Enum):
    """What goes first when room is needed."""

    LEAST_WORTH = "least worth keeping"
    LEAST_RECENT = "least recently used"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Retention:
    """How turns are kept.

    Attributes:
        order: what goes first.
        keep_s: nothing is kept for longer.
        bounded: only within the share of the engine that leases may occupy; else wherever there is room.
    """

    order: Order
    keep_s: float = RETURNS_WITHIN_S
    bounded: bool = True


@dataclass(slots=True)
class _Lease:
    tokens: int
    turns: int
    since_s: float
    pins: int = 0


class KeptTurns:
    """The turns that one engine keeps, by their index in the trace.

    Args:
        tokens_max: of all of them.
        changed: told of each turn that is kept, and with 0 tokens of each that no longer is.
    """

    def __init__(self, tokens_max: int, retention: Retention, changed: Callable[[int, int], None]) -> None:
        self._tokens_max = tokens_max
        self._retention = retention
        self._changed = changed
        self._leases: dict[int, _Lease] = {}
        self._model, self._cost = ReuseModel(), PrefillCost()
        self._history = ReuseHistory(self._model)
        self.tokens = 0

    def tokens_of(self, index: int) -> int:
        """Tokens that are kept of a turn, 0 when it is not kept."""
        lease = self._leases.get(index)
        return lease.tokens if lease is not None else 0

    @property
    def ends_s(self) -> float:
        """When the turn that was kept first ends by its time."""
        oldest_s = min((lease.since_s for lease in self._leases.values()), default=0.0)
        return oldest_s + self._retention.keep_s

    def keep(self, now_s: float, index: int, tokens: int, continues: int) -> None:
        """A turn ended: it is kept if there is room for it."""
        self._history.advance(now_s)
        turns = self._history.granted(now_s, index + 1, continues + 1)
        self.drop(continues)
        if self._retention.order is Order.NOTHING and self.tokens + tokens > self._tokens_max:
            return
        self._leases[index] = _Lease(tokens, turns, now_s)
        self.tokens += tokens
        self._changed(index, tokens)
        self.make_room(now_s, self._tokens_max)

    def drop(self, index: int) -> None:
        """A turn is no longer kept."""
        lease = self._leases.pop(index, None)
        if lease is not None:
            self.tokens -= lease.tokens
            self._changed(index, 0)

    def pin(self, index: int) -> None:
        """A turn that is kept is being read, and stays until `unpin`."""
        self._leases[index].pins += 1

    def unpin(self, index: int) -> None:
        """A READ ended."""
        lease = self._leases.get(index)
        if lease is not None:
            lease.pins -= 1

    def make_room(self, now_s: float, tokens_max: int, spared: int = -1) -> bool:
        """Lets turns go until no more than so many tokens are kept; False when that cannot be."""
        for index in [
            i for i, lease in self._leases.items() if now_s >= lease.since_s + self._retention.keep_s
        ]:
            if not self._leases[index].pins and index != spared:
                self.drop(index)
        if self.tokens > tokens_max:
            for index in self._order(now_s):
                if self.tokens <= tokens_max:
                    break
                if not self._leases[index].pins and index != spared:
                    self.drop(index)
        return self.tokens <= tokens_max

    def _order(self, now_s: float) -> tuple[int, ...]:
        if self._retention.order is Order.NOTHING:
            return ()
        if self._retention.order is Order.LEAST_RECENT:
            return tuple(self._leases)
        uses = {index: _use(lease, now_s) for index, lease in self._leases.items()}
        return eviction_order(uses, self._model, self._cost)


def _use(lease: _Lease, now_s: float) -> LeaseUse:
    size, idle_s = lease.tokens * BYTES_PER_TOKEN, now_s - lease.since_s
    return LeaseUse(lease.tokens, size, lease.turns, idle_s, DURATION_S, DURATION_S)
