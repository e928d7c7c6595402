"""How busy engines are and how fast, as this router sees them: what its own legs taught it."""

import itertools
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from kvlease.core.clock import Clock
from kvlease.core.cost import TokenEstimate
from kvlease.core.prefixes import PrefixMemory
from kvlease.core.rates import Line, RateTable, ServiceMeter
from kvlease.core.records import Engine, EngineRole, LeaseRecord
from kvlease.core.signals import ReadRates
from kvlease.core.turn import TurnReport
from kvlease.router.counted import Counted, uncount
from kvlease.store.port import Batch

ALWAYS_S = float("-inf")
"""When an engine joined that was there before the router."""

WARMTH_MIN = 0.1
"""The share of an engine that joins this moment: it needs turns to show what it can."""

REPLY_TOKENS = 256
"""What a reply is thought to need of an engine's KV; so turns count whose prompts are not known."""

READ_COUNTED_S = 2.0
"""A READ counts for at most so long: nobody tells a router when one has ended, only that the answer has come. The
longest one measured takes 2 s for 128k tokens, and an answer that is no stream may take minutes."""


@dataclass(slots=True)
class LoadLimits:
    """Bounds of an engine's load; one object for all, so that a reload reaches each part.

    Attributes:
        prefill_inflight_max: requests in flight at one prefill engine; 0: any number.
        decode_inflight_max: likewise for a decode engine.
        slow_start_s: an engine that joined gets its whole share after so many seconds.
        samples_min: measurements from which on an engine or pair counts as itself.
    """

    prefill_inflight_max: int = 0
    decode_inflight_max: int = 0
    slow_start_s: float = 30.0
    samples_min: int = 32


class EngineLoad(NamedTuple):
    """What is known of one engine's load and rate; see `EngineSignal`."""

    full: bool
    warmth: float
    running_tokens: int
    backlog_tokens: int
    held_tokens: int
    reads: int
    prefill: Line | None


