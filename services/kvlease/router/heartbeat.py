"""The task that tells the registry, beat by beat, which leases and pins are to be renewed."""

import asyncio
import logging

from kvlease.core.clock import Clock
from kvlease.core.errors import HolderUnreachable, KvleaseError
from kvlease.core.renewal import RenewalTable
from kvlease.router.ports import RegistryPort, RenewalStream
from kvlease.router.watch import why_broken

RETRY_S = 0.2
BEATS_APART_S = 0.05
"""Turns that end within this share a beat; the first of them has its own, at once."""

RECONNECT_S = 1.0
SILENCE_MAX_S = 6.0
"""A registry that answers no beat for longer is left: two of its calls to a holder that hangs, one after the
other, take 4.25 s."""

log = logging.getLogger(__name__)


class Heartbeat:
    """Sends a beat per interval, and one at once when woken. Owns the table's sequence."""

    def __init__(self, table: RenewalTable, registry: RegistryPort, clock: Clock, interval_s: float) -> None:
        self._table = table
        self._registry = registry
        self._clock = clock
        self._interval_s = interval_s
        self._woken: asyncio.Future[None] | None = None
        self._broken = False
        self._unanswered_s: float | None = None

    def wake(self) -> None:
        """A lease waits for its confirmation: the next beat goes out at once."""
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def run(self) -> None:
        """Renews until cancelled; a broken stream is opened again and starts with a complete beat."""
        while True:
            try:
                async with self._registry.renew() as stream:
                    await self._converse(stream)
            except KvleaseError as error:
                if not self._broken:
                    log.warning("heartbeat stream broke", extra={"reason": why_broken(error)})
                self._broken = True
            except Exception:
                # Without this task every lease of the router would expire in silence.
                log.exception("heartbeat failed")
            self._table.resync()
            await asyncio.sleep(RECONNECT_S)

    async def _converse(self, stream: RenewalStream) -> None:
        self._unanswered_s = None
        loop = asyncio.get_running_loop()
        receiver = asyncio.create_task(self._receive(stream))
        try:
            while not receiver.done():
                self._woken = woken = loop.create_future()
                now_s = self._clock.now_s()
                if self._unanswered_s is None:
                    self._unanswered_s = now_s
                await stream.send(self._table.beat(now_s))
                await self._pause(woken, receiver)
                if (rest_s := now_s + BEATS_APART_S - self._clock.now_s()) > 0:
                    await asyncio.sleep(rest_s)
            receiver.result()
        finally:
            receiver.cancel()
            await asyncio.wait({receiver})  # awaiting it would take a cancellation of ours for its own
            if not receiver.cancelled():
                receiver.exception()  # is told with what ended the loop

    async def _pause(self, woken: asyncio.Future[None], receiver: asyncio.Task[None]) -> None:
        """Until the next beat is due: an interval, less when woken.

        Raises:
            HolderUnreachable: the registry is silent.
        """
        due_s = self._clock.now_s() + self._interval_s
        while not (woken.done() or receiver.done()) and (now_s := self._clock.now_s()) < due_s:
            silent_s = due_s if self._unanswered_s is None else self._unanswered_s + SILENCE_MAX_S
            if silent_s <= now_s:
                raise HolderUnreachable(f"the registry answered no heartbeat for {SILENCE_MAX_S:g} s")
            await asyncio.wait(
                {woken, receiver},
                timeout=min(due_s, silent_s) - now_s,
                return_when=asyncio.FIRST_COMPLETED,
            )

    async def _receive(self, stream: RenewalStream) -> None:
        async for ack in stream.acks():
            self._broken = False
            self._unanswered_s = None
            if ack.resync:
                self._table.resync()
                self.wake()
            again = self._table.ack(self._clock.now_s(), ack.sequence, ack.misses)
            if again:
                asyncio.get_running_loop().call_later(RETRY_S, self.wake)
