"""Enums, durations and identities on the wire.

A value that the domain needs and the wire leaves unspecified, or names by an unknown number, is an
`InvalidArgument`.
"""

import math

from google.protobuf.duration_pb2 import Duration

from kvlease.core.errors import InvalidArgument
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState, MissReason
from kvlease.core.records import EngineRole
from kvlease.v1 import lease_pb2, registry_pb2

DURATION_LIMIT_S = 86_400.0

_KINDS = {
    LeaseKind.CONVERSATION: lease_pb2.LEASE_KIND_CONVERSATION,
    LeaseKind.TRANSFER: lease_pb2.LEASE_KIND_TRANSFER,
}
_STATES = {
    LeaseState.HELD: lease_pb2.LEASE_STATE_HELD,
    LeaseState.READING: lease_pb2.LEASE_STATE_READING,
    LeaseState.DRAINING: lease_pb2.LEASE_STATE_DRAINING,
    LeaseState.RELEASED: lease_pb2.LEASE_STATE_RELEASED,
    LeaseState.EXPIRED: lease_pb2.LEASE_STATE_EXPIRED,
    LeaseState.EVICTED: lease_pb2.LEASE_STATE_EVICTED,
    LeaseState.LOST: lease_pb2.LEASE_STATE_LOST,
}
_MISSES = {
    MissReason.UNKNOWN: lease_pb2.MISS_REASON_UNKNOWN,
    MissReason.RELEASED: lease_pb2.MISS_REASON_RELEASED,
    MissReason.EXPIRED: lease_pb2.MISS_REASON_EXPIRED,
    MissReason.EVICTED: lease_pb2.MISS_REASON_EVICTED,
    MissReason.LOST: lease_pb2.MISS_REASON_LOST,
    MissReason.DRAINING: lease_pb2.MISS_REASON_DRAINING,
    MissReason.READING_CAP: lease_pb2.MISS_REASON_READING_CAP,
    MissReason.HOLDER_CHANGED: lease_pb2.MISS_REASON_HOLDER_CHANGED,
    MissReason.UNREACHABLE: lease_pb2.MISS_REASON_UNREACHABLE,
    MissReason.FORBIDDEN: lease_pb2.MISS_REASON_FORBIDDEN,
}
_ROLES = {
    EngineRole.PREFILL: registry_pb2.ENGINE_ROLE_PREFILL,
    EngineRole.DECODE: registry_pb2.ENGINE_ROLE_DECODE,
}
_KIND_OF: dict[int, LeaseKind] = {int(number): kind for kind, number in _KINDS.items()}
_STATE_OF: dict[int, LeaseState] = {int(number): state for state, number in _STATES.items()}
_MISS_OF: dict[int, MissReason] = {int(number): miss for miss, number in _MISSES.items()}
_ROLE_OF: dict[int, EngineRole] = {int(number): role for role, number in _ROLES.items()}


def kind_to_wire(kind: LeaseKind) -> lease_pb2.LeaseKind:
    """The wire's number of a lease kind."""
    return _KINDS[kind]


def kind_from_wire(number: int) -> LeaseKind:
    """The lease kind of a number.

    Raises:
        InvalidArgument: unspecified or unknown.
    """
    kind = _KIND_OF.get(number)
    if kind is None:
        raise InvalidArgument(f"lease kind {number} is unspecified or unknown")
    return kind


def state_to_wire(state: LeaseState) -> lease_pb2.LeaseState:
    """The wire's number of a lease state; NONE is the state of no lease and never crosses.

    Raises:
        InvalidArgument: the state is NONE.
    """
    number = _STATES.get(state)
    if number is None:
        raise InvalidArgument("a lease without a state does not cross processes")
    return number


def state_from_wire(number: int) -> LeaseState:
    """The lease state of a number.

    Raises:
        InvalidArgument: unspecified or unknown.
    """
    state = _STATE_OF.get(number)
    if state is None:
        raise InvalidArgument(f"lease state {number} is unspecified or unknown")
    return state


def miss_to_wire(miss: MissReason | None) -> lease_pb2.MissReason:
    """The wire's number of a miss; unspecified means that there was none."""
    return lease_pb2.MISS_REASON_UNSPECIFIED if miss is None else _MISSES[miss]


def miss_from_wire(number: int) -> MissReason | None:
    """The miss of a number, None when unspecified. A reason of a later version is still a miss: UNKNOWN."""
    return None if number == 0 else _MISS_OF.get(number, MissReason.UNKNOWN)


def role_to_wire(role: EngineRole) -> registry_pb2.EngineRole:
    """The wire's number of an engine's role."""
    return _ROLES[role]


def role_from_wire(number: int) -> EngineRole:
    """The engine role of a number.

    Raises:
        InvalidArgument: unspecified or unknown.
    """
    role = _ROLE_OF.get(number)
    if role is None:
        raise InvalidArgument(f"engine role {number} is unspecified or unknown")
    return role


def duration_to_wire(seconds: float) -> Duration:
    """A duration of `seconds`, to the nanosecond."""
    whole = math.floor(seconds)
    nanos = round((seconds - whole) * 1e9)
    return Duration(seconds=whole + nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)


def duration_from_wire(message: Duration) -> float:
    """Seconds of a duration; an absent one is 0.

    Raises:
        InvalidArgument: below zero, or a day or longer.
    """
    seconds = message.seconds + message.nanos / 1e9
    if not 0.0 <= seconds < DURATION_LIMIT_S:
        raise InvalidArgument(f"a duration of {seconds:g} s is not within 0 s and a day")
    return seconds


def lease_id_from_wire(number: int) -> int:
    """A lease id.

    Raises:
        InvalidArgument: it is zero, so absent.
    """
    if number == 0:
        raise InvalidArgument("a lease id is not zero")
    return number


def text_from_wire(text: str, name: str) -> str:
    """A text that must be there; `name` is the field's.

    Raises:
        InvalidArgument: it is empty.
    """
    if not text:
        raise InvalidArgument(f"{name} must not be empty")
    return text


def holder_to_wire(holder: Holder) -> lease_pb2.Holder:
    """The message of a holder."""
    return lease_pb2.Holder(engine_id=holder.engine_id, boot_id=holder.boot_id, epoch=holder.epoch)


def holder_from_wire(message: lease_pb2.Holder) -> Holder:
    """The holder of a message.

    Raises:
        InvalidArgument: engine id or boot id are missing.
    """
    return Holder(
        text_from_wire(message.engine_id, "engine_id"),
        text_from_wire(message.boot_id, "boot_id"),
        message.epoch,
    )
