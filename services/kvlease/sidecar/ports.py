"""What a sidecar needs of the world besides a store and a clock."""

from collections.abc import Callable, Sequence
from typing import Protocol

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseState, MissReason
from kvlease.core.records import HolderGauges, LeaseRecord, PinOutcome

LeaseEnded = Callable[[LeaseRecord, LeaseState], None]
"""Hears of each lease that ended, and in which state: a terminal one, or DRAINING while a READ goes on."""


def no_listener(record: LeaseRecord, state: LeaseState) -> None:
    """Hears nothing."""


class ConnectorLink(Protocol):
    """The way to one attached connector.

    Questions raise `HolderUnreachable` when the connector does not answer within the link's bound.
    """

    async def pin(self, ask: PinAsk) -> PinOutcome:
        """Asks the holder's table for a pin."""
        ...

    def unpin(self, lease_id: int, pin_id: str) -> None:
        """Tells that a pin has ended; when it cannot be told, the pin's deadline ends it."""
        ...

    async def renew(
        self, lease_ids: Sequence[int], duration_s: float, pin_ids: Sequence[str], reservation_s: float
    ) -> dict[int, MissReason]:
        """Renews leases and the reservations of pins. The leases that could not be renewed."""
        ...

    async def release(self, lease_id: int, *, superseded: bool) -> MissReason | None:
        """Ends a lease. None, or what it was already."""
        ...

    def order_evictions(self, lease_ids: Sequence[int]) -> None:
        """Tells the order of eviction, least worth keeping first; the last one told stays in force."""
        ...

    async def read_gauges(self) -> HolderGauges:
        """The holder's gauges and counters."""
        ...

    def close(self, reason: str) -> None:
        """Ends the attachment, for a reason that the connector logs."""
        ...


class PeerTransport(Protocol):
    """The way to other sidecars. `HolderUnreachable`: no answer within `deadline_s`."""

    async def pin(self, address: str, ask: PinAsk, wait_for_offer_s: float, deadline_s: float) -> PinOutcome:
        """Asks for a pin on an engine of the sidecar at `host:port`."""
        ...

    async def unpin(
        self, address: str, holder: Holder, lease_id: int, pin_id: str, deadline_s: float
    ) -> None:
        """Ends a pin there; idempotent."""
        ...

    async def release(
        self, address: str, engine_id: str, lease_id: int, tenant: str, deadline_s: float, *, superseded: bool
    ) -> MissReason | None:
        """Ends a lease there; idempotent. None, or what it was already."""
        ...
