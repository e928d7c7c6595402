"""Which leases a router keeps alive, what it tells the registry per interval, and what it may believe.

Pure: the caller brings `now_s`, monotonic and its own. A belief counts a share of the duration from before
the beat was sent that its holder acked; nothing is believed of a lease before its first ack.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvlease.core.errors import InvalidArgument
from kvlease.core.lease import MissReason
from kvlease.core.pauses import KeepPolicy

BELIEF_SHARE = 0.8
BEATS_REMEMBERED_MAX = 256
RETRIES_MAX = 4
SETTINGS = {"interval_s": "heartbeat_interval_s", "duration_s": "lease_duration_s"}
"""What a router's settings call durations that are called otherwise here, for messages."""


@dataclass(frozen=True, slots=True)
class RenewalPolicy:
    """Durations of the heartbeat.

    Attributes:
        interval_s: between two beats.
        duration_s: to which a beat renews a lease at its holder.
        reservation_s: to which a beat renews a pin's reservation.
        provisional_s: of a grant that nobody confirmed yet.
        gap_floor_s: a conversation stays live at least this long after a turn.
        gap_cap_s: and at most this long, whatever is predicted and whatever a client asks for.
        gap_returns_per_hour: returns that an hour of keeping a conversation must be expected to bring.
        tool_call_max_s: a conversation whose reply ended in tool calls stays live this long; the cap bounds it.
    """

    interval_s: float = 5.0
    duration_s: float = 20.0
    reservation_s: float = 30.0
    provisional_s: float = 6.0
    gap_floor_s: float = 30.0
    gap_cap_s: float = 600.0
    gap_returns_per_hour: float = 1.0
    tool_call_max_s: float = 600.0

    def __post_init__(self) -> None:
        for name in (
            "interval_s",
            "duration_s",
            "reservation_s",
            "provisional_s",
            "gap_floor_s",
            "gap_cap_s",
            "gap_returns_per_hour",
            "tool_call_max_s",
        ):
            if not 0 < getattr(self, name) < math.inf:
                called = SETTINGS.get(name, name)
                raise InvalidArgument(f"{called} ({getattr(self, name):g}) must be above 0 and finite")
        if 3 * self.interval_s > self.duration_s:
            raise InvalidArgument(
                f"3 * heartbeat_interval_s ({self.interval_s:g}) must not exceed lease_duration_s "
                f"({self.duration_s:g}): a lease must survive two lost beats"
            )
        if self.interval_s >= self.reservation_s:
            raise InvalidArgument(
                f"heartbeat_interval_s ({self.interval_s:g}) must be below reservation_s "
                f"({self.reservation_s:g}): a reservation must outlive an interval"
            )
        if self.gap_floor_s > self.gap_cap_s:
            raise InvalidArgument(
                f"gap_floor_s ({self.gap_floor_s:g}) must not exceed gap_cap_s ({self.gap_cap_s:g})"
            )

    def keeping(self) -> KeepPolicy:
        """How long conversations are kept."""
        return KeepPolicy(self.gap_returns_per_hour, self.gap_floor_s, self.gap_cap_s)


class Belief(Enum):
    """What a router may think of a lease."""

    PENDING = "pending"
    HELD = "held"
    EXPIRED = "expired"
    MISSED = "missed"


