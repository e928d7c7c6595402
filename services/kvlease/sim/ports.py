"""What a simulated engine needs of the world besides a clock."""

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from kvlease.core.attachment import LeaseOffer
from kvlease.core.holding import HoldEvent, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.records import KvLocation, PinOutcome

Landed = Callable[[int, bytes], None]
"""Called with the place in the list of blocks and the KV, whenever a block of a READ arrives."""


class ReadFailed(Exception):
    """A READ broke off: the holder is gone, or another engine answers in its place."""


class RemotePins(Protocol):
    """The way to other engines' holders, through the sidecar."""

    async def pin(self, ask: PinAsk, sidecar_address: str) -> PinOutcome:
        """Asks for a pin; UNREACHABLE when nobody answers in time."""
        ...

    def unpin(self, holder: Holder, lease_id: int, pin_id: str, sidecar_address: str) -> None:
        """Ends a pin, without waiting; unheard, the pin's deadline ends it."""
        ...


class Transfers(Protocol):
    """One-sided READs of other engines' blocks."""

    def read(
        self, location: KvLocation, holder: Holder, block_ids: Sequence[int], landed: Landed
    ) -> Coroutine[Any, Any, None]:
        """READs blocks of one engine process, never of another at its place.

        Whatever the reader does meanwhile, blocks may land until this returns.

        Raises:
            ReadFailed: not all blocks arrived.
        """
        ...


class OfferListener(Protocol):
    """Hears of what the holder does; the sidecar, when one is attached."""

    def offered(self, offer: LeaseOffer) -> None:
        """A hold was granted."""
        ...

    def happened(self, holder: Holder, events: Sequence[HoldEvent]) -> None:
        """Something happened to holds."""
        ...
