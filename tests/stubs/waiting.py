"""Awaits a condition that no event announces."""

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Returns once the condition holds; fails loudly when it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
