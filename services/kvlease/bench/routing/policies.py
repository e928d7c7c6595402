"""Ways to route turns: the production planner, and what it is compared with.

- `ours`: the router's planner with its defaults.
- `stock`: engines in turn, and what a turn left on its decode engine is READ back. It keeps as vLLM does: for
  a fixed time, not evictable, until it is READ.
- `affinity`: a turn goes to the decode engine that holds its conversation and to nobody else, however busy; a turn of
  which nothing is held goes as with `recompute`.
- `recompute`: nothing is kept for reuse. The prefill engine that is free first, its own prefix cache counted in.

All but `stock` choose among engines as the router does, by its counts of what is in flight.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvlease.bench.routing.kept import Order, Retention
from kvlease.core.planning import Plan, plan
from kvlease.core.records import EngineRole
from kvlease.core.signals import LeaseSignal, PlanReason, TurnPath, TurnSignals

Planner = Callable[[TurnSignals], Plan | None]

STOCK_KEEPS_S = 480.0
"""vLLM's default, `decoder_kv_blocks_ttl`."""

STOCK_SHORT_S = 15.0
"""A time that an operator may set instead so that kept turns do not fill the engines."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A way to route.

    Attributes:
        planner: makes a replay's planner; it may remember.
        consumed: a READ ends what it reads.
        anew: the decode engine is chosen anew when a prompt is computed, as the router does.
    """

    name: str
    planner: Callable[[], Planner]
    retention: Retention
    consumed: bool = False
    anew: bool = True


def _affinity(signals: TurnSignals) -> Plan | None:
    lease = signals.lease
    if isinstance(lease, LeaseSignal):
        return Plan(TurnPath.APPEND, PlanReason.SHORT_SUFFIX, lease.engine_id)
    return plan(signals)


def _recompute(signals: TurnSignals) -> Plan | None:
    return plan(replace(signals, lease=PlanReason.REUSE_OFF))


def _in_turn() -> Planner:
    numbers = itertools.count()

    def choose(signals: TurnSignals) -> Plan:
        number, lease = next(numbers), signals.lease
        ids = {role: [e.engine_id for e in signals.engines if e.role is role] for role in EngineRole}
        prefills, decodes = ids[EngineRole.PREFILL], ids[EngineRole.DECODE]
        path, reason = TurnPath.READBACK, PlanReason.LONG_SUFFIX
        if isinstance(lease, PlanReason):
            path, reason = TurnPath.RECOMPUTE, lease
        return Plan(path, reason, decodes[number % len(decodes)], prefills[number % len(prefills)])

    return choose


def _stock(keep_s: float) -> Policy:
    name = f"stock, {keep_s:g} s"
    return Policy(name, _in_turn, Retention(Order.NOTHING, keep_s, bounded=False), consumed=True, anew=False)


LEASES = Retention(Order.LEAST_WORTH)
OURS = Policy("ours", lambda: plan, LEASES)
POLICIES = (
    OURS,
    _stock(STOCK_KEEPS_S),
    _stock(STOCK_SHORT_S),
    Policy("affinity", lambda: _affinity, LEASES),
    Policy("recompute", lambda: _recompute, Retention(Order.LEAST_RECENT, bounded=False)),
)
