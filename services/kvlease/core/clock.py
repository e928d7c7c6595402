"""The clock port. Every process counts with its own monotonic clock; only durations cross a process."""

from typing import Protocol


class Clock(Protocol):
    """A monotonic clock, local to one process."""

    def now_s(self) -> float:
        """Seconds since an arbitrary origin; never goes back."""
        ...
