"""The engines that a router knows, and how busy it keeps each of them.

A record vanishes with an engine's sidecar as well as with the engine. So one that is registered no more is
remembered for a while, and serves turns without leases when there is no other.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from enum import Enum

from kvlease.core.clock import Clock
from kvlease.core.ids import Holder
from kvlease.core.records import Engine, EngineRole
from kvlease.core.signals import EngineSignal
from kvlease.router.counted import Counted
from kvlease.router.loads import EngineLoads
from kvlease.store.port import Batch

RANK_HEADER = "X-data-parallel-rank"
UNREGISTERED_MAX = 64
NOTHING_CACHED: Mapping[str, int] = {}


class EngineState(Enum):
    """What an engine is good for, as this router sees it.

    A suspect one failed a call a moment ago, a stalled one makes no progress, an unregistered one has lost its
    sidecar; all three serve only where no other can.
    """

    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"
    STALLED = "stalled"
    UNREGISTERED = "unregistered"


class EngineTable:
    """Engines by id, as the registry's watch told.

    Args:
        suspect_s: how long an engine is avoided after a call to it failed.
        unregistered_s: how long an engine without a record is the last resort.
        loads: how busy and how fast they are.
    """

    def __init__(
        self,
        clock: Clock,
        suspect_s: float,
        unregistered_s: float = 300.0,
        loads: EngineLoads | None = None,
    ) -> None:
        self._clock = clock
        self.loads = loads or EngineLoads(clock)
        self._suspect_s = suspect_s
        self._unregistered_s = unregistered_s
        self._engines: dict[str, Engine] = {}
        self._unregistered: OrderedDict[str, tuple[float, Engine]] = OrderedDict()
        self._at_url: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._suspect_until_s: dict[str, float] = {}
        self._stalled: set[str] = set()

    def apply(self, batch: Batch[Engine]) -> None:
        """Takes what the watch tells."""
        if batch.snapshot:
            for engine_id in list(self._engines):
                self._unregister(engine_id)
        was_empty = not self._engines and not self._unregistered
        for change in batch.changes:
            engine_id = change.item.holder.engine_id
            if change.gone:
                self._unregister(engine_id)
            else:
                self._register(change.item, warm=was_empty)
        self._suspect_until_s = {
            engine_id: until_s
            for engine_id, until_s in self._suspect_until_s.items()
            if engine_id in self._engines
        }
        self._stalled &= self._engines.keys()
        self._at_url = Counter(engine.url for engine in self._engines.values())

    def get(self, engine_id: str) -> Engine | None:
        """An engine that may serve a turn."""
        engine = self._engines.get(engine_id)
        return engine or next((one for one in self._last_resort() if one.holder.engine_id == engine_id), None)

    def all(self, role: EngineRole | None = None) -> list[Engine]:
        """Registered engines of a role, by id."""
        return [engine for _, engine in sorted(self._engines.items()) if role is None or engine.role is role]

    def holds(self, holder: Holder) -> bool:
        """Whether the process that granted a lease is still the registered one, its cache not reset."""
        engine = self._engines.get(holder.engine_id)
        return engine is not None and engine.holder.answers_for(holder)

    def serves(self, holder: Holder, model: str) -> bool:
        """Whether a registered engine is among those that may serve a model (see `signals`)."""
        engine = self._engines.get(holder.engine_id)
        return engine is not None and self.pool_of(model) in ("", engine.model)

    def signals(
        self, model: str, cached_tokens: Mapping[str, int] = NOTHING_CACHED
    ) -> tuple[EngineSignal, ...]:
        """The engines that may serve a model: those that say so, else all (an adapter has its own name).

        Args:
            cached_tokens: tokens of the prompt that an engine's prefix cache is likely to hold, by engine.
        """
        known = [*self._engines.values(), *self._last_resort()]
        named = [engine for engine in known if engine.model == model]
        return tuple([self._signal(engine, cached_tokens) for engine in named or known])

    def pool_of(self, model: str) -> str:
        """Names the engines that may serve a model: the model itself, or empty for all (see `signals`)."""
        for engine in self._engines.values():
            if engine.model == model:
                return model
        return ""

    def decode_room(self, pool: str) -> int | None:
        """Turns that the decode engines of a pool may have in flight; None: any number, or no engine is known."""
        each = self.loads.limits.decode_inflight_max
        if not each:
            return None
        decodes = [e for e in self.signals(pool) if e.role is EngineRole.DECODE and not e.draining]
        return max(1, int(sum(e.warmth for e in decodes) * each)) if decodes else None

    def running(self, engine_id: str) -> AbstractContextManager[None]:
        """Counts a request at an engine while it is in flight."""
        return Counted(self._running, engine_id)

    def suspect(self, engine_id: str) -> None:
        """A call to the engine failed."""
        self._suspect_until_s[engine_id] = self._clock.now_s() + self._suspect_s

    def stall(self, engine_id: str) -> None:
        """The engine makes no progress: it is avoided until it recovers."""
        self._stalled.add(engine_id)

    def recover(self, engine_id: str) -> None:
        """The engine makes progress again."""
        self._stalled.discard(engine_id)
        self._suspect_until_s.pop(engine_id, None)

    def is_stalled(self, engine: Engine) -> bool:
        """Whether an engine is avoided because it made no progress."""
        return engine.holder.engine_id in self._stalled

    def states(self) -> list[tuple[Engine, EngineState, int]]:
        """Every engine that is known, what it is good for, and its turns in flight."""
        known = [*self._engines.values(), *self._last_resort()]
        return [
            (engine, self._state(engine), self._running.get(engine.holder.engine_id, 0)) for engine in known
        ]

    def headers(self, engine: Engine) -> Mapping[str, str]:
        """What a request needs to reach this engine and not another rank behind the same URL."""
        shared = self._at_url[engine.url] > 1
        return {RANK_HEADER: str(engine.data_parallel_rank)} if shared or engine.data_parallel_rank else {}

    # --- inside -------------------------------------------------------------------------------------------

    def _register(self, engine: Engine, *, warm: bool) -> None:
        """Whoever registers at an address is the only one there."""
        self._engines[engine.holder.engine_id] = engine
        self.loads.joined(engine.holder.engine_id, warm=warm)
        here = (engine.url, engine.data_parallel_rank)
        for engine_id, (_, former) in list(self._unregistered.items()):
            if engine_id == engine.holder.engine_id or (former.url, former.data_parallel_rank) == here:
                del self._unregistered[engine_id]

    def _unregister(self, engine_id: str) -> None:
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return
        self.loads.gone(engine_id)
        self._unregistered[engine_id] = (self._clock.now_s() + self._unregistered_s, engine)
        if len(self._unregistered) > UNREGISTERED_MAX:
            self._unregistered.popitem(last=False)

    def _last_resort(self) -> list[Engine]:
        if not self._unregistered:
            return []
        now_s = self._clock.now_s()
        return [engine for until_s, engine in self._unregistered.values() if now_s < until_s]

    def _state(self, engine: Engine) -> EngineState:
        engine_id = engine.holder.engine_id
        if engine_id not in self._engines:
            return EngineState.UNREGISTERED
        if engine.draining:
            return EngineState.DRAINING
        if engine_id in self._stalled:
            return EngineState.STALLED
        return EngineState.SUSPECT if self._failed_lately(engine_id) else EngineState.READY

    def _failed_lately(self, engine_id: str) -> bool:
        until_s = self._suspect_until_s.get(engine_id)
        return until_s is not None and self._clock.now_s() < until_s

    def _signal(self, engine: Engine, cached_tokens: Mapping[str, int]) -> EngineSignal:
        engine_id = engine.holder.engine_id
        registered, running = engine_id in self._engines, self._running.get(engine_id, 0)
        load = self.loads.load(engine, running)
        return EngineSignal(
            engine_id=engine_id,
            role=engine.role,
            layout_hash=engine.layout.layout_hash,
            retain=engine.retain and registered,
            prefix_caching=engine.prefix_caching,
            running=running,
            suspect=not registered or engine_id in self._stalled or self._failed_lately(engine_id),
            registered=registered,
            draining=engine.draining,
            full=load.full,
            running_tokens=load.running_tokens,
            kv_tokens=engine.total_blocks * engine.layout.block_size,
            warmth=load.warmth,
            backlog_tokens=load.backlog_tokens,
            cached_tokens=cached_tokens.get(engine_id, 0),
            held_tokens=load.held_tokens,
            reads=load.reads,
            prefill=load.prefill,
        )
