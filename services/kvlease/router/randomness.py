"""Ids from the operating system's randomness."""

import secrets


class SystemRandom:
    """A `RandomPort` that nobody can predict."""

    def lease_id(self) -> int:
        """64 random bits, never zero."""
        return secrets.randbits(64) or 1

    def text_id(self) -> str:
        """32 random hex digits."""
        return secrets.token_hex(16)
