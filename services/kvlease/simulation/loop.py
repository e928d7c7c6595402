"""An event loop whose time is virtual: when nothing is ready it jumps to the next timer. No I/O, no threads."""

import asyncio
from collections.abc import Callable
from typing import Any


class SimulationStuckError(RuntimeError):
    """Nothing is ready and no timer is set: everything waits for something that never comes."""


class _Jumps:
    """Stands in for the selector: waiting is a jump of the loop's time."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[Any]:
        """Jumps by `timeout` seconds; nothing is ever ready."""
        if timeout is None or timeout > 0:
            self._jump(timeout)
        return []

    def close(self) -> None:
        """Nothing to close."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A deterministic loop: the same callbacks at the same virtual times, whatever the machine does.

    Attributes:
        before_jump: called whenever all that could happen at one moment has happened.
    """

    def __init__(self) -> None:
        super().__init__()
        self._virtual_s = 0.0
        self._selector = _Jumps(self._jump)
        self._clock_resolution = 1e-9
        self.before_jump: Callable[[], None] = lambda: None

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_s

    def _jump(self, seconds: float | None) -> None:
        self.before_jump()
        if self._stopping or self._ready:  # type: ignore[attr-defined]
            return
        if seconds is None:
            raise SimulationStuckError("nothing is ready and no timer is set")
        self._virtual_s += seconds

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no events of the operating system."""

    def _write_to_self(self) -> None:
        """Nobody else could wake the loop."""


class DriftingClock:
    """A process's own clock: it began somewhere and runs at its own rate.

    Args:
        rate: its seconds per virtual second.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, origin_s: float, rate: float) -> None:
        self._loop = loop
        self._origin_s = origin_s
        self._rate = rate

    def now_s(self) -> float:
        """Seconds on this clock."""
        return self._origin_s + self._rate * self._loop.time()
