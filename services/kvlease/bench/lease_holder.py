"""`kvlease bench leases --engine vllm`: renewals and pins at an engine that holds, idle and while it decodes.

A prefill and a decode engine as processes; registry, sidecars and router in this process, as `kvlease dev` has them.
One turn of each conversation leaves a lease at the decode engine. A renewal's time is from before the heartbeat is
sent until the registry has said that the holder applied it; a pin's is the caller's. Milliseconds.
"""

import asyncio
import json
import secrets
import sys
from argparse import Namespace
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial

import aiohttp

from kvlease.bench.machine import machine
from kvlease.bench.multiturn.client import RoutedFleet, completion_body
from kvlease.bench.multiturn.engines import TurnFailedError
from kvlease.bench.multiturn.fleet import SERVED_MODEL, EngineChoice
from kvlease.bench.spread import Spread
from kvlease.core.errors import KvleaseError
from kvlease.core.holding import PinAsk
from kvlease.core.lease import LeaseKind
from kvlease.core.records import EngineRole, LeaseRecord, Pinned
from kvlease.core.renewal import RenewalPolicy, RenewalTable
from kvlease.dev import main as dev
from kvlease.dev.engine_env import EngineEnvironmentError, ensure_engine_environment
from kvlease.dev.engine_process import ConnectorChoice, Device, EngineProcess, EngineProcessError
from kvlease.dev.engine_process import EngineRole as ProcessRole
from kvlease.dev.stack import EngineSeat, MakeEngine, Stack, StackError, StackPlan
from kvlease.dev.tiny_model import ensure_tiny_model
from kvlease.router.config import RouterConfig
from kvlease.router.ports import BeatAck, RenewalStream
from kvlease.router.registry_client import GrpcRegistry
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.grpc_client import Channels
from kvlease.runtime.identity import Identity

ENGINES = ("vllm", "sim")
FAILURES = (
    EngineEnvironmentError,
    EngineProcessError,
    KvleaseError,
    StackError,
    TurnFailedError,
    TimeoutError,
)

LEASES = 8
STREAMS = 4
STREAM_PROMPT_TOKENS = 32
STREAM_TOKENS = 256
PROMPT_TOKENS = 512
TURN_TOKENS = 8
EVERY_S = 0.3
"""From one renewal to the next: above what the registry spaces renewals of one engine by."""

GAP_S = 3600.0
CALL_S = 10.0
RECORDED_S = 60.0
RESERVATION_S = 30.0
POLICY = RenewalPolicy(gap_floor_s=GAP_S, gap_cap_s=GAP_S)


@dataclass(frozen=True, slots=True)
class HolderPhase:
    """One measurement.

    Attributes:
        streams: replies that the engine decoded at once.
        decoded_tokens_a_second: of all of them.
        missed: renewals that the holder did not apply.
        missed_pins: pins that were not taken.
    """

    streams: int
    decoded_tokens_a_second: float
    renewal: Spread
    pin: Spread
    missed: int
    missed_pins: int


@dataclass(frozen=True, slots=True)
class HolderFigures:
    """All figures."""

    leases: int
    idle: HolderPhase
    busy: HolderPhase

    def goals(self) -> dict[str, bool]:
        """Whether each goal is met."""
        phases = (self.idle, self.busy)
        return {
            "every renewal was applied": all(phase.missed == 0 for phase in phases),
            "every pin was taken": all(phase.missed_pins == 0 for phase in phases),
            "the busy engine decoded all the while": self.busy.decoded_tokens_a_second > 0,
        }

    def table(self) -> str:
        """The figures for a terminal."""
        head = f"{'':6}{'streams':>8}{'tokens/s':>10}{'renewal p50':>13}{'p99':>9}{'pin p50':>10}{'p99':>9}"
        lines = [head]
        for name, phase in (("idle", self.idle), ("busy", self.busy)):
            lines.append(
                f"{name:6}{phase.streams:8}{phase.decoded_tokens_a_second:10.1f}"
                f"{phase.renewal.p50_ms:13.1f}{phase.renewal.p99_ms:9.1f}"
                f"{phase.pin.p50_ms:10.1f}{phase.pin.p99_ms:9.1f}"
            )
        lines += [f"{'met' if met else 'NOT MET':8} {goal}" for goal, met in self.goals().items()]
        return "\n".join(lines)


