"""The simulated model: one token per byte, KV that is a digest, and a reply that is a digest of the KV.

A block's KV covers the model, the block's tokens and the *stored* KV of every block before it, as attention does:
whatever damages one block changes everything computed on top of it.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, cast

CONTENT_BYTES = 16
NO_CONTENT = b""
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz ,."


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled token.

    Attributes:
        logprob: natural logarithm, drawn from the digest of the KV: equal logprobs mean equal KV.
    """

    token_id: int
    logprob: float

    @property
    def text(self) -> str:
        """The token's text: one character."""
        return chr(self.token_id)


class SimModel:
    """Weights: their name and version are all that the KV depends on besides the tokens."""

    def __init__(self, name: str, weights_version: str = "") -> None:
        key = blake2b(f"{name}\0{weights_version}".encode(), digest_size=32).digest()
        self._begun = blake2b(digest_size=CONTENT_BYTES, key=key)

    def start(self) -> bytes:
        """The state before the first block."""
        return self._digest(b"start")

    def compute(self, state: bytes, token_ids: Sequence[int]) -> bytes:
        """The KV of a block of tokens on top of what is stored before it."""
        return self._digest(state + struct.pack(f"<{len(token_ids)}I", *token_ids))

    def attend(self, state: bytes, content: bytes) -> bytes:
        """The state after a block, from what is stored in it."""
        return self._digest(state + content)

    def sample(self, state: bytes) -> Sample:
        """The token that follows a state, always the same one."""
        digest = self._digest(state + b"sample")
        token_id = _ALPHABET[digest[0] % len(_ALPHABET)]
        return Sample(token_id, -int.from_bytes(digest[1:5], "big") / 2**32 - 1e-6)

    def _digest(self, payload: bytes) -> bytes:
        digest = self._begun.copy()
        digest.update(payload)
        return digest.digest()


def tokens_of_text(text: str) -> list[int]:
    """One token per byte of UTF-8."""
    return list(text.encode(errors="surrogatepass"))


def tokens_of_messages(messages: Sequence[object]) -> list[int]:
    """The rendering of a chat, ending where the assistant speaks."""
    turns = [_render(cast("Mapping[str, Any]", turn)) for turn in messages if isinstance(turn, Mapping)]
    return tokens_of_text("".join(turns) + "<|assistant|>\n")


def _render(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else _canonical(content)
    calls = message.get("tool_calls")
    return f"<|{message.get('role', '')}|>\n{text}{_canonical(calls) if calls else ''}<|end|>\n"


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
