"""The ports between processes, over the simulated network. What runs at the other end is production code."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Protocol, TypeVar

from kvlease.core.errors import HolderUnreachable, KvleaseError
from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine, KvLocation, LeaseRecord, PinOutcome
from kvlease.core.renewal import Beat, RenewalPolicy
from kvlease.registry.registry import Registry
from kvlease.registry.renewals import EngineDelta, Heartbeat, RenewalSession
from kvlease.router.ports import BeatAck, RenewalStream
from kvlease.sidecar.sidecar import Sidecar
from kvlease.sim.engine import SimEngine
from kvlease.sim.ports import Landed, ReadFailed
from kvlease.simulation.loop import Process
from kvlease.simulation.network import Connection, SimNetwork, current
from kvlease.simulation.store import Batches
from kvlease.store.port import Batch, Item

Answer = TypeVar("Answer")

REGISTRY_CALL_S = 0.5


class Programs(Protocol):
    """What runs in the processes."""

    def sidecar(self, process: Process) -> Sidecar:
        """The sidecar that runs in a process."""
        ...

    def engine(self, process: Process) -> SimEngine:
        """The engine that runs in a process."""
        ...

    def registry(self, process: Process) -> Registry:
        """The registry that runs in a process."""
        ...


class SeededRandom:
    """A `RandomPort` of one seed."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def lease_id(self) -> int:
        """64 random bits, never zero."""
        return self._random.getrandbits(64) or 1

    def text_id(self) -> str:
        """32 random hex digits."""
        return f"{self._random.getrandbits(128):032x}"


class SimSidecars:
    """Sidecars by address, which is their process's name."""

    def __init__(self, network: SimNetwork, programs: Programs) -> None:
        self._network = network
        self._programs = programs

    async def pin(self, address: str, ask: PinAsk, wait_for_offer_s: float, deadline_s: float) -> PinOutcome:
        """Asks for a pin."""
        return await self._call(
            address, lambda sidecar: sidecar.pin(ask, wait_for_offer_s), deadline_s + wait_for_offer_s
        )

    async def unpin(
        self, address: str, holder: Holder, lease_id: int, pin_id: str, deadline_s: float
    ) -> None:
        """Ends a pin."""
        await self._call(address, lambda sidecar: sidecar.unpin(holder, lease_id, pin_id), deadline_s)

    async def renew(
        self,
        address: str,
        engine_id: str,
        lease_ids: Sequence[int],
        duration_s: float,
        pin_ids: Sequence[str],
        reservation_s: float,
        deadline_s: float,
    ) -> dict[int, MissReason]:
        """Renews leases and reservations."""

        def renew(sidecar: Sidecar) -> Awaitable[dict[int, MissReason]]:
            return sidecar.renew(engine_id, lease_ids, duration_s, pin_ids, reservation_s)

        return await self._call(address, renew, deadline_s)

    async def release(
        self, address: str, engine_id: str, lease_id: int, tenant: str, deadline_s: float, *, superseded: bool
    ) -> MissReason | None:
        """Ends a lease."""

        def release(sidecar: Sidecar) -> Awaitable[MissReason | None]:
            return sidecar.release(engine_id, lease_id, tenant, superseded=superseded)

        return await self._call(address, release, deadline_s)

    async def drain(self, address: str, engine_id: str, deadline_s: float, *, undo: bool) -> None:
        """Keeps new turns away, or lets them come again."""
        await self._call(address, lambda sidecar: sidecar.drain(engine_id, undo=undo), deadline_s)

    async def _call(
        self, address: str, ask: Callable[[Sidecar], Awaitable[Answer]], deadline_s: float
    ) -> Answer:
        return await self._network.call(
            address, lambda: ask(self._programs.sidecar(current())), deadline_s, repeats=True
        )


