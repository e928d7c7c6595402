"""The stream between a simulated engine and its sidecar: ordered, and broken when either side goes away."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from kvlease.simulation.network import Pipe, SimNetwork

Answer = TypeVar("Answer")

PIN_CALL_S = 0.2
HOLDER_CALL_S = 1.0


class Attachment:
    """One attached stream. It is the sidecar's `ConnectorLink` and the engine's `OfferListener`."""

    def __init__(self, network: SimNetwork, engine: SimEngine, names: tuple[str, str]) -> None:
        engine_name, sidecar_name = names
        self._engine = engine
        self._network = network
        self._up = Pipe(network, engine_name, sidecar_name, lambda: self.close("the stream broke"))
        self._down = Pipe(network, sidecar_name, engine_name, lambda: self.close("the stream broke"))
        self._open: set[asyncio.Future[Any]] = set()
        self._attached: AttachedEngine | None = None
        self._early: list[Callable[[AttachedEngine], None]] = []
        self.closed = asyncio.Event()

    async def hold(self, sidecar: Sidecar) -> None:
        """Attaches, and stays until the stream breaks."""
        # Listening begins before the holds are listed: what happens in between is said twice, never not at all.
        self._engine.holder.listen(self)
        offers = self._engine.holder.offers()
        try:
            async with sidecar.attached(self._engine.facts(), offers, self) as attached:
                self._attached = attached
                for deliver in self._early:
                    deliver(attached)
                self._early.clear()
                await self.closed.wait()
        except KvleaseError:
            pass
        finally:
            self.close("the stream ended")

    # --- OfferListener ------------------------------------------------------------------------------------

    def offered(self, offer: LeaseOffer) -> None:
        """Tells the sidecar of a hold."""
        self._tell(lambda attached: attached.offer(offer))

    def happened(self, holder: Holder, events: Sequence[HoldEvent]) -> None:
        """Tells the sidecar what happened to holds."""
        self._tell(lambda attached: attached.apply_events(holder, events))

    # --- ConnectorLink ------------------------------------------------------------------------------------

    async def pin(self, ask: PinAsk) -> PinOutcome:
        """Asks the holder's table for a pin."""
        return await self._ask(lambda: self._engine.holder.pin(ask), PIN_CALL_S)

    def unpin(self, lease_id: int, pin_id: str) -> None:
        """Tells that a pin has ended."""
        self._down.send(lambda: self._engine.holder.unpin(lease_id, pin_id))

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
        self._down.send(lambda: self._engine.holder.set_order(lease_ids))

    async def read_gauges(self) -> HolderGauges:
        """The holder's gauges and counters."""
        return await self._ask(self._engine.gauges, HOLDER_CALL_S)

    def close(self, reason: str) -> None:
        """Ends the stream; every open question fails at once."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._engine.holder.listen(None)
        for future in self._open:
            if not future.done():
                future.set_exception(HolderUnreachable(reason))
        self._up.close()
        self._down.close()

    # --- inside -------------------------------------------------------------------------------------------

    def _tell(self, deliver: Callable[[AttachedEngine], None]) -> None:
        self._up.send(lambda: self._deliver(deliver))

    def _deliver(self, deliver: Callable[[AttachedEngine], None]) -> None:
        if self._attached is None:
            self._early.append(deliver)
        else:
            deliver(self._attached)

    async def _ask(self, question: Callable[[], Answer], bound_s: float) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open.add(future)

        def answer() -> None:
            if not future.done():
                future.set_result(result[0])

        result: list[Answer] = []

        def ask() -> None:
            result.append(question())
            self._up.send(answer)

        try:
            if self.closed.is_set():
                raise HolderUnreachable("the connector is gone")
            self._down.send(ask)
            async with asyncio.timeout(bound_s):
                return await future
        except TimeoutError as error:
            raise HolderUnreachable(f"the connector did not answer within {bound_s:g} s") from error
        finally:
            self._open.discard(future)
            with suppress(asyncio.CancelledError, KvleaseError):
                if future.done():
                    future.exception()
