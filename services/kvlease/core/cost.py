"""Estimates of work from what a router sees: bytes of text, never token ids."""

import math

from kvlease.core.values import value

TOKENS_PER_BYTE_DEFAULT = 0.25
TOKENS_PER_BYTE_MAX = 4.0


@value
class TokenEstimate:
    """A conversation's own ratio of tokens to bytes of text, learnt from the engines' usage counts."""

    tokens_per_byte: float = TOKENS_PER_BYTE_DEFAULT

    def learnt(self, prompt_tokens: int, text_bytes: int) -> "TokenEstimate":
        """The ratio of the latest prompt; unchanged when one of the two is not known."""
        if prompt_tokens <= 0 or text_bytes <= 0:
            return self
        return TokenEstimate(min(prompt_tokens / text_bytes, TOKENS_PER_BYTE_MAX))

    def tokens(self, text_bytes: int) -> int:
        """Tokens that so many bytes of text are likely to make, rounded up."""
        return math.ceil(text_bytes * self.tokens_per_byte)