class SimPins:
    """An engine's way to other holders, through its own sidecar; what runs there is the production sidecar."""

    def __init__(self, network: SimNetwork, programs: Programs, sidecar_name: str, wait_s: float) -> None:
        self._network = network
        self._programs = programs
        self._sidecar_name = sidecar_name
        self._wait_s = wait_s

    async def pin(self, ask: PinAsk, sidecar_address: str) -> PinOutcome:
        """Asks for a pin on another engine."""

        def serve() -> Awaitable[PinOutcome]:
            return self._programs.sidecar(current()).remote_pin(ask, 0.0, sidecar_address)

        try:
            return await self._network.call(self._sidecar_name, serve, self._wait_s)
        except HolderUnreachable:
            return MissReason.UNREACHABLE

    def unpin(self, holder: Holder, lease_id: int, pin_id: str, sidecar_address: str) -> None:
        """Ends a pin on another engine."""

        def serve() -> Awaitable[None]:
            return self._programs.sidecar(current()).remote_unpin(holder, lease_id, pin_id, sidecar_address)

        async def tell() -> None:
            try:
                await self._network.call(self._sidecar_name, serve, self._wait_s)
            except KvleaseError:
                """Unheard, the pin's deadline ends it."""

        if not self._network.closed:
            self._network.spawn(current(), tell())


class SimTransfers:
    """READs that take time, stand still while the holder does, and land whatever the reader does.

    Args:
        read_s: what a READ takes usually, and at worst.
    """

    def __init__(
        self, network: SimNetwork, programs: Programs, random: Random, read_s: tuple[float, float]
    ) -> None:
        self._network = network
        self._programs = programs
        self._random = random
        self._read_s = read_s

    async def read(
        self, location: KvLocation, holder: Holder, block_ids: Sequence[int], landed: Landed
    ) -> None:
        """READs blocks in the order in which the network brings them; what is seen of it is the reader's."""
        loop = self._network.loop
        transfer = loop.spawn_in_world(self._move(location.side_channel_host, holder, block_ids, landed))
        try:
            await asyncio.shield(transfer)
        except asyncio.CancelledError:
            transfer.cancel()
            raise

    async def _move(self, name: str, holder: Holder, block_ids: Sequence[int], landed: Landed) -> None:
        usual_s, slow_s = self._read_s
        total_s = slow_s if self._random.random() < 0.1 else self._random.uniform(0.1, 1.0) * usual_s
        places = list(range(len(block_ids)))
        self._random.shuffle(places)
        for place in places:
            await asyncio.sleep(total_s / len(places))
            process = self._network.processes.get(name)
            while process is not None and process.stopped:
                await asyncio.sleep(0.1)
                process = self._network.processes.get(name)
            if process is None:
                raise ReadFailed("the holder is gone")
            engine = self._programs.engine(process)
            if not self._is_same(engine.holder.holder, holder):
                raise ReadFailed("another engine answers in the holder's place")
            landed(place, engine.pool.read(block_ids[place]))

    def _is_same(self, found: Holder, asked: Holder) -> bool:
        return found.boot_id == asked.boot_id


