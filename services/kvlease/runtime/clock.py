"""The running event loop's clock: monotonic, and virtual when the loop is."""

from asyncio import get_running_loop
from collections.abc import Callable


class LoopClock:
    """A `Clock` that counts with the loop in which it is first asked; only for use inside it.

    Attributes:
        now_s: gives the loop's time in seconds.
    """

    def __init__(self) -> None:
        self.now_s: Callable[[], float] = self._begin

    def _begin(self) -> float:
        # From here on it is the loop's own function: a turn asks some 30 times.
        self.now_s = get_running_loop().time
        return self.now_s()
