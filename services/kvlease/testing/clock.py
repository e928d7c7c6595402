"""A clock that a test moves by hand."""


class ManualClock:
    """A `Clock` that stands until it is moved."""

    def __init__(self, now_s: float = 1_000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """Seconds since the origin that the test chose."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Moves the clock on."""
        if seconds < 0:
            raise ValueError("a monotonic clock never goes back")
        self._now_s += seconds
