"""The states of a lease and the one table of its transitions.

No other module decides a state: whoever has an event asks `transition`. The diagram in `docs/protocol.md` is
generated from `TRANSITIONS`.
"""

from dataclasses import dataclass
from enum import Enum


class LeaseKind(Enum):
    """What a lease keeps."""

    CONVERSATION = "conversation"
    TRANSFER = "transfer"


class LeaseState(Enum):
    """Where a lease stands. NONE is the state before the grant."""

    NONE = "none"
    HELD = "held"
    READING = "reading"
    DRAINING = "draining"
    RELEASED = "released"
    EXPIRED = "expired"
    EVICTED = "evicted"
    LOST = "lost"


TERMINAL = frozenset({LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.EVICTED, LeaseState.LOST})


class LeaseEvent(Enum):
    """What can happen to a lease. A pin whose deadline passed is an UNPIN."""

    GRANT_CONVERSATION = "grant conversation"
    GRANT_TRANSFER = "grant transfer"
    RENEW = "renew"
    PIN = "pin"
    UNPIN = "unpin"
    LAST_UNPIN = "last unpin"
    LAST_UNPIN_TRANSFER = "last unpin of a transfer"
    RELEASE = "release"
    SUPERSEDE = "supersede"
    EXPIRE = "expire"
    MAX_LIFETIME = "maximum lifetime"
    EVICT = "evict"
    LOSE_RESET = "lose by reset"
    LOSE_ENGINE = "lose by engine death"


ENDINGS: dict[LeaseEvent, LeaseState] = {
    LeaseEvent.RELEASE: LeaseState.RELEASED,
    LeaseEvent.SUPERSEDE: LeaseState.RELEASED,
    LeaseEvent.EXPIRE: LeaseState.EXPIRED,
    LeaseEvent.MAX_LIFETIME: LeaseState.EXPIRED,
    LeaseEvent.EVICT: LeaseState.EVICTED,
    LeaseEvent.LOSE_RESET: LeaseState.LOST,
    LeaseEvent.LOSE_ENGINE: LeaseState.LOST,
}
"""The terminal state that each ending asks for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table.

    Attributes:
        target: the next state; None means the terminal state that the lease remembers.
        remember: the terminal state to remember while pins drain; None leaves what is remembered.
    """

    target: LeaseState | None
    remember: LeaseState | None = None


def _held_rows() -> dict[tuple[LeaseState, LeaseEvent], Row]:
    held = LeaseState.HELD
    rows = {(held, event): Row(ending) for event, ending in ENDINGS.items()}
    rows[held, LeaseEvent.RENEW] = Row(held)
    rows[held, LeaseEvent.PIN] = Row(LeaseState.READING)
    rows[held, LeaseEvent.UNPIN] = Row(held)
    return rows


def _reading_rows() -> dict[tuple[LeaseState, LeaseEvent], Row]:
    reading = LeaseState.READING
    rows = {(reading, event): Row(LeaseState.DRAINING, ending) for event, ending in ENDINGS.items()}
    rows[reading, LeaseEvent.LOSE_ENGINE] = Row(LeaseState.LOST)
    rows[reading, LeaseEvent.RENEW] = Row(reading)
    rows[reading, LeaseEvent.PIN] = Row(reading)
    rows[reading, LeaseEvent.UNPIN] = Row(reading)
    rows[reading, LeaseEvent.LAST_UNPIN] = Row(LeaseState.HELD)
    rows[reading, LeaseEvent.LAST_UNPIN_TRANSFER] = Row(LeaseState.RELEASED)
    return rows


def _draining_rows() -> dict[tuple[LeaseState, LeaseEvent], Row]:
    draining = LeaseState.DRAINING
    rows = {(draining, event): Row(draining) for event in ENDINGS}
    rows[draining, LeaseEvent.LOSE_RESET] = Row(draining, LeaseState.LOST)
    rows[draining, LeaseEvent.LOSE_ENGINE] = Row(LeaseState.LOST)
    rows[draining, LeaseEvent.UNPIN] = Row(draining)
    rows[draining, LeaseEvent.LAST_UNPIN] = Row(None)
    rows[draining, LeaseEvent.LAST_UNPIN_TRANSFER] = Row(None)
    return rows


def _terminal_rows() -> dict[tuple[LeaseState, LeaseEvent], Row]:
    acknowledged = (*ENDINGS, LeaseEvent.UNPIN)
    return {(state, event): Row(state) for state in TERMINAL for event in acknowledged}


TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], Row] = {
    (LeaseState.NONE, LeaseEvent.GRANT_CONVERSATION): Row(LeaseState.HELD),
    (LeaseState.NONE, LeaseEvent.GRANT_TRANSFER): Row(LeaseState.READING),
    **_held_rows(),
    **_reading_rows(),
    **_draining_rows(),
    **_terminal_rows(),
}
"""(state, event) → row. What is not here is refused: PIN and RENEW are a miss, everything else is a bug."""


def transition(state: LeaseState, event: LeaseEvent) -> Row | None:
    """The row for an event in a state, or None when the state refuses the event."""
    return TRANSITIONS.get((state, event))


class MissReason(Enum):
    """Why a lease could not be used; the values are the wire names in lower case."""

    UNKNOWN = "unknown"
    RELEASED = "released"
    EXPIRED = "expired"
    EVICTED = "evicted"
    LOST = "lost"
    DRAINING = "draining"
    READING_CAP = "reading_cap"
    HOLDER_CHANGED = "holder_changed"
    UNREACHABLE = "unreachable"
    FORBIDDEN = "forbidden"


MISS_OF_STATE: dict[LeaseState, MissReason] = {
    LeaseState.DRAINING: MissReason.DRAINING,
    LeaseState.RELEASED: MissReason.RELEASED,
    LeaseState.EXPIRED: MissReason.EXPIRED,
    LeaseState.EVICTED: MissReason.EVICTED,
    LeaseState.LOST: MissReason.LOST,
}
"""What a refused PIN or RENEW says of the state that refused it."""