@dataclass(frozen=True, slots=True)
class EngineDelta:
    """What changes on one engine since the beat before."""

    added_lease_ids: tuple[int, ...] = ()
    dropped_lease_ids: tuple[int, ...] = ()
    added_pin_ids: tuple[str, ...] = ()
    dropped_pin_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat. With `full` the lists are complete, else they are changes."""

    epoch: int
    sequence: int
    full: bool
    engines: Mapping[str, EngineDelta]


@dataclass(slots=True)
class _Lease:
    engine_id: str
    pending_until_s: float
    live_until_s: float
    held_until_s: float | None = None
    open_turns: int = 0
    sequence: int | None = None
    retries: int = 0
    miss: MissReason | None = None

    def live(self, now_s: float) -> bool:
        return self.miss is None and (self.open_turns > 0 or now_s < self.live_until_s)


@dataclass(slots=True)
class _Changes:
    added_leases: list[int] = field(default_factory=list[int])
    dropped_leases: list[int] = field(default_factory=list[int])
    added_pins: list[str] = field(default_factory=list[str])
    dropped_pins: list[str] = field(default_factory=list[str])

    def delta(self) -> EngineDelta:
        return EngineDelta(
            tuple(self.added_leases),
            tuple(self.dropped_leases),
            tuple(self.added_pins),
            tuple(self.dropped_pins),
        )


class RenewalTable:
    """All leases and pins that one router knows."""

    def __init__(self, policy: RenewalPolicy) -> None:
        self.policy = policy
        self._leases: dict[int, _Lease] = {}
        self._pins: dict[str, str] = {}
        self._told_leases: dict[int, str] = {}
        self._told_pins: dict[str, str] = {}
        self._sent_s: dict[int, float] = {}
        # A beat looks at leases that something happened to, and at those whose gap ends: not at all of them.
        self._touched: set[int] = set()
        self._gap_ends: list[tuple[float, int]] = []
        # Every lease told up to this beat was renewed by its holder, from before this time on.
        self._acked_sequence = 0
        self._acked_sent_s = -math.inf
        self._epoch = 1
        self._sequence = 0
        self._full = True

    def __len__(self) -> int:
        return len(self._leases)

    # --- what a turn says ---------------------------------------------------------------------------------

    def expect(self, now_s: float, lease_id: int, engine_id: str, gap_s: float = 0.0) -> None:
        """A turn ended well: its lease is pending, and the next beat confirms it.

        Args:
            gap_s: seconds for which the lease is live without another turn; floor and cap bound them.
        """
        self._leases[lease_id] = _Lease(
            engine_id,
            pending_until_s=now_s + self.policy.provisional_s,
            live_until_s=now_s + self._bounded_gap_s(gap_s),
        )
        self._touch(lease_id)

    def open(self, lease_id: int) -> None:
        """A turn that uses the lease begins: it stays live until `close`."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.open_turns += 1
            self._touch(lease_id)

    def close(self, now_s: float, lease_id: int, gap_s: float = 0.0) -> None:
        """A turn that uses the lease has ended; the lease is live for `gap_s`, within floor and cap."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.open_turns = max(0, lease.open_turns - 1)
            lease.live_until_s = max(lease.live_until_s, now_s + self._bounded_gap_s(gap_s))
            self._touch(lease_id)

    def keep_live(self, now_s: float, lease_id: int, duration_s: float) -> bool:
        """The lease is live for so long from now; False when it is not held. The gap cap bounds the duration."""
        lease = self._leases.get(lease_id)
        if lease is None or self.belief(now_s, lease_id) not in (Belief.HELD, Belief.PENDING):
            return False
        lease.live_until_s = max(lease.live_until_s, now_s + min(duration_s, self.policy.gap_cap_s))
        self._touch(lease_id)
        return True

    def drop(self, lease_id: int) -> None:
        """Forgets a lease that was released or superseded."""
        self._leases.pop(lease_id, None)
        self._touched.add(lease_id)

    def lose(self, lease_id: int, reason: MissReason) -> None:
        """The lease is known to have ended."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.miss = reason
            self._touched.add(lease_id)

    def revive(self, now_s: float, lease_id: int) -> None:
        """A lease that seemed unknown is there again, as after its sidecar's restart: it is pending once more."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.miss is MissReason.UNKNOWN:
            lease.miss = None
            lease.held_until_s = None
            lease.retries = 0
            lease.pending_until_s = now_s + self.policy.provisional_s
            self._touch(lease_id)

    def hold_pin(self, pin_id: str, engine_id: str) -> None:
        """Renews the reservation of a pin until `drop_pin`."""
        self._pins[pin_id] = engine_id

    def drop_pin(self, pin_id: str) -> None:
        """Renews the pin no longer."""
        self._pins.pop(pin_id, None)

    # --- what the planner asks ----------------------------------------------------------------------------

    def belief(self, now_s: float, lease_id: int) -> Belief:
        """What may be thought of a lease now; an unknown one is MISSED."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.miss is not None:
            return Belief.MISSED
        held_until_s = self._held_until_s(lease_id, lease)
        if held_until_s is None:
            return Belief.PENDING if now_s < lease.pending_until_s else Belief.EXPIRED
        return Belief.HELD if now_s < held_until_s else Belief.EXPIRED

    def miss(self, lease_id: int) -> MissReason:
        """Why a MISSED lease is missed."""
        lease = self._leases.get(lease_id)
        return (lease.miss if lease else None) or MissReason.UNKNOWN

    # --- the heartbeat ------------------------------------------------------------------------------------

    def beat(self, now_s: float) -> Beat:
        """The next message to the registry. The caller sends it at once, in order."""
        self._end_gaps(now_s)
        self._sequence += 1
        self._sent_s[self._sequence] = now_s
        while len(self._sent_s) > BEATS_REMEMBERED_MAX:
            del self._sent_s[next(iter(self._sent_s))]
        full = self._full
        if full:
            self._told_leases.clear()
            self._told_pins.clear()
            self._touched.update(self._leases)
        changes: dict[str, _Changes] = {}
        self._change_leases(now_s, changes)
        self._change_pins(changes)
        self._full = False
        engines = {engine_id: change.delta() for engine_id, change in changes.items()}
        return Beat(self._epoch, self._sequence, full, engines)

    def ack(self, now_s: float, sequence: int, misses: Mapping[int, MissReason]) -> bool:
        """Takes the registry's answer.

        True when another beat is wanted soon: a pending lease was not there yet.
        """
        again = False
        for lease_id, reason in misses.items():
            again = self._missed(now_s, lease_id, reason) or again
        sent_s = self._sent_s.get(sequence)
        if sent_s is None:
            return again
        for known in [known for known in self._sent_s if known <= sequence]:
            del self._sent_s[known]
        self._acked_sequence, self._acked_sent_s = sequence, sent_s
        return again

    def resync(self) -> None:
        """The registry lost the session, or the stream broke.

        The next beat is complete, under another epoch.
        """
        if not self._full:
            self._epoch += 1
        self._full = True
        self._sent_s.clear()
        for lease_id in list(self._told_leases):
            self._untell(lease_id)

    # --- inside -------------------------------------------------------------------------------------------

    def _missed(self, now_s: float, lease_id: int, reason: MissReason) -> bool:
        """Whether the lease is asked for again soon.

        Its grant may be later than the end of the turn that we saw.
        """
        passing = reason in (MissReason.UNKNOWN, MissReason.UNREACHABLE)
        if passing:
            self._doubt(lease_id)
        else:
            self._untell(lease_id)
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        awaited = passing and lease.held_until_s is None
        if awaited and now_s < lease.pending_until_s and lease.retries < RETRIES_MAX:
            lease.retries += 1
            return True
        if reason is not MissReason.UNREACHABLE:
            lease.miss = reason
            self._touched.add(lease_id)
        return False

    def _bounded_gap_s(self, gap_s: float) -> float:
        return min(max(gap_s, self.policy.gap_floor_s), self.policy.gap_cap_s)

    def _touch(self, lease_id: int) -> None:
        self._touched.add(lease_id)
        heapq.heappush(self._gap_ends, (self._leases[lease_id].live_until_s, lease_id))

    def _held_until_s(self, lease_id: int, lease: _Lease) -> float | None:
        """Until when the lease is believed to be held, None when no holder acked it."""
        told = lease.sequence is not None and lease_id in self._told_leases
        if not told or lease.sequence is None or lease.sequence > self._acked_sequence:
            return lease.held_until_s
        acked_s = self._acked_sent_s + BELIEF_SHARE * self.policy.duration_s
        return acked_s if lease.held_until_s is None else max(lease.held_until_s, acked_s)

    def _untell(self, lease_id: int) -> str | None:
        """The registry renews the lease no longer; what was believed of it so far stays."""
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.held_until_s = self._held_until_s(lease_id, lease)
            lease.sequence = None
        return self._told_leases.pop(lease_id, None)

    def _doubt(self, lease_id: int) -> None:
        """What is late or out of reach may come: the registry goes on asking for it with every beat, untold.

        What was believed of the lease so far stays, and the next beat is the first that may add to it.
        """
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.held_until_s = self._held_until_s(lease_id, lease)
            lease.sequence = self._sequence + 1

    def _end_gaps(self, now_s: float) -> None:
        """Looks at leases whose gap has ended, and forgets them when nobody may use them again.

        That is after a lease's duration, and not before a whole gap more: until then it is known why they ended.
        """
        while self._gap_ends and self._gap_ends[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._gap_ends)
            lease = self._leases.get(lease_id)
            if lease is None or lease.open_turns or now_s < lease.live_until_s:
                continue
            self._touched.add(lease_id)
            forgotten_s = lease.live_until_s + max(self.policy.gap_cap_s, self.policy.duration_s)
            if now_s >= forgotten_s:
                del self._leases[lease_id]
            else:
                heapq.heappush(self._gap_ends, (forgotten_s, lease_id))

    def _change_leases(self, now_s: float, changes: dict[str, _Changes]) -> None:
        touched, self._touched = self._touched, set()
        for lease_id in sorted(touched):
            lease = self._leases.get(lease_id)
            live = lease is not None and lease.live(now_s)
            if lease is not None and live and lease_id not in self._told_leases:
                changes.setdefault(lease.engine_id, _Changes()).added_leases.append(lease_id)
                self._told_leases[lease_id] = lease.engine_id
                lease.sequence = self._sequence
            elif not live and lease_id in self._told_leases:
                engine_id = self._untell(lease_id) or ""
                changes.setdefault(engine_id, _Changes()).dropped_leases.append(lease_id)

    def _change_pins(self, changes: dict[str, _Changes]) -> None:
        for pin_id, engine_id in self._pins.items():
            if pin_id not in self._told_pins:
                changes.setdefault(engine_id, _Changes()).added_pins.append(pin_id)
                self._told_pins[pin_id] = engine_id
        for pin_id, engine_id in list(self._told_pins.items()):
            if pin_id not in self._pins:
                changes.setdefault(engine_id, _Changes()).dropped_pins.append(pin_id)
                del self._told_pins[pin_id]
