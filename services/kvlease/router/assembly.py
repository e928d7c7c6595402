"""Puts the parts of a router together; the server and the simulation run the same ones."""

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from kvlease.core.clock import Clock
from kvlease.core.records import LeaseRecord
from kvlease.core.renewal import RenewalTable
from kvlease.core.reuse_rules import ReuseRules
from kvlease.router.admission import Admission
from kvlease.router.background import Background
from kvlease.router.config import RouterConfig
from kvlease.router.conversations import ConversationTable
from kvlease.router.decisions import DecisionLog
from kvlease.router.engines import EngineTable
from kvlease.router.health import EngineHealth
from kvlease.router.heartbeat import Heartbeat
from kvlease.router.loads import EngineLoads
from kvlease.router.metrics import TableGauges, TurnMetrics
from kvlease.router.ports import EnginePort, RandomPort, RegistryPort
from kvlease.router.responses import ResponseStore
from kvlease.router.tenancy import Tenancy, TenancyByCredential
from kvlease.router.tracing import NO_TRACING, TurnTracing
from kvlease.router.turn import TurnServices
from kvlease.router.watch import follow
from kvlease.runtime.metrics import Metrics
from kvlease.store.port import Batch


def make_services(
    config: RouterConfig,
    clock: Clock,
    registry: RegistryPort,
    engine_port: EnginePort,
    random: RandomPort,
    tracing: TurnTracing = NO_TRACING,
    renewals: RenewalTable | None = None,
    tenancy: Tenancy | None = None,
    metrics: Metrics | None = None,
    reuse: ReuseRules | None = None,
) -> TurnServices:
    """A router's parts over its ports, with empty tables. `renewals` stands in for an empty table of its own.

    Without `tenancy` every credential is a tenant of its own.
    """
    policy = config.renewal_policy()
    table = RenewalTable(policy) if renewals is None else renewals
    loads = EngineLoads(clock, config.load_limits())
    engines = EngineTable(clock, config.suspect_s, config.unregistered_s, loads)
    health = EngineHealth(engine_port, engines, clock, config.health_limits(), config.engine_credentials())
    conversations = ConversationTable(clock, table, engines, random, config.conversations_max)
    background = Background()
    tenants = TenancyByCredential() if tenancy is None else tenancy
    admission = Admission(engines, tenants, clock, config.admission_limits())
    metrics = Metrics("router") if metrics is None else metrics
    metrics.on_scrape(TableGauges(engines, conversations, table, background, admission))
    return TurnServices(
        clock=clock,
        engines=engines,
        conversations=conversations,
        renewals=table,
        heartbeat=Heartbeat(table, registry, clock, policy.interval_s),
        registry=registry,
        engine_port=health,
        health=health,
        random=random,
        background=background,
        metrics=TurnMetrics(metrics, clock, config.tenant_metrics_max),
        policy=policy,
        limits=config.turn_limits(),
        tracing=tracing,
        admission=admission,
        reuse=ReuseRules(config.reuse) if reuse is None else reuse,
        decisions=DecisionLog(
            config.decisions_max, Path(config.decisions_file) if config.decisions_file else None
        ),
        tenancy=tenants,
        responses=ResponseStore(config.responses_max, config.responses_bytes_max),
    )


def lasting_tasks(services: TurnServices) -> list[Coroutine[Any, Any, None]]:
    """What runs as long as the router does."""
    registry = services.registry

    def apply_leases(batch: Batch[LeaseRecord]) -> None:
        services.conversations.apply(batch)
        services.engines.loads.apply_leases(batch)

    return [
        services.heartbeat.run(),
        services.health.run(),
        follow("engines", registry.watch_engines, services.engines.apply),
        follow("leases", registry.watch_leases, apply_leases),
    ]