def run(arguments: Namespace) -> int:
    """Measures and prints. The exit status: 0 when every goal was met."""
    leases = LEASES if arguments.leases is None else arguments.leases
    if not 1 <= leases <= 1000 or arguments.seconds <= 0:
        sys.stderr.write("kvlease bench leases: an engine holds 1 to 1,000 leases, for more than 0 seconds\n")
        return 2
    try:
        figures = asyncio.run(measure(_engines(arguments.engine), leases, arguments.seconds))
    except FAILURES as error:
        sys.stderr.write(f"kvlease bench leases: {type(error).__name__}: {error}\n")
        return 1
    document = {
        "what": "leases of an engine renewed and pinned, idle and while it decodes",
        "command": f"kvlease bench leases --engine {arguments.engine} --leases {leases} "
        f"--seconds {arguments.seconds:g}",
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
class Engines:
    """How engines are made, and the name under which they serve."""

    make: MakeEngine
    model: str


async def measure(engines: Engines, leases: int, seconds: float) -> HolderFigures:
    """Starts the engines, lets turns leave leases, and measures both phases."""
    router = RouterConfig(gap_floor_s=GAP_S, gap_cap_s=GAP_S)
    stack = Stack(StackPlan(1, 1, engines.make, router=router), _progress)
    timeout = aiohttp.ClientTimeout(total=600.0)
    try:
        await stack.start()
        async with aiohttp.ClientSession(timeout=timeout) as session, probe_of(stack) as probe:
            await _talk(RoutedFleet(session, stack.router_url, engines.model), leases)
            await probe.take(leases)
            idle = await probe.phase(seconds)
            decode_url = stack.engine_urls(EngineRole.DECODE)[0]
            async with Decoding(session, decode_url, engines.model) as decoding:
                busy = await probe.phase(seconds, decoding)
            return HolderFigures(leases, idle, busy)
    finally:
        await stack.stop()


async def _talk(fleet: RoutedFleet, conversations: int) -> None:
    """One turn of each conversation: what the decode engine keeps of it stays alive for the whole measurement."""
    for number in range(conversations):
        prompt = [(number * 7 + place) % 90 + 5 for place in range(PROMPT_TOKENS)]
        await fleet.turn(f"leases-{number}", prompt, TURN_TOKENS, stream=True)


class Decoding:
    """Replies that an engine decodes, one after the other in each of several streams, while the context lasts."""

    def __init__(self, session: aiohttp.ClientSession, engine_url: str, model: str) -> None:
        self._session = session
        self._engine_url = engine_url
        self._model = model
        self._tasks: list[asyncio.Task[None]] = []
        self.tokens = 0

    async def __aenter__(self) -> "Decoding":
        """Returns once every stream gives tokens.

        Raises:
            TurnFailedError: the engine answered with an error.
        """
        began = [asyncio.Event() for _ in range(STREAMS)]
        self._tasks = [asyncio.create_task(self._stream(number, event)) for number, event in enumerate(began)]
        for task, event in zip(self._tasks, began, strict=True):
            waiter = asyncio.create_task(event.wait())
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            waiter.cancel()
            if task.done():
                await self.__aexit__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends the streams.

        Raises:
            TurnFailedError: one of them failed before.
        """
        for task in self._tasks:
            task.cancel()
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    async def _stream(self, number: int, began: asyncio.Event) -> None:
        body = completion_body(self._model, [number + 5] * STREAM_PROMPT_TOKENS, STREAM_TOKENS, True)
        while True:
            async with self._session.post(f"{self._engine_url}/v1/completions", json=body) as response:
                if response.status != 200:
                    raise TurnFailedError(f"{self._engine_url} answered {response.status}")
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self.tokens += 1
                        began.set()


@dataclass(slots=True)
class HolderProbe:
    """A router's side that only renews and pins."""

    registry: GrpcRegistry
    stream: RenewalStream
    acks: AsyncGenerator[BeatAck, None]
    clock: LoopClock = field(default_factory=LoopClock)
    table: RenewalTable = field(default_factory=lambda: RenewalTable(POLICY))
    records: list[LeaseRecord] = field(default_factory=list[LeaseRecord])

    async def take(self, count: int) -> None:
        """Waits for the records of so many leases, and renews them from here on.

        Raises:
            TimeoutError: the turns left fewer.
        """
        found: dict[int, LeaseRecord] = {}
        async with asyncio.timeout(RECORDED_S), self.registry.watch_leases() as batches:
            async for batch in batches:
                for change in batch.changes:
                    if change.gone:
                        found.pop(change.item.lease_id, None)
                    elif change.item.kind is LeaseKind.CONVERSATION:
                        found[change.item.lease_id] = change.item
                if len(found) >= count:
                    break
        self.records = list(found.values())
        for record in self.records:
            self.table.expect(self.clock.now_s(), record.lease_id, record.holder.engine_id, GAP_S)

    async def phase(self, seconds: float, decoding: Decoding | None = None) -> HolderPhase:
        """Renews all leases and pins one of them, again and again."""
        renewals_s: list[float] = []
        pins_s: list[float] = []
        missed = missed_pins = 0
        began_s, tokens = self.clock.now_s(), decoding.tokens if decoding is not None else 0
        while self.clock.now_s() < began_s + seconds:
            due = asyncio.create_task(asyncio.sleep(EVERY_S))
            took_s, misses = await self._renew()
            renewals_s.append(took_s)
            missed += misses
            pin_s, pinned = await self._pin(self.records[len(pins_s) % len(self.records)])
            pins_s.append(pin_s)
            missed_pins += not pinned
            await due
        lasted_s = self.clock.now_s() - began_s
        decoded = decoding.tokens - tokens if decoding is not None else 0
        return HolderPhase(
            STREAMS if decoding is not None else 0,
            round(decoded / lasted_s, 1),
            Spread.of(renewals_s),
            Spread.of(pins_s),
            missed,
            missed_pins,
        )

    async def _renew(self) -> tuple[float, int]:
        """One heartbeat: seconds until its ack, and the leases that were not renewed."""
        sent_s = self.clock.now_s()
        beat = self.table.beat(sent_s)
        await self.stream.send(beat)
        while (ack := await anext(self.acks)).sequence < beat.sequence:
            pass
        took_s = self.clock.now_s() - sent_s
        self.table.ack(self.clock.now_s(), ack.sequence, ack.misses)
        return took_s, len(ack.misses)

    async def _pin(self, record: LeaseRecord) -> tuple[float, bool]:
        """One pin: seconds that it took, and whether it was taken."""
        pin_id = f"bench-{secrets.token_hex(8)}"
        ask = PinAsk(record.lease_id, pin_id, record.holder, record.tenant, reservation_s=RESERVATION_S)
        before_s = self.clock.now_s()
        outcome = await self.registry.pin(ask, 0.0)
        took_s = self.clock.now_s() - before_s
        with suppress(KvleaseError):  # the pin's deadline ends it
            await self.registry.unpin(record.holder, record.lease_id, pin_id)
        return took_s, isinstance(outcome, Pinned)


@asynccontextmanager
async def probe_of(stack: Stack) -> AsyncGenerator[HolderProbe, None]:
    """A probe at the registry of a running stack."""
    if stack.registry is None:
        raise StackError("a probe needs the registry")
    channels = Channels(Identity.REGISTRY)
    registry = GrpcRegistry(channels, (stack.registry.address,), secrets.token_hex(8), POLICY, CALL_S)
    async with AsyncExitStack() as exits:
        exits.push_async_callback(channels.close)
        stream = await exits.enter_async_context(registry.renew())
        acks = _acks(stream)
        exits.push_async_callback(acks.aclose)
        yield HolderProbe(registry, stream, acks)


async def _acks(stream: RenewalStream) -> AsyncGenerator[BeatAck, None]:
    async for ack in stream.acks():
        yield ack


def _engines(kind: str) -> Engines:
    """Engines of a kind; prepares what they need.

    Raises:
        EngineEnvironmentError: real vLLM cannot be installed here.
    """
    if kind == "sim":
        return Engines(dev.simulated_engine, dev.SERVED_MODEL)
    python = ensure_engine_environment(_progress)
    choice = EngineChoice(Device.CPU, python, ensure_tiny_model(), (), ())
    return Engines(partial(_vllm, choice), SERVED_MODEL)


def _vllm(choice: EngineChoice, seat: EngineSeat) -> EngineProcess:
    return EngineProcess(choice.spec(ProcessRole(seat.role.value), seat, ConnectorChoice.KVLEASE))


def _progress(text: str) -> None:
    sys.stderr.write(text + "\n")
