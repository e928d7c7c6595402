"""The reader half: pins a lease, verifies it against the prompt, and guards the READ.

Every request has at most one READ. Its life: ASKING (the pin is on its way) → PINNED → POSTED (vLLM was told to load)
→ SETTLED. A READ counts only when it was seen done before the fence: 0.8 of the pin's read part, from before the pin
was asked for. The read part is asked for again while the turn queues, never after the READ was posted.

`Reads` is shared by the scheduler's thread and the link's; a lock guards it. The pool's references are left to the
caller: this file knows no vLLM.
"""

import itertools
import threading
from collections import Counter
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

RENEW_SHARE = 0.4
"""A read part that is not used yet is asked for again after this share of it."""


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
        outcome: what became of it, for the report; empty until settled.
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
    given_up: bool = False
    failed: bool = False
    outcome: str = ""


@dataclass(slots=True)
class Reads:
    """All READs of one engine.

    Args:
        ask_pin: sends a pin question to the sidecar without waiting; False when the sidecar is not there.
        unpin: sends an UNPIN without waiting.
        read_part_s, first_read_part_s, pin_wait_s: see `ConnectorSettings`.
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
    _met: set[str] = field(default_factory=set[str])
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # --- the scheduler's thread -------------------------------------------------------------------------------

    def begin(self, request_id: str, order: ReadOrder, tenant: str) -> None:
        """Asks for the pin of a new request, so that it overlaps with queueing."""
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
            self._reads[request_id] = read
            self._by_attempt[read.attempt_id] = read
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
            current = False
        elif read.stage is Stage.PINNED:
            current = now_s < read.fence_s - 0.5 * FENCE_SHARE * read.read_part_s
        else:
            return False
        if current:
            return False
        waited_s = now_s - max(read.begun_s, read.fence_s)
        if waited_s > self.pin_wait_s:
            self.settle(read, MissReason.UNREACHABLE.value)
            return False
        return True

    def verify(self, read: Read, held: BlockChain, prompt: BlockChain, verified_tokens: int) -> None:
        """Notes how much of the lease belongs to the prompt."""
        read.verified_tokens = verified_tokens
        if verified_tokens < min(held.tokens, prompt.tokens - 1) // held.block_size * held.block_size:
            self.counters["mismatches"] += 1

    def post(self, read: Read, block_ids: tuple[int, ...], read_tokens: int) -> bool:
        """Notes that vLLM loads into `block_ids`. The fence does not move from here on.

        False when the pin was lost in the meantime: the load must be reported as failed.
        """
        with self._lock:
            pinned = read.stage is Stage.PINNED
            read.stage = Stage.POSTED
        read.block_ids = block_ids
        read.read_tokens = read_tokens
        read.failed = not pinned
        self.counters["reads"] += 1
        return pinned

    def overdue(self) -> list[Read]:
        """Posted READs whose fence has passed and that were not given up yet; they are given up by this call."""
        now_s = self.now_s()
        late = [read for read in self.posted() if not read.given_up and now_s >= read.fence_s]
        for read in late:
            read.given_up = True
            self.counters["given_up"] += 1
        return late

    def accept(self, read: Read) -> bool:
        """Whether a READ that ended may be used: before its fence, not given up, not failed."""
        return not read.given_up and not read.failed and self.now_s() < read.fence_s

    def settle(self, read: Read, outcome: str) -> None:
        """Ends the READ's pin, and counts what became of it. A settled READ is never posted."""
        with self._lock:
            if read.stage is Stage.SETTLED:
                return
            read.stage = Stage.SETTLED
            read.outcome = outcome
            self._by_attempt.pop(read.attempt_id, None)
        self.counters[f"outcome_{outcome}"] += 1
        if outcome == "read":
            self._met.add(read.order.holder.engine_id)
            self.counters["read_tokens"] += read.read_tokens
        self.send_unpin(read.order)

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

    # --- the link's thread ------------------------------------------------------------------------------------

    def answer(self, attempt_id: int, outcome: PinOutcome) -> None:
        """The holder's answer to the oldest question of an attempt."""
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
        self.settle(read, reason.value)

    def ask_again(self) -> None:
        """Asks again for read parts that queue unused; the link calls this off the scheduler's thread."""
        now_s = self.now_s()
        with self._lock:
            due = [
                read
                for read in self._by_attempt.values()
                if read.stage is Stage.PINNED
                and read.asked_s is None
                and now_s >= read.fence_s - (FENCE_SHARE - RENEW_SHARE) * read.read_part_s
            ]
        for read in due:
            self._ask(read)

    def _ask(self, read: Read) -> None:
        read.asked_s = self.now_s()
        order = read.order
        ask = PinAsk(
            order.lease_id, order.pin_id, order.holder, tenant=read.tenant, read_part_s=read.read_part_s
        )
        if not self.ask_pin(read.attempt_id, ask, order):
            self.settle(read, MissReason.UNREACHABLE.value)
