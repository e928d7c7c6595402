"""Times the calls to sidecars."""

from collections.abc import Sequence

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import PinOutcome
from kvlease.runtime.metric_catalogue import SIDECAR_CALL_SECONDS
from kvlease.runtime.metrics import CallTimer, Metrics
from kvlease.runtime.sidecars import GrpcSidecars


class MeasuredSidecars:
    """`GrpcSidecars` whose calls are timed by outcome."""

    def __init__(self, inner: GrpcSidecars, metrics: Metrics) -> None:
        self._inner = inner
        self._timer = CallTimer(metrics, SIDECAR_CALL_SECONDS)

    async def pin(self, address: str, ask: PinAsk, wait_for_offer_s: float, deadline_s: float) -> PinOutcome:
        """Asks for a pin."""
        return await self._timer.timed("pin", self._inner.pin(address, ask, wait_for_offer_s, deadline_s))

    async def unpin(
        self, address: str, holder: Holder, lease_id: int, pin_id: str, deadline_s: float
    ) -> None:
        """Ends a pin."""
        await self._timer.timed("unpin", self._inner.unpin(address, holder, lease_id, pin_id, deadline_s))

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
        call = self._inner.renew(
            address, engine_id, lease_ids, duration_s, pin_ids, reservation_s, deadline_s
        )
        return await self._timer.timed("renew", call)

    async def release(
        self, address: str, engine_id: str, lease_id: int, tenant: str, deadline_s: float, *, superseded: bool
    ) -> MissReason | None:
        """Ends a lease."""
        call = self._inner.release(address, engine_id, lease_id, tenant, deadline_s, superseded=superseded)
        return await self._timer.timed("supersede" if superseded else "release", call)

    async def drain(self, address: str, engine_id: str, deadline_s: float, *, undo: bool) -> None:
        """Keeps new turns away from an engine, or lets them come again."""
        await self._timer.timed("drain", self._inner.drain(address, engine_id, deadline_s, undo=undo))

    async def close(self) -> None:
        """Closes every channel."""
        await self._inner.close()
