"""References on the destination blocks of READs that were given up, until nothing can write into them any more."""

from collections.abc import Mapping, Sequence
from typing import Any


class Quarantine:
    """Keeps blocks from the pool until every rank has seen its part of a given-up READ end."""

    def __init__(self, pool: Any, ranks: int) -> None:
        self._pool = pool
        self._ranks = ranks
        self._kept: dict[int, tuple[Sequence[int], int]] = {}

    @property
    def blocks(self) -> int:
        """Blocks in quarantine; any thread may ask."""
        return sum(len(block_ids) for block_ids, _ in list(self._kept.values()))

    def keep(self, attempt_id: int, block_ids: Sequence[int]) -> None:
        """References the blocks; call before vLLM frees them."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])
        self._kept[attempt_id] = (block_ids, self._ranks)

    def ended(self, ranks_ended: Mapping[int, int]) -> None:
        """Notes on how many more ranks an attempt has ended; the last one lets the blocks go."""
        for attempt_id, ended in ranks_ended.items():
            block_ids, left = self._kept.pop(attempt_id, ((), 0))
            if left > ended:
                self._kept[attempt_id] = (block_ids, left - ended)
            elif block_ids:
                self._pool.free_blocks([self._pool.blocks[block_id] for block_id in reversed(block_ids)])
