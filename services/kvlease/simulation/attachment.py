"""The stream between a simulated engine and its sidecar. Its two ends learn in their own time that it broke."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvlease.core.attachment import LeaseOffer
from kvlease.core.errors import HolderUnreachable, KvleaseError
from kvlease.core.holding import HoldEvent, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, MissReason
from kvlease.core.records import HolderGauges, PinOutcome
from kvlease.sidecar.engine import AttachedEngine
from kvlease.sidecar.sidecar import Sidecar
from kvlease.sim.engine import SimEngine
from kvlease.simulation.loop import Process
from kvlease.simulation.network import Connection, SimNetwork, answered, current

Answer = TypeVar("Answer")

PIN_CALL_S = 0.2
HOLDER_CALL_S = 1.0


async def stay_attached(
    network: SimNetwork, engine: SimEngine, sidecar_name: str, sidecar_of: "SidecarOf"
) -> None:
    """Runs in the engine: attaches to whoever is the sidecar, again and again."""
    while True:
        try:
            connection = await network.connect(sidecar_name)
        except HolderUnreachable:
            await asyncio.sleep(0.2)
            continue
        await _EngineEnd(network, engine, connection, sidecar_of).stay()
        await asyncio.sleep(0.1)


SidecarOf = Callable[[Process], Sidecar]
"""The sidecar that runs in a process."""


class _EngineEnd:
    """The engine's end: an `OfferListener`."""

    def __init__(
        self, network: SimNetwork, engine: SimEngine, connection: Connection, sidecar_of: SidecarOf
    ) -> None:
        self._engine = engine
        self._connection = connection
        self._here = current()
        self._ended = asyncio.Event()
        connection.on_close(self._here, self._ended.set)
        self._link = _SidecarEnd(network, engine, connection)
        self._sidecar_of = sidecar_of

    async def stay(self) -> None:
        """Returns when this end knows that the stream has ended."""
        # Listening begins before the holds are listed: what happens in between is said twice, never not at all.
        holder, link, there = self._engine.holder, self._link, self._connection.other(self._here)
        holder.listen(self)
        facts, offers = self._engine.facts(), holder.offers()

        def attach() -> None:
            link.attach(self._sidecar_of(there), facts, offers)

        self._connection.send(self._here, attach)
        await self._ended.wait()
        holder.listen(None)

    def offered(self, offer: LeaseOffer) -> None:
        """Tells the sidecar of a hold."""
        self._connection.send(self._here, lambda: self._link.hear(lambda attached: attached.offer(offer)))

    def happened(self, holder: Holder, events: Sequence[HoldEvent]) -> None:
        """Tells the sidecar what happened to holds."""

        def deliver(attached: AttachedEngine) -> None:
            attached.apply_events(holder, events)

        self._connection.send(self._here, lambda: self._link.hear(deliver))


class _SidecarEnd:
    """The sidecar's end: a `ConnectorLink`. What is asked runs at the engine, on its table."""

    def __init__(self, network: SimNetwork, engine: SimEngine, connection: Connection) -> None:
        self._network = network
        self._engine = engine
        self._connection = connection
        self._there, self._here = connection.ends
        self._attached: AttachedEngine | None = None
        self._early: list[Callable[[AttachedEngine], None]] = []
        self._open: dict[asyncio.Future[Any], None] = {}
        self._ended = asyncio.Event()

    # --- runs in the sidecar ------------------------------------------------------------------------------

    def attach(self, sidecar: Sidecar, facts: Any, offers: Sequence[LeaseOffer]) -> None:
        """Registers the engine for as long as the stream lasts."""
        self._connection.on_close(self._here, self._break_off)
        self._network.spawn(self._here, self._hold(sidecar, facts, offers))

    async def _hold(self, sidecar: Sidecar, facts: Any, offers: Sequence[LeaseOffer]) -> None:
        try:
            async with sidecar.attached(facts, offers, self) as attached:
                self._attached = attached
                for deliver in self._early:
                    deliver(attached)
                self._early.clear()
                await self._ended.wait()
        except KvleaseError:
            pass
        finally:
            self._connection.close(self._here)

    def hear(self, deliver: Callable[[AttachedEngine], None]) -> None:
        """Takes what the engine tells, once it is registered."""
        if self._attached is None:
            self._early.append(deliver)
        else:
            deliver(self._attached)

    async def pin(self, ask: PinAsk) -> PinOutcome:
        """Asks the holder's table for a pin."""
        return await self._ask(lambda: self._engine.holder.pin(ask), PIN_CALL_S)

    def unpin(self, lease_id: int, pin_id: str) -> None:
        """Tells that a pin has ended."""
        self._connection.send(self._here, lambda: self._engine.holder.unpin(lease_id, pin_id))

    async def renew(
        self, lease_ids: Sequence[int], duration_s: float, pin_ids: Sequence[str], reservation_s: float
    ) -> dict[int, MissReason]:
        """Renews leases and the reservations of pins."""
        return await self._ask(
            lambda: self._engine.holder.renew(lease_ids, duration_s, pin_ids, reservation_s), HOLDER_CALL_S
        )

    async def release(self, lease_id: int, *, superseded: bool) -> MissReason | None:
        """Ends a lease."""
        event = LeaseEvent.SUPERSEDE if superseded else LeaseEvent.RELEASE
        return await self._ask(lambda: self._engine.holder.end(lease_id, event), HOLDER_CALL_S)

    def order_evictions(self, lease_ids: Sequence[int]) -> None:
        """Tells the order of eviction."""
        self._connection.send(self._here, lambda: self._engine.holder.set_order(lease_ids))

    async def read_gauges(self) -> HolderGauges:
        """The holder's gauges and counters."""
        return await self._ask(self._engine.gauges, HOLDER_CALL_S)

    def close(self, reason: str) -> None:
        """Ends the stream from here."""
        self._connection.close(self._here)

    # --- inside -------------------------------------------------------------------------------------------

    def _break_off(self) -> None:
        """Every open question fails at once."""
        self._ended.set()
        for future in self._open:
            if not future.done():
                future.set_exception(HolderUnreachable("the stream of the connector has ended"))

    async def _ask(self, question: Callable[[], Answer], bound_s: float) -> Answer:
        if not self._connection.is_open(self._here):
            raise HolderUnreachable("the connector is gone")
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[future] = None

        def ask() -> None:
            result = question()
            self._connection.send(self._there, lambda: None if future.done() else future.set_result(result))

        try:
            self._connection.send(self._here, ask)
            return await answered(future, "the connector", bound_s)
        finally:
            del self._open[future]
