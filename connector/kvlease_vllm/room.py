"""How many blocks requests will ask vLLM for next, so that retained ones leave in time."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Room:
    """Requests whose prompt is not computed yet: waiting ones, and admitted ones between two chunks.

    vLLM asks the connector before it admits a request, but not before a request goes on (after a READ, or with
    the next chunk of its prompt): without a note of what is missing, retained blocks could starve it.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
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

    def whole_need(self, request: "Request") -> int:
        """Blocks of a request's tokens and one to sample."""
        return math.ceil((request.num_tokens + 1) / self._block_size)

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
                blocks += self.whole_need(request) - math.ceil(computed / self._block_size)
        first = next(iter(self._waiting.values()), None)
        return blocks + (self.whole_need(first) if first is not None else 0)
