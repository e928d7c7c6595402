"""`kvlease bench leases`: many leases renewed through one registry, pins meanwhile, and the end of half of them.

One registry and two sidecars as processes over a real etcd; the engines and the router are in this process, so that
what they need delays answers, too. Times are milliseconds. A renewal's time is from before the heartbeat is sent until
the table of an engine has applied it; a pin's is the caller's. With `--engine` the holder is a whole engine instead,
idle and while it decodes: `lease_holder`.
"""

import asyncio
import json
import secrets
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field

from kvlease.bench import lease_holder
from kvlease.bench.lease_fleet import TENANT, LeaseFleet, TimedEngine, lease_fleet, share
from kvlease.bench.machine import machine
from kvlease.bench.spread import Spread
from kvlease.core.errors import HolderUnreachable
from kvlease.core.holding import PinAsk
from kvlease.core.records import Pinned
from kvlease.core.renewal import RenewalPolicy, RenewalTable
from kvlease.router.ports import BeatAck, RenewalStream
from kvlease.router.registry_client import GrpcRegistry
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.grpc_client import Channels
from kvlease.runtime.identity import Identity

CORES_AT_MOST = 0.5
WRITES_A_SECOND_AT_MOST = 1.0
"""Goals: what the registry uses, and by how much etcd's writes may grow with the number of leases."""