class EngineLoads:
    """What legs are doing to engines, and how long it takes."""

    def __init__(self, clock: Clock, limits: LoadLimits | None = None) -> None:
        self._clock = clock
        self.limits = limits or LoadLimits()
        self._rates = RateTable(self.limits.samples_min)
        self._meters: dict[str, ServiceMeter] = {}
        self._prefixes = PrefixMemory()
        self._backlog: Counter[str] = Counter()
        self._occupied: Counter[str] = Counter()
        self._reads = _ReadsInFlight(clock)
        self._joined_s: dict[str, float] = {}
        self._held: Counter[str] = Counter()
        self._leases: dict[int, tuple[str, int]] = {}

    # --- engines come and go ------------------------------------------------------------------------------

    def joined(self, engine_id: str, *, warm: bool) -> None:
        """An engine registered; a warm one was there before the router."""
        if engine_id not in self._joined_s:
            self._joined_s[engine_id] = ALWAYS_S if warm else self._clock.now_s()

    def gone(self, engine_id: str) -> None:
        """An engine is registered no more."""
        self._joined_s.pop(engine_id, None)
        self._meters.pop(engine_id, None)
        self._rates.forget(engine_id)

    def apply_leases(self, batch: Batch[LeaseRecord]) -> None:
        """Takes what the watch tells of leases: how much each engine holds."""
        if batch.snapshot:
            self._held.clear()
            self._leases.clear()
        for change in batch.changes:
            record = change.item
            engine_id, tokens = self._leases.pop(record.lease_id, ("", 0))
            if engine_id:
                uncount(self._held, engine_id, tokens)
            if not change.gone:
                self._leases[record.lease_id] = record.holder.engine_id, record.tokens
                self._held[record.holder.engine_id] += record.tokens

    # --- legs ---------------------------------------------------------------------------------------------

    def occupying(self, engine_id: str, tokens: int) -> AbstractContextManager[None]:
        """A turn with a prompt of so many tokens, as far as is known, is in flight at a decode engine."""
        return Counted(self._occupied, engine_id, tokens + REPLY_TOKENS)

    def computing(self, engine_id: str, tokens: int) -> AbstractContextManager[None]:
        """A prompt of so many tokens, as far as is known, is the engine's to compute."""
        return Counted(self._backlog, engine_id, tokens)

    def reading(self, source_id: str, sink_id: str) -> AbstractContextManager[None]:
        """A READ may be under way; it counts until the context ends, but for `READ_COUNTED_S` at most."""
        return _Reading(self._reads, source_id, sink_id)

    def prefilled(
        self, engine: Engine, source_id: str, began_s: float, report: TurnReport, keys: Sequence[int]
    ) -> None:
        """A prefill engine answered: what it computed and READ, and what its cache holds from here on."""
        engine_id, layout = engine.holder.engine_id, engine.layout.layout_hash
        meter = self._meters.setdefault(engine_id, ServiceMeter())
        served_s = meter.served_s(began_s, self._clock.now_s())
        self._prefixes.remember(engine_id, keys)
        computed = report.prompt_tokens - report.local_tokens - report.read_tokens
        self._rates.computed(engine_id, f"prefill {layout}", computed, max(0.0, served_s - report.read_s))
        if source_id and report.read_tokens and report.read_s:
            self._rates.moved(source_id, engine_id, f"readback {layout}", report.read_tokens, report.read_s)

    def handed_over(self, source_id: str, sink: Engine, tokens: int, seconds: float) -> None:
        """A decode engine gave its first byte so long after it was asked, on KV of so many tokens."""
        group = f"handover {sink.layout.layout_hash}"
        self._rates.moved(source_id, sink.holder.engine_id, group, tokens, seconds)

    def appended(self, engine: Engine, tokens: int, seconds: float) -> None:
        """A decode engine computed so many tokens of a prompt until its first byte."""
        group = f"append {engine.layout.layout_hash}"
        self._rates.computed(engine.holder.engine_id, group, tokens, seconds)

    # --- for the planner ----------------------------------------------------------------------------------

    def cached_tokens(
        self, keys: Sequence[int], ends: Sequence[int], estimate: TokenEstimate
    ) -> dict[str, int]:
        """How much of a prompt the prefix cache of each engine is likely to hold, by engine; without those of none.

        Args:
            keys: the chain over the prompt.
            ends: bytes of text that each key stands for, those before it included.
        """
        cached = self._prefixes.cached_bytes(keys, ends)
        return {engine_id: estimate.tokens(size) for engine_id, size in cached.items()}

    def read_rates(self, layout_hash: str) -> ReadRates:
        """How long KV of a layout takes from engine to engine."""
        return ReadRates(
            self._rates.group_line(f"readback {layout_hash}"),
            self._rates.group_line(f"handover {layout_hash}"),
            self._rates.pair_lines,
        )

    def load(self, engine: Engine, running: int = 0) -> EngineLoad:
        """The load and the rate of an engine with so many turns in flight."""
        engine_id, prefills = engine.holder.engine_id, engine.role is EngineRole.PREFILL
        inflight_max = self.limits.prefill_inflight_max if prefills else self.limits.decode_inflight_max
        warmth = self._warmth(engine_id)
        group = f"{'prefill' if prefills else 'append'} {engine.layout.layout_hash}"
        return EngineLoad(
            full=0 < inflight_max * warmth <= running,
            warmth=warmth,
            running_tokens=self._occupied.get(engine_id, 0),
            backlog_tokens=self._backlog.get(engine_id, 0),
            held_tokens=self._held.get(engine_id, 0),
            reads=self._reads.count(engine_id),
            prefill=self._rates.prefill_line(engine_id, group),
        )

    def _warmth(self, engine_id: str) -> float:
        joined_s = self._joined_s.get(engine_id)
        if joined_s is None or joined_s == ALWAYS_S or self.limits.slow_start_s <= 0:
            return 1.0
        share = (self._clock.now_s() - joined_s) / self.limits.slow_start_s
        return min(1.0, max(WARMTH_MIN, share))


class _Reading(AbstractContextManager[None]):
    """One READ. A class, not a generator: most turns have one."""

    __slots__ = ("_number", "_reads", "_sink_id", "_source_id")

    def __init__(self, reads: "_ReadsInFlight", source_id: str, sink_id: str) -> None:
        self._reads = reads
        self._source_id = source_id
        self._sink_id = sink_id
        self._number = -1

    def __enter__(self) -> None:
        self._number = self._reads.begin(self._source_id, self._sink_id)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reads.end(self._number)


class _ReadsInFlight:
    """Counts READs by the engines at their ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers = itertools.count()
        self._begun: dict[int, tuple[float, tuple[str, str]]] = {}
        self._counts: Counter[str] = Counter()

    def begin(self, source_id: str, sink_id: str) -> int:
        """Counts a READ from here on; the number ends it."""
        number = next(self._numbers)
        self._begun[number] = self._clock.now_s(), (source_id, sink_id)
        self._counts[source_id] += 1
        self._counts[sink_id] += 1
        return number

    def end(self, number: int) -> None:
        """Counts a READ no longer; nothing changes for one that counts no longer."""
        begun = self._begun.pop(number, None)
        if begun is not None:
            for engine_id in begun[1]:
                uncount(self._counts, engine_id)

    def count(self, engine_id: str) -> int:
        """READs in flight at an engine."""
        until_s = self._clock.now_s() - READ_COUNTED_S if self._begun else 0.0
        while self._begun:
            number, begun = next(iter(self._begun.items()))
            if begun[0] > until_s:
                break
            self.end(number)
        return self._counts.get(engine_id, 0)
