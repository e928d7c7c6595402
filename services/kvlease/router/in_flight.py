"""What a router works on at the moment, so that it can stop: requests are waited for, then turns are cut short."""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager, suppress

CUT_S = 1.0
"""How long turns that were cut short have to tell their clients; one that reads slowly is left without a word."""


class InFlight:
    """The requests that are worked on.

    Attributes:
        ending: turns are cut short, those that begin from here on as well.
    """

    def __init__(self) -> None:
        self.ending = False
        self._requests = 0
        self._none_left = asyncio.Event()
        self._bounds: set[asyncio.Timeout] = set()

    @contextmanager
    def request(self) -> Generator[None]:
        """Counts one request while the context lasts."""
        self._requests += 1
        self._none_left.clear()
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._none_left.set()

    @contextmanager
    def cut_by(self, bound: asyncio.Timeout) -> Generator[None]:
        """Lets the bound of a turn run out, while the context lasts, when the router can wait no longer."""
        if self.ending:
            _run_out(bound)
        self._bounds.add(bound)
        try:
            yield
        finally:
            self._bounds.discard(bound)

    async def end(self, grace_s: float) -> None:
        """Waits so long for the requests, then cuts turns short and gives them a moment to say so."""
        if await self._over_within(grace_s):
            return
        self.ending = True
        for bound in self._bounds:
            _run_out(bound)
        await self._over_within(CUT_S)

    async def _over_within(self, timeout_s: float) -> bool:
        if self._requests:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._none_left.wait()
        return not self._requests


def _run_out(bound: asyncio.Timeout) -> None:
    if not bound.expired():
        bound.reschedule(asyncio.get_running_loop().time())
