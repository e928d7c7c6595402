"""What a registry needs of the world besides a store and a clock."""

from collections.abc import Sequence
from typing import Protocol

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import PinOutcome


class SidecarTransport(Protocol):
    """The way to sidecars. Raises `HolderUnreachable` when one does not answer within `deadline_s`."""

    async def pin(self, address: str, ask: PinAsk, wait_for_offer_s: float, deadline_s: float) -> PinOutcome:
        """Asks for a pin; the wait for an offer comes on top of the deadline."""
        ...

    async def unpin(
        self, address: str, holder: Holder, lease_id: int, pin_id: str, deadline_s: float
    ) -> None:
        """Ends a pin; idempotent."""
        ...

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
        """Renews leases and reservations of one engine. The leases that could not be renewed."""
        ...

    async def release(
        self, address: str, engine_id: str, lease_id: int, tenant: str, deadline_s: float, *, superseded: bool
    ) -> MissReason | None:
        """Ends a lease; idempotent. None, or what it was already."""
        ...

    async def drain(self, address: str, engine_id: str, deadline_s: float, *, undo: bool) -> None:
        """Keeps new turns away from an engine, or lets them come again; idempotent."""
        ...
