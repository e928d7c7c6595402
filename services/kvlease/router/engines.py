"""The engines that a router knows, and how busy it keeps each of them."""

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from kvlease.core.clock import Clock
from kvlease.core.ids import Holder
from kvlease.core.planning import EngineSignal
from kvlease.core.records import Engine, EngineRole
from kvlease.store.port import Batch

RANK_HEADER = "X-data-parallel-rank"


class EngineTable:
    """Engines by id, as the registry's watch told.

    Args:
        suspect_s: how long an engine is avoided after a call to it failed.
    """

    def __init__(self, clock: Clock, suspect_s: float) -> None:
        self._clock = clock
        self._suspect_s = suspect_s
        self._engines: dict[str, Engine] = {}
        self._running: Counter[str] = Counter()
        self._suspect_until_s: dict[str, float] = {}

    def apply(self, batch: Batch[Engine]) -> None:
        """Takes what the watch tells."""
        if batch.snapshot:
            self._engines.clear()
        for change in batch.changes:
            engine_id = change.item.holder.engine_id
            if change.gone:
                self._engines.pop(engine_id, None)
            else:
                self._engines[engine_id] = change.item
        self._suspect_until_s = {
            engine_id: until_s
            for engine_id, until_s in self._suspect_until_s.items()
            if engine_id in self._engines
        }

    def get(self, engine_id: str) -> Engine | None:
        """A registered engine."""
        return self._engines.get(engine_id)

    def all(self, role: EngineRole | None = None) -> list[Engine]:
        """Registered engines of a role, by id."""
        return [engine for _, engine in sorted(self._engines.items()) if role is None or engine.role is role]

    def holds(self, holder: Holder) -> bool:
        """Whether the process that granted a lease is still the registered one, its cache not reset."""
        engine = self._engines.get(holder.engine_id)
        return engine is not None and engine.holder.answers_for(holder)

    def signals(self, model: str) -> tuple[EngineSignal, ...]:
        """The engines that may serve a model: those that say so, else all (an adapter has its own name)."""
        named = [engine for engine in self._engines.values() if engine.model == model]
        now_s = self._clock.now_s()
        return tuple(
            EngineSignal(
                engine_id=engine.holder.engine_id,
                role=engine.role,
                layout_hash=engine.layout.layout_hash,
                retain=engine.retain,
                prefix_caching=engine.prefix_caching,
                running=self._running[engine.holder.engine_id],
                suspect=now_s < self._suspect_until_s.get(engine.holder.engine_id, now_s),
            )
            for engine in named or self._engines.values()
        )

    @contextmanager
    def running(self, engine_id: str) -> Generator[None, None, None]:
        """Counts a request at an engine while it is in flight."""
        self._running[engine_id] += 1
        try:
            yield
        finally:
            self._running[engine_id] -= 1
            if self._running[engine_id] <= 0:
                del self._running[engine_id]

    def suspect(self, engine_id: str) -> None:
        """A call to the engine failed."""
        self._suspect_until_s[engine_id] = self._clock.now_s() + self._suspect_s

    def headers(self, engine: Engine) -> Mapping[str, str]:
        """What a request needs to reach this engine and not another rank behind the same URL."""
        shared = sum(other.url == engine.url for other in self._engines.values()) > 1
        return {RANK_HEADER: str(engine.data_parallel_rank)} if shared or engine.data_parallel_rank else {}
