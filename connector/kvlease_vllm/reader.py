"""The reader half: pins a lease, verifies it against the prompt, and guards the READ.

Every request has at most one READ. Its life: ASKING (the pin is on its way) → PINNED → POSTED (vLLM was told
to load) → SETTLED. A READ counts only when it was seen done before the fence: 0.8 of the pin's read part, from
before the pin was asked for. The read part is asked for again while the turn queues, never after the READ was
posted.

`Reads` is shared by the scheduler's thread and the link's; a lock guards it. Sending is putting a message into
a queue, so it happens under the lock: an UNPIN never overtakes the question before it. The pool's references
are left to the caller: this file knows no vLLM.
"""

import itertools
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kvlease.core.digests import BlockChain
from kvlease.core.holding import PinAsk
from kvlease.core.lease import MissReason
from kvlease.core.records import Pinned, PinOutcome
from kvlease.core.turn import ReadOrder

FENCE_SHARE = 0.8
"""Share of a duration that whoever asked may count on: clocks drift by at most 10 % on either side."""

ENDED_PINS_MAX = 4096
"""Pin ids that are remembered after their UNPIN; a pin lives for a minute at most without being renewed."""

RENEW_SHARE = 0.4
"""A read part that is not used yet is asked for again after this share of it; too little is left to begin."""


class Stage(Enum):
    """Where a READ stands."""

    ASKING = "asking"
    PINNED = "pinned"
    POSTED = "posted"
    SETTLED = "settled"


@dataclass(slots=True)
class Read:
    """One request's READ.

    Attributes:
        attempt_id: unique in this process.
        asked_s: when the oldest unanswered question was sent, None when none is under way.
        begun_s: when the request arrived.
        fence_s: until when a READ that is seen done counts.
        pinned: the holder's answer.
        verified_tokens: tokens of the lease that belong to the prompt, -1 until compared.
        block_ids: destination blocks, once posted.
        posted_s: when that was.
        read_s: from there until vLLM reported it as ended.
        given_up: nothing of it counts any more, whatever the memory does.
        failed: vLLM, or the pin that was lost before it was posted, says that it failed.
        outcome: what became of it, for the report; empty until its pin was ended.
    """

    request_id: str
    attempt_id: int
    order: ReadOrder
    tenant: str
    begun_s: float
    read_part_s: float
    stage: Stage = Stage.ASKING
    asked_s: float | None = None
    fence_s: float = 0.0
    pinned: Pinned | None = None
    verified_tokens: int = -1
    read_tokens: int = 0
    block_ids: tuple[int, ...] = ()
    posted_s: float = 0.0
    read_s: float = 0.0
    given_up: bool = False
    failed: bool = False
    outcome: str = ""

    @property
    def stale_s(self) -> float:
        """When the read part is too short to begin a READ in it: it is asked for again from here on."""
        return self.fence_s - (FENCE_SHARE - RENEW_SHARE) * self.read_part_s


