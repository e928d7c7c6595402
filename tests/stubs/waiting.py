"""Awaits a condition that no event announces, as the end of a process that is no child."""

import asyncio
from collections.abc import Callable
from pathlib import Path


async def eventually(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Returns once the condition holds; fails loudly when it never does."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"