LEASES = 100_000
POLICY = RenewalPolicy(gap_floor_s=3600.0, gap_cap_s=3600.0)
CALL_S = 5.0
PIN_EVERY_S = 0.05
STEP_LEASES = 5_000
"""Leases confirmed by one heartbeat: each of them is a transaction of etcd."""


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease bench leases`."""
    parser.add_argument(
        "--engine",
        choices=("none", *lease_holder.ENGINES),
        default="none",
        help="none: many leases of engines that only hold (default); vllm, sim: few leases of one that decodes",
    )
    parser.add_argument(
        "--leases", type=int, help="default: 100,000; with an engine 8, each of a conversation"
    )
    parser.add_argument("--engines", type=int, default=10, help="engines that only hold; half of them end")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each measurement")
    parser.add_argument("--patience-s", type=float, default=600.0, help="bound of recording all leases")
    parser.add_argument("--output", choices=("table", "json"), default="table", help="what is printed")


def run(arguments: Namespace) -> int:
    """Measures and prints. The exit status: 0 when every goal was met."""
    if arguments.engine != "none":
        return lease_holder.run(arguments)
    arguments.leases = LEASES if arguments.leases is None else arguments.leases
    if not 2 <= arguments.engines <= arguments.leases:
        sys.stderr.write("kvlease bench leases: at least two engines, and a lease for each\n")
        return 2
    asked = Asked(arguments.leases, arguments.engines, arguments.seconds, arguments.patience_s)
    figures = asyncio.run(measure(asked))
    document = {
        "what": "leases renewed every 5 s through one registry process, pins meanwhile, the end of half of them",
        "command": f"kvlease bench leases --leases {asked.leases} --engines {asked.engines} "
        f"--seconds {asked.seconds:g}",
        "machine": machine(),
        **asdict(figures),
        "goals": figures.goals(),
    }
    if arguments.output == "json":
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(figures.table() + "\n")
    return 0 if all(figures.goals().values()) else 1


@dataclass(frozen=True, slots=True)
class Asked:
    """What is measured; seconds."""

    leases: int
    engines: int
    seconds: float
    patience_s: float

    @property
    def beats(self) -> int:
        """Heartbeats of one measurement."""
        return max(1, round(self.seconds / POLICY.interval_s))


@dataclass(frozen=True, slots=True)
class Phase:
    """One measurement.

    Attributes:
        registry_cores: CPU seconds of the registry process per second.
        etcd_writes_a_second: proposals that etcd committed.
        missed: renewals that some holder did not apply.
        missed_pins: pins that were not taken, each a turn that would have been recomputed.
    """

    leases: int
    registry_cores: float
    etcd_writes_a_second: float
    renewal: Spread
    pin: Spread
    missed: int
    missed_pins: int


@dataclass(frozen=True, slots=True)
class LeaseFigures:
    """All figures.

    Attributes:
        few: with a hundredth of the leases.
        purge: while half of the leases end with their engines.
        purged_within_s: until a router's watch has told of all of them.
    """

    few: Phase
    many: Phase
    purge: Phase
    purged_leases: int
    purged_within_s: float

    def goals(self) -> dict[str, bool]:
        """Whether each goal is met."""
        grown = self.many.etcd_writes_a_second - self.few.etcd_writes_a_second
        return {
            f"the registry uses less than {CORES_AT_MOST:g} of a core": self.many.registry_cores
            < CORES_AT_MOST,
            "etcd's writes do not depend on the number of leases": grown <= WRITES_A_SECOND_AT_MOST,
            "every renewal was applied": self.many.missed == 0,
        }

    def table(self) -> str:
        """The figures for a terminal."""
        head = f"{'':8}{'leases':>9}{'cores':>8}{'writes/s':>10}{'renewal p50':>13}{'p99':>9}{'pin p50':>10}{'p99':>9}"
        lines = [head]
        for name, phase in (("few", self.few), ("many", self.many), ("purge", self.purge)):
            lines.append(
                f"{name:8}{phase.leases:9}{phase.registry_cores:8.3f}{phase.etcd_writes_a_second:10.2f}"
                f"{phase.renewal.p50_ms:13.1f}{phase.renewal.p99_ms:9.1f}"
                f"{phase.pin.p50_ms:10.1f}{phase.pin.p99_ms:9.1f}"
            )
        lines.append(
            f"{self.purged_leases} leases of ended engines were gone after {self.purged_within_s:.1f} s"
        )
        lines += [f"{'met' if met else 'NOT MET':8} {goal}" for goal, met in self.goals().items()]
        return "\n".join(lines)


async def measure(asked: Asked) -> LeaseFigures:
    """Runs the three measurements on one fleet."""
    few_ids, all_ids = range(1, asked.leases // 100 + asked.engines + 1), range(1, asked.leases + 1)
    async with lease_fleet() as fleet, router_of(fleet) as router:
        for number in range(asked.engines):
            # Those that end have a sidecar of their own, as on another machine.
            await fleet.attach(TimedEngine(number, router.clock), int(number >= asked.engines // 2))
        await router.hold(few_ids, asked.patience_s)
        few = await router.phase(lambda: router.keep_beating(asked.beats))
        await router.hold(all_ids[len(few_ids) :], asked.patience_s)
        many = await router.phase(lambda: router.keep_beating(asked.beats))
        ending = fleet.engines[asked.engines // 2 :]
        left = asked.leases - sum(len(engine.lease_ids) for engine in ending)
        began_s, purged_s = router.clock.now_s(), 0.0

        async def end_half() -> None:
            await asyncio.gather(*(engine.detach() for engine in ending))
            router.forget(ending)
            await router.until_recorded(left, asked.patience_s)
            nonlocal purged_s
            purged_s = router.clock.now_s() - began_s
            await router.keep_beating(1)

        purge = await router.phase(end_half)
        return LeaseFigures(few, many, purge, asked.leases - left, round(purged_s, 2))


@dataclass(slots=True)
class BenchRouter:
    """The router's side: heartbeats, a watch of leases, and pins."""

    fleet: LeaseFleet
    registry: GrpcRegistry
    stream: RenewalStream
    clock: LoopClock = field(default_factory=LoopClock)
    table: RenewalTable = field(default_factory=lambda: RenewalTable(POLICY))
    recorded: set[int] = field(default_factory=set[int])
    renewals_s: list[float] = field(default_factory=list[float])
    pins_s: list[float] = field(default_factory=list[float])
    missed: int = 0
    missed_pins: int = 0
    acks: asyncio.Queue[BeatAck] = field(default_factory=lambda: asyncio.Queue[BeatAck](1))

    async def hold(self, lease_ids: Sequence[int], patience_s: float) -> None:
        """Grants leases on all engines, confirms them, and returns when the watch has told of their records."""
        shares = share(lease_ids, len(self.fleet.engines))
        for engine, ids in zip(self.fleet.engines, shares, strict=True):
            engine.hold((*ids,))
        wanted = len(self.table) + len(lease_ids)
        step = max(1, STEP_LEASES // len(self.fleet.engines))
        for start in range(0, max(map(len, shares)), step):
            for engine, ids in zip(self.fleet.engines, shares, strict=True):
                for lease_id in ids[start : start + step]:
                    self.table.expect(self.clock.now_s(), lease_id, engine.facts.holder.engine_id)
            await self.beat_until_held(patience_s)
            await self.until_recorded(len(self.table), patience_s)
        assert len(self.table) == wanted

    def forget(self, engines: Sequence[TimedEngine]) -> None:
        """Renews the leases of ended engines no more, as a router does whose watch told of their end."""
        for engine in engines:
            for lease_id in engine.lease_ids:
                self.table.drop(lease_id)

    async def phase(self, during: Callable[[], Awaitable[None]]) -> Phase:
        """Measures while something lasts."""
        leases = len(self.table)
        self.renewals_s, self.pins_s = [], []
        self.missed = self.missed_pins = 0
        before_s, cpu_s, writes = (
            self.clock.now_s(),
            self.fleet.registry_cpu_s(),
            await self.fleet.etcd_writes(),
        )
        async with asyncio.TaskGroup() as group:
            pinning = group.create_task(self.keep_pinning())
            await during()
            pinning.cancel()
        lasted_s = self.clock.now_s() - before_s
        return Phase(
            leases,
            round((self.fleet.registry_cpu_s() - cpu_s) / lasted_s, 4),
            round((await self.fleet.etcd_writes() - writes) / lasted_s, 3),
            Spread.of(self.renewals_s),
            Spread.of(self.pins_s),
            self.missed,
            self.missed_pins,
        )

    async def beat_until_held(self, patience_s: float) -> None:
        """Beats until every lease was acked by its holder."""
        async with asyncio.timeout(patience_s):
            while self.missed_by(await self.beat()):  # noqa: ASYNC110 - asks another process
                await asyncio.sleep(0.1)

    def missed_by(self, misses: int) -> int:
        """Counts misses; they are asked for again."""
        self.missed += misses
        return misses

    async def keep_beating(self, beats: int) -> None:
        """So many heartbeats, an interval from one to the next."""
        for _ in range(beats):
            due = asyncio.create_task(asyncio.sleep(POLICY.interval_s))
            self.missed_by(await self.beat())
            await due

    async def beat(self) -> int:
        """One heartbeat and its ack. The leases that were not renewed."""
        sent_s = self.clock.now_s()
        beat = self.table.beat(sent_s)
        await self.stream.send(beat)
        ack = await self.acks.get()
        self.table.ack(self.clock.now_s(), ack.sequence, ack.misses)
        applied = (engine.renewed_s[-1:] for engine in self.fleet.engines)
        self.renewals_s += [at[0] - sent_s for at in applied if at and at[0] >= sent_s]
        return len(ack.misses)

    async def keep_pinning(self) -> None:
        """Pins and unpins leases of the engines that stay, one after the other, until cancelled."""
        staying = self.fleet.engines[: len(self.fleet.engines) // 2]
        number = 0
        while True:
            engine = staying[number % len(staying)]
            lease_id = engine.lease_ids[number // len(staying) % len(engine.lease_ids)]
            ask = PinAsk(lease_id, f"pin-{number}", engine.facts.holder, TENANT, reservation_s=30.0)
            before_s = self.clock.now_s()
            outcome = await self.registry.pin(ask, 0.0)
            self.pins_s.append(self.clock.now_s() - before_s)
            self.missed_pins += not isinstance(outcome, Pinned)
            with suppress(HolderUnreachable):  # the pin's deadline ends it
                await self.registry.unpin(ask.holder, lease_id, ask.pin_id)
            number += 1
            await asyncio.sleep(PIN_EVERY_S)

    async def receive(self) -> None:
        """Takes the answers of heartbeats, until cancelled; one heartbeat is under way at a time."""
        async for ack in self.stream.acks():
            await self.acks.put(ack)

    async def follow(self) -> None:
        """Keeps count of the records that the watch tells of."""
        async with self.registry.watch_leases() as batches:
            async for batch in batches:
                if batch.snapshot:
                    self.recorded.clear()
                for change in batch.changes:
                    (self.recorded.discard if change.gone else self.recorded.add)(change.item.lease_id)

    async def until_recorded(self, count: int, patience_s: float) -> None:
        """Returns when there are so many records; renews meanwhile."""
        beaten_s = self.clock.now_s()
        async with asyncio.timeout(patience_s):
            while len(self.recorded) != count:
                await asyncio.sleep(0.02)
                if self.clock.now_s() > beaten_s + POLICY.interval_s and not self.pins_s:
                    await self.beat()
                    beaten_s = self.clock.now_s()


@asynccontextmanager
async def router_of(fleet: LeaseFleet) -> AsyncGenerator[BenchRouter, None]:
    """A router's side of a fleet whose registry may still be starting."""
    channels = Channels(Identity.REGISTRY)
    registry = GrpcRegistry(channels, (fleet.registry_address,), secrets.token_hex(8), POLICY, CALL_S)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(channels.close)
        channel = await channels.get(fleet.registry_address)
        async with asyncio.timeout(60.0):
            await channel.channel_ready()
        router = BenchRouter(fleet, registry, await stack.enter_async_context(registry.renew()))
        # One that fails ends the measurement, which would wait for its answers for ever.
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(router.follow()), group.create_task(router.receive())]
            try:
                yield router
            finally:
                for helper in helpers:
                    helper.cancel()
