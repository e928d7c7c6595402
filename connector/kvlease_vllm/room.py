"""How many blocks requests will ask vLLM for next, so that retained ones leave in time."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


def make_room(vllm_config: "VllmConfig", total_blocks: int) -> "Room":
    """What an engine's settings ask for beside the blocks of its requests' tokens."""
    speculative = vllm_config.speculative_config
    drafts = speculative.num_speculative_tokens or 0 if speculative is not None else 0
    return Room(
        vllm_config.cache_config.block_size,
        # A drafter writes at most a token more than it drafts, and the drafts are verified behind one that counts.
        ahead_tokens=2 * drafts + 2 if drafts else 0,
        spare_blocks=int(getattr(vllm_config.scheduler_config, "watermark", 0.0) * total_blocks),
    )


class Room:
    """Requests whose prompt is not computed yet: waiting ones, and admitted ones between two chunks.

    vLLM asks the connector before it admits a request, but not before a request goes on (after a READ, or with
    the next chunk of its prompt): without a note of what is missing, retained blocks could starve it.

    Args:
        ahead_tokens: what vLLM wants room for beyond a request's tokens before it admits it: drafts, in blocks of
            their own where it READs.
        spare_blocks: blocks that vLLM keeps free when it lets a request go on beside others.
    """

    def __init__(self, block_size: int, ahead_tokens: int = 0, spare_blocks: int = 0) -> None:
        self._block_size = block_size
        self._ahead_blocks = math.ceil(ahead_tokens / block_size)
        self._spare_blocks = spare_blocks
        self._waiting: dict[str, Request] = {}
        self._admitted: dict[str, Request] = {}

    def arrived(self, request: "Request") -> None:
        """Notes a request that waits for admission."""
        self._waiting[request.request_id] = request

    def admitted(self, request: "Request") -> None:
        """Notes that a request got its first blocks."""
        self._waiting.pop(request.request_id, None)
        self._admitted[request.request_id] = request

    def gone(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        self._waiting.pop(request_id, None)
        self._admitted.pop(request_id, None)

    def to_admit(self, request: "Request", computed_tokens: int) -> int:
        """Blocks that must be free for a request, of whose tokens some are in the cache."""
        return self._whole_need(request) - computed_tokens // self._block_size + self._spare_blocks

    def needed(self, scheduled_tokens: Mapping[str, int]) -> int:
        """Blocks for the next step: one per running request, the rest of every begun prompt, and the whole need
        of the first request that waits.

        Args:
            scheduled_tokens: tokens per request of the step that was scheduled last.
        """
        blocks = len(scheduled_tokens)
        for request_id, request in list(self._admitted.items()):
            computed = request.num_computed_tokens + scheduled_tokens.get(request_id, 0)
            if computed >= request.num_prompt_tokens:
                del self._admitted[request_id]
            else:
                blocks += self._whole_need(request) - math.ceil(computed / self._block_size)
        first = next(iter(self._waiting.values()), None)
        if first is not None:
            blocks += self._whole_need(first)
        return blocks + (self._spare_blocks if self._admitted or first is not None else 0)

    def _whole_need(self, request: "Request") -> int:
        """Blocks of a request's tokens, one to sample, and what it speculates with."""
        return math.ceil((request.num_tokens + 1) / self._block_size) + self._ahead_blocks
