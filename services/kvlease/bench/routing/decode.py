"""A simulated decode engine: a batch whose steps take longer the more KV it has, and room that leases share with it."""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvlease.bench.routing.events import Events, Links
from kvlease.bench.routing.fleet import Fleet
from kvlease.bench.routing.kept import KeptTurns
from kvlease.bench.trace import Visit


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A turn to decode.

    Attributes:
        source_id: prefill engine that has computed its prompt; empty: this engine computes what it does not keep.
        began: the client gets the first token.
        ended: the client has the last one.
    """

    visit: Visit
    source_id: str
    began: Callable[[], None]
    ended: Callable[[], None]


class DecodeEngine:
    """Lets turns in while there is room, in their order; computes prompts one at a time, and nobody decodes meanwhile.

    The room of a turn is that of its prompt and its whole reply. What is kept makes room for it as far as its
    retention allows.
    """

    def __init__(self, engine_id: str, fleet: Fleet, events: Events, links: Links, kept: KeptTurns) -> None:
        self.engine_id = engine_id
        self.kept = kept
        self._fleet = fleet
        self._events = events
        self._links = links
        self._occupied = 0
        self._waiting: deque[DecodeJob] = deque()
        self._to_compute: deque[tuple[DecodeJob, int]] = deque()
        self._computing = False
        self._batch = _Batch(fleet)
        self._timer = itertools.count()
        self._timer_due = -1
        self._tries_s = 0.0

    def submit(self, job: DecodeJob) -> None:
        """Takes a turn."""
        self._waiting.append(job)
        self.let_in()

    def let_in(self) -> None:
        """Lets in those for whom there is room."""
        while self._waiting:
            job = self._waiting[0]
            visit, reused = job.visit, self.kept.tokens_of(job.visit.parent)
            room = self._fleet.kv_tokens - self._occupied - (visit.tokens - reused)
            if room < 0:
                return
            if not self.kept.make_room(self._events.now_s(), room, spared=visit.parent):
                self._try_again()
                return
            self._waiting.popleft()
            self.kept.drop(visit.parent)
            self._occupied += visit.tokens
            self._fetch(job, max(1, visit.prompt_tokens - min(reused, visit.shared_tokens)))

    # --- inside -------------------------------------------------------------------------------------------

    def _try_again(self) -> None:
        """Lets in when what is kept ends by its time, where that is all that can be waited for."""
        due_s = self.kept.ends_s
        if due_s > self._events.now_s() and due_s != self._tries_s:
            self._tries_s = due_s
            self._events.at(due_s, self.let_in)

    def _fetch(self, job: DecodeJob, tokens: int) -> None:
        """READs what was computed elsewhere, or computes it here."""
        if not job.source_id:
            self._to_compute.append((job, tokens))
            self._compute_next()
            return
        fixed_s = self._fleet.handover_fixed_s
        self._links.read(
            job.source_id,
            self.engine_id,
            tokens,
            lambda _: self._events.after(fixed_s, lambda: self._begin(job)),
        )

    def _compute_next(self) -> None:
        if self._computing or not self._to_compute:
            return
        job, tokens = self._to_compute.popleft()
        self._pause(paused=True)

        def computed() -> None:
            self._pause(paused=False)
            self._events.after(self._fleet.append_fixed_s, lambda: self._begin(job))
            self._compute_next()

        self._events.after(tokens * self._fleet.prefill_token_s, computed)

    def _pause(self, *, paused: bool) -> None:
        self._batch.advance(self._events.now_s())
        self._computing = self._batch.paused = paused
        self._set_timer()

    def _begin(self, job: DecodeJob) -> None:
        job.began()
        self._batch.advance(self._events.now_s())
        self._batch.add(job)
        self._set_timer()

    def _set_timer(self) -> None:
        """One event is due, when the first of the batch ends; an earlier one counts for nothing."""
        due_s = self._batch.due_s
        number = self._timer_due = next(self._timer)
        if due_s is not None:
            self._events.at(due_s, lambda: self._end_first(number))

    def _end_first(self, number: int) -> None:
        if number != self._timer_due:
            return
        self._batch.advance(self._events.now_s())
        job = self._batch.pop()
        self._occupied -= job.visit.tokens
        self._set_timer()
        job.ended()
        self.let_in()


class _Batch:
    """Streams that advance together; each ends after as many steps as its reply has tokens after the first."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._numbers = itertools.count()
        self._streams: list[tuple[float, int, DecodeJob]] = []
        self._steps = self._now_s = 0.0
        self._tokens = 0
        self.paused = False

    @property
    def due_s(self) -> float | None:
        """When the first stream ends, None when none does as things stand."""
        if self.paused or not self._streams:
            return None
        return self._now_s + max(0.0, self._streams[0][0] - self._steps) * self._step_s

    def advance(self, now_s: float) -> None:
        """Time has passed."""
        if not self.paused and self._streams:
            self._steps += (now_s - self._now_s) / self._step_s
        self._now_s = now_s

    def add(self, job: DecodeJob) -> None:
        """A stream got its first token."""
        steps = max(0, job.visit.tokens - job.visit.prompt_tokens - 1)
        heapq.heappush(self._streams, (self._steps + steps, next(self._numbers), job))
        self._tokens += job.visit.prompt_tokens

    def pop(self) -> DecodeJob:
        """The stream that ends first."""
        _, _, job = heapq.heappop(self._streams)
        self._tokens -= job.visit.prompt_tokens
        return job

    @property
    def _step_s(self) -> float:
        return self._fleet.step_s + self._fleet.step_token_s * self._tokens
