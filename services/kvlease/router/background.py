"""Small duties that outlive their turn: bounded in number and time, and none is left behind."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Background:
    """Runs best-effort calls; at the bound one is dropped: what it would have ended ends by its deadline.

    Args:
        duties_max: calls at once.
        duty_timeout_s: bound of one call that brings none of its own.
    """

    def __init__(self, duties_max: int = 1024, duty_timeout_s: float = 1.0) -> None:
        self._duties_max = duties_max
        self._duty_timeout_s = duty_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.dropped = 0

    def run(self, duty: Coroutine[Any, Any, object], timeout_s: float | None = None) -> None:
        """Starts a duty, or drops it at the bound."""
        if len(self._tasks) >= self._duties_max:
            duty.close()
            self.dropped += 1
            return
        task = asyncio.create_task(self._bounded(duty, timeout_s or self._duty_timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Waits for the duties that run, as long as one may take, and ends those that may take longer."""
        if self._tasks:
            _, longer = await asyncio.wait(set(self._tasks), timeout=self._duty_timeout_s)
            for task in longer:
                task.cancel()
            await asyncio.gather(*longer, return_exceptions=True)

    async def _bounded(self, duty: Coroutine[Any, Any, object], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await duty
        except Exception as error:  # best effort: its failure must not end anything else
            log.info("a duty after a turn failed", extra={"error": type(error).__name__})
