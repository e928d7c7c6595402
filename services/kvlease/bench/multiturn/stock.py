"""Sends turns to engines with vLLM's own NIXL connector, as vLLM's example proxy does."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from kvlease.bench.multiturn.client import Reply, completion_body, post, send
from kvlease.bench.multiturn.engines import EngineFacts

KEPT_S = 480
"""How long a stock decode engine keeps a turn, read or not, unless it is told otherwise."""

KEPT_SHARE = 0.5
"""Of a decode engine's KV: so much of it may be kept by turns that nobody reads back."""

MISS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What a first turn gives to a stock prefill engine: keep the blocks for whoever reads them."""


class KeptRoom:
    """Keeps turns from waiting for blocks of a stock decode engine that nobody will read.

    It keeps every turn for a fixed time, and a streamed one does not say how to read it: those of a long run fill it,
    and the next turn would be measured while it waits for them to lapse.

    Args:
        kept_s: how long the engine keeps a turn.
        tokens_max: kept by it at once; None: as many as there are.
        now_s: a clock.
    """

    def __init__(
        self, kept_s: float, tokens_max: float | None, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._kept_s = kept_s
        self._tokens_max = tokens_max
        self._now_s = now_s
        self._kept: deque[tuple[float, int]] = deque()

    @classmethod
    def of(cls, decode: EngineFacts, kept_s: float) -> "KeptRoom":
        """The room of a decode engine."""
        tokens = decode.kv_tokens
        return cls(kept_s, None if tokens is None else KEPT_SHARE * tokens)

    def keep(self, tokens: int) -> None:
        """A turn of so many tokens has ended, and nobody will read it."""
        self._kept.append((self._now_s() + self._kept_s, tokens))

    def wait_s(self, tokens: int) -> float:
        """How long a conversation of so many tokens should wait; 0 when it has room, or when nothing is kept."""
        now_s = self._now_s()
        while self._kept and self._kept[0][0] <= now_s:
            self._kept.popleft()
        kept = sum(of for _, of in self._kept)
        if not self._kept or self._tokens_max is None or kept + tokens <= self._tokens_max:
            return 0.0
        return self._kept[0][0] - now_s

    async def wait_for(self, tokens: int) -> None:
        """Waits until a conversation of so many tokens has room."""
        while True:
            wait_s = self.wait_s(tokens)
            if wait_s <= 0:
                return
            await asyncio.sleep(wait_s)


class StockFleet:
    """One stock prefill and one stock decode engine; D's parameters of a turn are echoed to P in the next.

    Args:
        room: what D may keep of turns that nobody reads back.
    """

    def __init__(
        self, session: aiohttp.ClientSession, prefill_url: str, decode_url: str, model: str, room: "KeptRoom"
    ) -> None:
        self._session = session
        self._prefill_url = prefill_url
        self._decode_url = decode_url
        self._model = model
        self._room = room
        self._kept: dict[str, dict[str, Any]] = {}

    async def turn(
        self, conversation_id: str, prompt: Sequence[int], tokens: int, *, stream: bool, salt: str = ""
    ) -> Reply:
        """One turn of two legs. Only one that is not streamed returns what the next may read."""
        kept = self._kept.pop(conversation_id, None)
        params = {**kept, "do_remote_decode": True, "do_remote_prefill": False} if kept else MISS
        if not kept:
            await self._room.wait_for(len(prompt) + tokens)
        began_s = time.perf_counter()
        leg = completion_body(self._model, prompt, 1, False, salt)
        answer = await post(self._session, self._prefill_url, {**leg, "kv_transfer_params": params})
        prefill_s = time.perf_counter() - began_s
        body = completion_body(self._model, prompt, tokens, stream, salt)
        reply = await send(
            self._session, self._decode_url, {**body, "kv_transfer_params": answer["kv_transfer_params"]}
        )
        if reply.kv_transfer_params:
            self._kept[conversation_id] = reply.kv_transfer_params
        else:
            self._room.keep(len(prompt) + tokens)
        reply.prefill_s = prefill_s
        reply.ttft_s = reply.arrivals_s[0] - began_s
        # Engines tell what they reused only where they were started with --enable-prompt-tokens-details.
        usage: dict[str, Any] = answer.get("usage") or {}
        details: dict[str, Any] | None = usage.get("prompt_tokens_details")
        reply.reused_tokens = details.get("cached_tokens") or 0 if details else 0
        reply.path = "readback" if kept and (details is None or reply.reused_tokens) else "recompute"
        return reply
