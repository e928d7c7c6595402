"""Ids from the operating system's randomness."""

import os

DRAWN_BYTES = 4096
TEXT_ID_BYTES = 16
LEASE_ID_BYTES = 8


class SystemRandom:
    """A `RandomPort` that nobody can predict. Draws for many ids at once."""

    def __init__(self) -> None:
        self._drawn = b""
        self._used = 0

    def lease_id(self) -> int:
        """64 random bits, never zero."""
        return int.from_bytes(self._draw(LEASE_ID_BYTES), "big") or 1

    def text_id(self) -> str:
        """32 random hex digits."""
        return self._draw(TEXT_ID_BYTES).hex()

    def _draw(self, size: int) -> bytes:
        start, end = self._used, self._used + size
        if end > len(self._drawn):
            self._drawn, start, end = os.urandom(DRAWN_BYTES), 0, size
        self._used = end
        return self._drawn[start:end]