class SimRegistryPort:
    """The registry as a router reaches it: any replica, another one when that one is silent."""

    def __init__(
        self,
        network: SimNetwork,
        programs: Programs,
        replicas: Sequence[str],
        session: str,
        policy: RenewalPolicy,
    ) -> None:
        self._network = network
        self._programs = programs
        self._replicas = list(replicas)
        self._session = session
        self._policy = policy

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """Takes a pin at the holder."""
        try:
            return await self._call(
                lambda registry: registry.pin(ask, wait_for_offer_s), REGISTRY_CALL_S + wait_for_offer_s
            )
        except KvleaseError:
            return MissReason.UNREACHABLE

    async def unpin(self, holder: Holder, lease_id: int, pin_id: str) -> None:
        """Ends a pin."""
        await self._call(lambda registry: registry.unpin(holder, lease_id, pin_id), REGISTRY_CALL_S)

    async def release(self, lease_id: int, engine_id: str, tenant: str) -> MissReason | None:
        """Releases a lease."""
        try:
            return await self._call(
                lambda registry: registry.release(lease_id, engine_id, tenant), REGISTRY_CALL_S
            )
        except KvleaseError:
            return MissReason.UNREACHABLE

    @asynccontextmanager
    async def watch_engines(self) -> AsyncGenerator[AsyncIterator[Batch[Engine]], None]:
        """First a snapshot, then every change."""
        connection, registry = await self._connect()
        async with _closing(Batches(self._network, connection, lambda: registry().watch_engines)) as batches:
            yield batches

    @asynccontextmanager
    async def watch_leases(self) -> AsyncGenerator[AsyncIterator[Batch[LeaseRecord]], None]:
        """First a snapshot, then every change."""
        connection, registry = await self._connect()
        async with _closing(Batches(self._network, connection, lambda: registry().watch_leases)) as batches:
            yield batches

    @asynccontextmanager
    async def renew(self) -> AsyncGenerator[RenewalStream, None]:
        """Opens a stream of heartbeats."""
        connection, registry = await self._connect()
        stream = _SimRenewals(self._network, connection, registry, self._session, self._policy)
        try:
            yield stream
        finally:
            connection.close(current())

    async def _connect(self) -> tuple[Connection, Callable[[], Registry]]:
        try:
            connection = await self._network.connect(self._replicas[0])
        except HolderUnreachable:
            self._turn_to_another()
            raise
        there = connection.other(current())
        return connection, lambda: self._programs.registry(there)

    async def _call(self, ask: Callable[[Registry], Awaitable[Answer]], deadline_s: float) -> Answer:
        try:
            return await self._network.call(
                self._replicas[0], lambda: ask(self._programs.registry(current())), deadline_s, repeats=True
            )
        except HolderUnreachable:
            self._turn_to_another()
            raise

    def _turn_to_another(self) -> None:
        self._replicas.append(self._replicas.pop(0))


@asynccontextmanager
async def _closing(batches: Batches[Item]) -> AsyncGenerator[Batches[Item], None]:
    try:
        yield batches
    finally:
        batches.close()


class _SimRenewals:
    """One stream of heartbeats, as a router sees it."""

    def __init__(
        self,
        network: SimNetwork,
        connection: Connection,
        registry: Callable[[], Registry],
        session: str,
        policy: RenewalPolicy,
    ) -> None:
        self._network = network
        self._connection = connection
        self._registry = registry
        self._session = session
        self._policy = policy
        self._here = current()
        self._state: RenewalSession | None = None
        self._acks: asyncio.Queue[BeatAck | None] = asyncio.Queue(10_000)
        connection.on_close(self._here, lambda: self._acks.put_nowait(None))

    async def send(self, beat: Beat) -> None:
        """Sends one beat."""
        if not self._connection.is_open(self._here):
            raise HolderUnreachable("the stream is broken")
        engines = tuple(
            EngineDelta(
                engine_id,
                delta.added_lease_ids,
                delta.dropped_lease_ids,
                delta.added_pin_ids,
                delta.dropped_pin_ids,
            )
            for engine_id, delta in beat.engines.items()
        )
        policy = self._policy
        heartbeat = Heartbeat(
            self._session,
            beat.epoch,
            beat.sequence,
            beat.full,
            engines,
            policy.duration_s,
            policy.reservation_s,
        )
        self._connection.send(self._here, lambda: self._take(heartbeat))

    async def acks(self) -> AsyncIterator[BeatAck]:
        """The answers, until the stream ends."""
        while (ack := await self._acks.get()) is not None:
            yield ack
        raise HolderUnreachable("the stream broke")

    def _take(self, heartbeat: Heartbeat) -> None:
        """Runs in the registry."""
        there, registry = current(), self._registry()
        if self._state is None:
            self._state = registry.open_session()
        try:
            pending = registry.renew(self._state, heartbeat)
        except KvleaseError:
            self._connection.close(there)
            return

        async def answer() -> None:
            ack = await pending.ack()
            answered = BeatAck(ack.sequence, ack.misses, ack.resync)
            self._connection.send(there, lambda: self._acks.put_nowait(answered))

        self._network.spawn(there, answer())
