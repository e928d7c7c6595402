"""What the router asks of the world: a registry, engines, and the client that waits for an answer."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine, LeaseRecord, PinOutcome
from kvlease.core.renewal import Beat
from kvlease.store.port import Batch


@dataclass(frozen=True, slots=True)
class BeatAck:
    """The registry's answer to heartbeats.

    Attributes:
        sequence: the last beat that every named holder applied.
        resync: the registry lost the session; the next beat must be complete.
    """

    sequence: int
    misses: Mapping[int, MissReason]
    resync: bool = False


class RenewalStream(Protocol):
    """One open stream of heartbeats."""

    async def send(self, beat: Beat) -> None:
        """Sends one beat. Raises `HolderUnreachable` when the stream is broken."""
        ...

    def acks(self) -> AsyncIterator[BeatAck]:
        """The answers, until the stream ends. Raises `HolderUnreachable` when it breaks."""
        ...


class RegistryPort(Protocol):
    """The registry, in domain types.

    Calls have their own deadlines; a silent registry is a miss, not an error.
    """

    async def pin(self, ask: PinAsk, wait_for_offer_s: float) -> PinOutcome:
        """Takes a pin at the holder; UNREACHABLE when nobody answered in time."""
        ...

    async def unpin(self, holder: Holder, lease_id: int, pin_id: str) -> None:
        """Ends a pin; best effort, idempotent."""
        ...

    async def release(self, lease_id: int, engine_id: str, tenant: str) -> MissReason | None:
        """Releases a lease; None when this call released it."""
        ...

    def watch_engines(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[Engine]]]:
        """First a snapshot, then every change."""
        ...

    def watch_leases(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[LeaseRecord]]]:
        """First a snapshot, then every change."""
        ...

    def renew(self) -> AbstractAsyncContextManager[RenewalStream]:
        """Opens a stream of heartbeats."""
        ...


class LegError(Exception):
    """An engine gave no answer, or not all of it.

    Attributes:
        sent: the engine may have begun the request; False only when it never got one.
        fault: it says something of the engine, which is avoided for a while; False: of the request only.
    """

    def __init__(self, message: str, *, sent: bool, fault: bool = True) -> None:
        super().__init__(message)
        self.sent = sent
        self.fault = fault


class EngineReply(Protocol):
    """An engine's answer whose body is still on its way. Reading raises `LegError` when it breaks."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        ...

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, names as the engine wrote them."""
        ...

    async def body(self) -> bytes:
        """The whole body."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes, split anywhere."""
        ...


class EnginePort(Protocol):
    """HTTP to engines. Leaving the context before the end aborts the request at the engine."""

    def call(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> AbstractAsyncContextManager[EngineReply]:
        """Sends a request.

        Entering raises `LegError`; `timeout_s` bounds everything until the end of the body.
        """
        ...


class ClientStalled(Exception):
    """A client takes nothing more of an answer that has begun."""


class ClientPort(Protocol):
    """The client of one turn. Writing waits while the client is slow."""

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Sends the head of a streamed answer."""
        ...

    async def write(self, data: bytes) -> None:
        """Sends a part of a streamed answer."""
        ...

    async def end(self) -> None:
        """Ends a streamed answer."""
        ...

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Sends a whole answer."""
        ...


class RandomPort(Protocol):
    """Where ids come from; a simulation brings a seeded one."""

    def lease_id(self) -> int:
        """64 random bits, never zero."""
        ...

    def text_id(self) -> str:
        """32 random hex digits."""
        ...
