"""The running event loop's clock: monotonic, and virtual when the loop is."""

from asyncio import get_running_loop


class LoopClock:
    """A `Clock` that counts with the running loop; only for use inside it."""

    def now_s(self) -> float:
        """The loop's time in seconds."""
        return get_running_loop().time()