@dataclass(slots=True)
class Reads:
    """All READs of one engine.

    Args:
        ask_pin: sends a pin question to the sidecar without waiting; False when the sidecar is not there.
        send_unpin: sends an UNPIN without waiting. Requests that share a pin id (the choices of one completion)
            share the pin: the last of them ends it.
        read_part_s, first_read_part_s, pin_wait_s: see `ConnectorSettings`.
        now_s: a clock that goes on while the machine sleeps, since the holder's does.
    """

    ask_pin: Callable[[int, PinAsk, ReadOrder], bool]
    send_unpin: Callable[[ReadOrder], None]
    read_part_s: float
    first_read_part_s: float
    pin_wait_s: float
    now_s: Callable[[], float]
    counters: Counter[str] = field(default_factory=Counter[str])
    _reads: dict[str, Read] = field(default_factory=dict[str, Read])
    _by_attempt: dict[int, Read] = field(default_factory=dict[int, Read])
    _users_of_pin: Counter[str] = field(default_factory=Counter[str])
    _ended_pins: "OrderedDict[str, None]" = field(default_factory=OrderedDict[str, None])
    _met: set[str] = field(default_factory=set[str])
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # --- the scheduler's thread ---------------------------------------------------------------------

    def begin(self, request_id: str, order: ReadOrder, tenant: str) -> None:
        """Asks for the pin of a new request, so that it overlaps with queueing.

        Nothing is read under a pin id that was ended before: that UNPIN may still be on its way, and would end
        the pin that this request relies on.
        """
        met = order.holder.engine_id in self._met
        read = Read(
            request_id,
            next(self._numbers),
            order,
            tenant,
            begun_s=self.now_s(),
            read_part_s=self.read_part_s if met else self.first_read_part_s,
        )
        with self._lock:
            if order.pin_id in self._ended_pins:
                return
            self._reads[request_id] = read
            self._by_attempt[read.attempt_id] = read
            self._users_of_pin[order.pin_id] += 1
            self._ask(read)

    def get(self, request_id: str) -> Read | None:
        """The READ of a request that has not ended."""
        return self._reads.get(request_id)

    def posted(self) -> list[Read]:
        """READs that vLLM was told to load and that have not settled."""
        return [read for read in self._reads.values() if read.stage is Stage.POSTED]

    def is_waiting(self, read: Read) -> bool:
        """Whether to answer "later": the pin is asked for, or its read part is being asked for again.

        Settles the READ as unreachable when the bound has passed.
        """
        now_s = self.now_s()
        if read.stage is Stage.ASKING:
            since_s = read.begun_s
        elif read.stage is Stage.PINNED and now_s >= read.stale_s:
            since_s = read.stale_s
        else:
            return False
        if now_s - since_s > self.pin_wait_s:
            self.settle(read, MissReason.UNREACHABLE.value)
            return False
        return True

    def verify(self, read: Read, held: BlockChain, prompt: BlockChain, verified_tokens: int) -> None:
        """Notes how much of the lease belongs to the prompt."""
        read.verified_tokens = verified_tokens
        if verified_tokens < min(held.tokens, prompt.tokens - 1) // held.block_size * held.block_size:
            self.count("mismatches")

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter."""
        with self._lock:
            self.counters[name] += amount

    def post(self, read: Read, block_ids: tuple[int, ...], read_tokens: int) -> bool:
        """Notes that vLLM loads into `block_ids`. The fence does not move from here on.

        False when the pin was lost in the meantime: the load must be reported as failed.
        """
        with self._lock:
            pinned = read.stage is Stage.PINNED
            read.stage = Stage.POSTED
            read.block_ids = block_ids
            read.posted_s = self.now_s()
            read.failed = not pinned
            if pinned:
                read.read_tokens = read_tokens
                self.counters["reads"] += 1
        return pinned

    def overdue(self) -> list[Read]:
        """READs in flight whose fence has passed; they are given up by this call, each once."""
        now_s = self.now_s()
        late = [
            read for read in self.posted() if not read.given_up and not read.outcome and now_s >= read.fence_s
        ]
        for read in late:
            read.given_up = True
            self.count("given_up")
        return late

    def accept(self, read: Read) -> bool:
        """Whether a READ that ended may be used: before its fence, its pin not ended, not failed."""
        spoilt, now_s = read.given_up or read.failed or read.outcome, self.now_s()
        read.read_s = now_s - read.posted_s
        return not spoilt and read.stage is Stage.POSTED and now_s < read.fence_s

    def settle(self, read: Read, outcome: str) -> None:
        """Ends the READ's pin, and counts what became of it. The first outcome stands."""
        with self._lock:
            self._settle(read, outcome)

    def lose(self) -> None:
        """Ends every READ: this engine's caches are being cleared, and what the holder has may come from other
        weights. One in flight is overdue from here on, since the memory cannot be left alone before it has ended.
        """
        for read in list(self._reads.values()):
            if read.stage is Stage.POSTED:
                read.fence_s = -math.inf
            elif read.stage is not Stage.SETTLED:
                self.settle(read, MissReason.LOST.value)

    def forget(self, request_id: str) -> Read | None:
        """Forgets a request; one whose READ is posted stays until that has ended."""
        read = self._reads.get(request_id)
        if read is not None and read.stage is not Stage.POSTED:
            del self._reads[request_id]
            self.settle(read, "unused")
        return read

    def drop(self, read: Read) -> None:
        """Forgets a READ that has ended."""
        self._reads.pop(read.request_id, None)

    # --- the link's thread --------------------------------------------------------------------------

    def answer(self, attempt_id: int, outcome: PinOutcome) -> None:
        """The holder's answer to the oldest question of an attempt. A READ that is posted keeps its fence."""
        with self._lock:
            read = self._by_attempt.get(attempt_id)
            if read is None or read.stage not in (Stage.ASKING, Stage.PINNED) or read.asked_s is None:
                return
            asked_s, read.asked_s = read.asked_s, None
            if isinstance(outcome, Pinned) and outcome.blocks is not None:
                read.pinned = outcome
                read.fence_s = asked_s + FENCE_SHARE * read.read_part_s
                read.stage = Stage.PINNED
                return
            reason = outcome if isinstance(outcome, MissReason) else MissReason.UNKNOWN
            self._settle(read, reason.value)

    def ask_again(self) -> None:
        """Asks again for read parts that queue unused; the link calls this off the scheduler's thread."""
        now_s = self.now_s()
        with self._lock:
            due = [
                read
                for read in self._by_attempt.values()
                if read.stage is Stage.PINNED and read.asked_s is None and now_s >= read.stale_s
            ]
            for read in due:
                self._ask(read)

    # --- inside, under the lock ---------------------------------------------------------------------

    def _ask(self, read: Read) -> None:
        read.asked_s = self.now_s()
        order = read.order
        ask = PinAsk(
            order.lease_id, order.pin_id, order.holder, tenant=read.tenant, read_part_s=read.read_part_s
        )
        if not self.ask_pin(read.attempt_id, ask, order):
            self._settle(read, MissReason.UNREACHABLE.value)

    def _settle(self, read: Read, outcome: str) -> None:
        read.stage = Stage.SETTLED
        if read.outcome:
            return
        read.outcome = outcome
        self._by_attempt.pop(read.attempt_id, None)
        self.counters[f"outcome_{outcome}"] += 1
        if outcome == "read":
            self._met.add(read.order.holder.engine_id)
            self.counters["read_tokens"] += read.read_tokens
            self.counters["read_blocks"] += len(read.block_ids)
        pin_id = read.order.pin_id
        self._users_of_pin[pin_id] -= 1
        if not self._users_of_pin[pin_id]:
            del self._users_of_pin[pin_id]
            self._ended_pins[pin_id] = None
            if len(self._ended_pins) > ENDED_PINS_MAX:
                self._ended_pins.popitem(last=False)
            self.send_unpin(read.order)
