"""A simulated prefill engine: it computes one prompt after another, and its prefix cache keeps what fits."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvlease.bench.routing.events import Events, Links
from kvlease.bench.routing.fleet import Fleet
from kvlease.bench.trace import BLOCK_TOKENS, Visit
from kvlease.core.signals import DEFAULT_LIMITS
from kvlease.core.turn import TurnReport


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A prompt to compute.

    Attributes:
        source_id: decode engine that holds the beginning of the prompt and is to be read; empty: none.
        read: its READ has ended, or none was needed; the lease may go.
        done: the prompt is computed.
    """

    visit: Visit
    source_id: str
    read: Callable[[], None]
    done: Callable[[TurnReport], None]


class PrefixCache:
    """Blocks of prompts by the ids of their prefixes; those used longest ago go first, tails before heads."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def cached_tokens(self, visit: Visit) -> int:
        """Tokens at the beginning of a prompt whose blocks are all here; its last token never counts."""
        blocks = next((n for n, key in enumerate(visit.prefixes) if key not in self._blocks), None)
        tokens = BLOCK_TOKENS * (len(visit.prefixes) if blocks is None else blocks)
        return max(0, min(tokens, visit.prompt_tokens - 1))

    def insert(self, prefixes: Sequence[int]) -> None:
        """A prompt was computed."""
        for key in reversed(prefixes):
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        while len(self._blocks) > self._blocks_max:
            self._blocks.popitem(last=False)


class PrefillEngine:
    """Computes the prompt that came first of those that are ready; one that READs is not before that has ended.

    It never lacks room: waiting prompts hold nothing, and what is handed over leaves at once.
    """

    def __init__(self, engine_id: str, fleet: Fleet, events: Events, links: Links) -> None:
        self.engine_id = engine_id
        self._token_s = fleet.prefill_token_s
        self._events = events
        self._links = links
        self._cache = PrefixCache(fleet.kv_tokens // BLOCK_TOKENS)
        self._numbers = itertools.count()
        self._ready: list[tuple[int, PrefillJob, TurnReport]] = []
        self._busy = False

    def submit(self, job: PrefillJob) -> None:
        """Takes a prompt."""
        number, visit = next(self._numbers), job.visit
        local = self._cache.cached_tokens(visit)
        wanted = visit.shared_tokens - local if job.source_id else 0
        if wanted < DEFAULT_LIMITS.reuse_tokens_min:
            job.read()
            self._enqueue(number, job, TurnReport(visit.prompt_tokens, 0, 0, 0, "none", visit.prompt_tokens))
            return

        def arrived(seconds: float) -> None:
            job.read()
            report = TurnReport(
                visit.prompt_tokens, local, wanted, wanted, "read", visit.prompt_tokens, seconds
            )
            self._enqueue(number, job, report)

        self._links.read(job.source_id, self.engine_id, wanted, arrived)

    def _enqueue(self, number: int, job: PrefillJob, report: TurnReport) -> None:
        heapq.heappush(self._ready, (number, job, report))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._ready)
        if not self._ready:
            return
        _, job, report = heapq.heappop(self._ready)
        if not report.read_tokens:
            # What its own cache holds is looked up when the prompt's turn has come.
            report = replace(report, local_tokens=self._cache.cached_tokens(job.visit))
        computed = max(1, report.prompt_tokens - report.local_tokens - report.read_tokens)

        def finish() -> None:
            self._cache.insert(job.visit.prefixes)
            job.done(report)
            self._next()

        self._events.after(computed * self._token_s, finish)
