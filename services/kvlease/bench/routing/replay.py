"""One replay of a trace: the router's own tables and planner before simulated engines, in virtual time.

A turn comes at its time in the trace, but not before the turn that it continues has ended. The planner knows the
tokens of prompts and what is kept of them at once, where a router estimates the former, and hears of the latter.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from kvlease.bench.routing.decode import DecodeEngine, DecodeJob
from kvlease.bench.routing.events import Events, Links
from kvlease.bench.routing.fleet import Fleet
from kvlease.bench.routing.kept import KeptTurns
from kvlease.bench.routing.policies import Policy
from kvlease.bench.routing.prefill import PrefillEngine, PrefillJob
from kvlease.bench.trace import BLOCK_TOKENS, BYTES_PER_TOKEN, Visit
from kvlease.core.cost import TokenEstimate
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState
from kvlease.core.planning import Plan, with_decode_anew
from kvlease.core.records import Engine, EngineRole, KvLayout, LeaseRecord
from kvlease.core.signals import DEFAULT_LIMITS, LeaseSignal, PlanReason, TurnPath, TurnSignals
from kvlease.core.turn import TurnReport
from kvlease.router.engines import EngineTable
from kvlease.router.loads import EngineLoads, LoadLimits
from kvlease.store.port import Batch, Change

MODEL = "model"
LAYOUT = KvLayout(16, "bfloat16", 1, 1, 16 * BYTES_PER_TOKEN, "layout")
EXACT = TokenEstimate(1.0)
"""Prompts are given in tokens here."""


@dataclass(slots=True)
class Turn:
    """One request of the trace.

    Attributes:
        first_s: when the client got its first token.
        engine_id: decode engine that served it.
        reused_tokens: of its prompt, what nobody computed again.
        until_first: what engines are counted to have to do until then.
        until_last: likewise until its end.
    """

    index: int
    visit: Visit
    came_s: float
    plan: Plan
    signals: TurnSignals
    asked_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    engine_id: str = ""
    reused_tokens: int = 0
    until_first: ExitStack = field(default_factory=ExitStack)
    until_last: ExitStack = field(default_factory=ExitStack)

    @property
    def suffix_tokens(self) -> int | None:
        """Tokens after what its decode engine held when it was planned, None when that held nothing of it."""
        lease = self.signals.lease
        held = isinstance(lease, LeaseSignal) and lease.engine_id == self.plan.decode_engine_id
        return self.visit.prompt_tokens - self.visit.shared_tokens if held else None

    @property
    def later_tokens(self) -> int:
        """Tokens of its reply after the first."""
        return max(0, self.visit.tokens - self.visit.prompt_tokens - 1)

    @property
    def between_tokens_s(self) -> float:
        """Mean time from one token of its reply to the next, 0 when there was no next."""
        return (self.ended_s - self.first_s) / self.later_tokens if self.later_tokens else 0.0


class Replay:
    """Replays a trace; `turns` are those that have ended.

    Args:
        seconds_per_s: how much longer than in the trace it takes from one request to the next.
    """

    def __init__(self, fleet: Fleet, visits: Sequence[Visit], policy: Policy, seconds_per_s: float) -> None:
        self.turns: list[Turn] = []
        self._visits = visits
        self._policy = policy
        self._planner = policy.planner()
        self._seconds_per_s = seconds_per_s
        self._events = Events()
        self._loads = EngineLoads(self._events, LoadLimits(samples_min=DEFAULT_LIMITS.samples_min))
        self._table = EngineTable(self._events, suspect_s=0.0, loads=self._loads)
        links = Links(self._events, fleet.read_token_s)
        self._prefills = {
            engine_id: PrefillEngine(engine_id, fleet, self._events, links)
            for engine_id in (f"prefill-{n}" for n in range(fleet.prefills))
        }
        kept_max = int(fleet.kv_tokens * (fleet.retained_share if policy.retention.bounded else 1.0))
        self._decodes = {
            engine_id: DecodeEngine(engine_id, fleet, self._events, links, self._kept(engine_id, kept_max))
            for engine_id in (f"decode-{n}" for n in range(fleet.decodes))
        }
        self._engines = {
            **_records(self._prefills, EngineRole.PREFILL, fleet.kv_tokens),
            **_records(self._decodes, EngineRole.DECODE, fleet.kv_tokens),
        }
        self._table.apply(Batch(tuple(Change(engine) for engine in self._engines.values()), snapshot=True))
        self._ended: dict[int, Turn] = {}
        self._follow: dict[int, list[int]] = {}

    def run(self) -> Sequence[Turn]:
        """Runs to the end of the last turn."""
        for index, visit in enumerate(self._visits):
            self._events.at(visit.at_s * self._seconds_per_s, partial(self._due, index))
        self._events.run()
        return self.turns

    # --- a turn -------------------------------------------------------------------------------------------

    def _due(self, index: int) -> None:
        parent = self._visits[index].parent
        if parent < 0 or parent in self._ended:
            self._come(index)
        else:
            self._follow.setdefault(parent, []).append(index)

    def _come(self, index: int) -> None:
        visit = self._visits[index]
        signals = self._signals(visit)
        plan = self._planner(signals)
        assert plan is not None, "some engine decodes"
        turn = Turn(index, visit, self._events.now_s(), plan, signals)
        if plan.prefill_engine_id:
            self._prefill(turn)
        else:
            self._decode(turn, None)

    def _signals(self, visit: Visit) -> TurnSignals:
        """As the router's own runner tells its planner."""
        earlier = self._ended.get(visit.parent)
        lease: LeaseSignal | PlanReason = PlanReason.FIRST_TURN
        if earlier is not None:
            lease = PlanReason.LEASE_MISSING
            if self._decodes[earlier.engine_id].kept.tokens_of(visit.parent):
                suffix_tokens = visit.prompt_tokens - visit.shared_tokens
                lease = LeaseSignal(earlier.engine_id, suffix_tokens, visit.shared_tokens)
        ends = [min(BLOCK_TOKENS * (n + 1), visit.prompt_tokens) for n in range(len(visit.prefixes))]
        return TurnSignals(
            lease=lease,
            engines=self._table.signals(MODEL, self._loads.cached_tokens(visit.prefixes, ends, EXACT)),
            preferred_engine_id=earlier.engine_id if earlier is not None else "",
            prompt_tokens=visit.prompt_tokens,
            last_path=earlier.plan.path if earlier is not None else None,
            rates=self._loads.read_rates(LAYOUT.layout_hash),
        )

    def _prefill(self, turn: Turn) -> None:
        engine_id, visit, lease = turn.plan.prefill_engine_id, turn.visit, turn.signals.lease
        reads = turn.plan.path is TurnPath.READBACK and isinstance(lease, LeaseSignal)
        source_id = lease.engine_id if reads and isinstance(lease, LeaseSignal) else ""
        begun_s, asked = self._events.now_s(), ExitStack()
        asked.enter_context(self._table.running(engine_id))
        computes = visit.prompt_tokens - (visit.shared_tokens if source_id else 0)
        asked.enter_context(self._loads.computing(engine_id, computes))
        if source_id:
            asked.enter_context(self._loads.reading(source_id, engine_id))
            self._decodes[source_id].kept.pin(visit.parent)

        def read() -> None:
            if source_id:
                holder = self._decodes[source_id]
                holder.kept.unpin(visit.parent)
                if self._policy.consumed:
                    holder.kept.drop(visit.parent)
                holder.let_in()

        def done(report: TurnReport) -> None:
            asked.close()
            read_from = source_id if report.read_tokens else ""
            self._loads.prefilled(self._engines[engine_id], read_from, begun_s, report, visit.prefixes)
            if self._policy.anew:
                turn.plan = with_decode_anew(turn.plan, turn.signals, self._table.signals(MODEL))
            self._decode(turn, report)

        self._prefills[engine_id].submit(PrefillJob(visit, source_id, read, done))

    def _decode(self, turn: Turn, report: TurnReport | None) -> None:
        engine_id, source_id = turn.plan.decode_engine_id, turn.plan.prefill_engine_id
        turn.asked_s, turn.engine_id = self._events.now_s(), engine_id
        turn.until_last.enter_context(self._table.running(engine_id))
        turn.until_last.enter_context(self._loads.occupying(engine_id, turn.visit.prompt_tokens))
        if report is not None:
            turn.reused_tokens = report.local_tokens + report.read_tokens
            turn.until_first.enter_context(self._loads.reading(source_id, engine_id))
        else:
            held = self._decodes[engine_id].kept.tokens_of(turn.visit.parent)
            turn.reused_tokens = min(held, turn.visit.shared_tokens)
            tokens = turn.visit.prompt_tokens if turn.suffix_tokens is None else turn.suffix_tokens
            turn.until_first.enter_context(self._loads.computing(engine_id, tokens))
        job = DecodeJob(turn.visit, source_id, lambda: self._began(turn), lambda: self._end(turn))
        self._decodes[engine_id].submit(job)

    def _began(self, turn: Turn) -> None:
        turn.until_first.close()
        turn.first_s = self._events.now_s()
        seconds, engine = turn.first_s - turn.asked_s, self._engines[turn.engine_id]
        suffix_tokens, source_id = turn.suffix_tokens, turn.plan.prefill_engine_id
        if source_id:
            tokens = turn.visit.prompt_tokens if suffix_tokens is None else suffix_tokens
            self._loads.handed_over(source_id, engine, tokens, seconds)
        elif turn.plan.path is TurnPath.APPEND and suffix_tokens:
            self._loads.appended(engine, suffix_tokens, seconds)

    def _end(self, turn: Turn) -> None:
        turn.until_last.close()
        turn.ended_s = self._events.now_s()
        self.turns.append(turn)
        self._ended[turn.index] = turn
        parent = turn.visit.parent
        if parent >= 0:
            self._decodes[self._ended[parent].engine_id].kept.drop(parent)
        self._decodes[turn.engine_id].kept.keep(turn.ended_s, turn.index, turn.visit.tokens, parent)
        for index in self._follow.pop(turn.index, ()):
            self._events.after(0.0, partial(self._come, index))

    # --- what the watches tell ----------------------------------------------------------------------------

    def _kept(self, engine_id: str, tokens_max: int) -> KeptTurns:
        holder = Holder(engine_id, "boot")

        def changed(index: int, tokens: int) -> None:
            record = LeaseRecord(
                index + 1, LeaseKind.CONVERSATION, LeaseState.HELD, holder, "tenant", b"", tokens
            )
            self._loads.apply_leases(Batch((Change(record, gone=not tokens),)))

        return KeptTurns(tokens_max, self._policy.retention, changed)


def _records(engine_ids: Iterable[str], role: EngineRole, kv_tokens: int) -> dict[str, Engine]:
    blocks = kv_tokens // LAYOUT.block_size
    return {
        engine_id: Engine(
            Holder(engine_id, "boot"), role, MODEL, f"http://{engine_id}", "", LAYOUT, total_blocks=blocks
        )
        for engine_id in engine_ids
    }
