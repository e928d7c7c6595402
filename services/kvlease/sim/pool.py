"""The blocks of a simulated engine: references, a prefix cache that forgets the least recently used, and contents."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlease.sim.model import NO_CONTENT


@dataclass(slots=True)
class Block:
    """One block.

    Attributes:
        owner: counts how often the block was handed out; a READ that saw two owners read garbage.
        cache_key: the prefix that its content belongs to, None when it is not in the prefix cache.
    """

    references: int = 0
    owner: int = 0
    cache_key: bytes | None = None
    content: bytes = NO_CONTENT


class BlockPool:
    """All blocks of one engine. A block without references is free, and keeps its content until it is handed out."""

    def __init__(self, total_blocks: int) -> None:
        self._blocks = [Block() for _ in range(total_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total_blocks))
        self._cached: dict[bytes, int] = {}

    @property
    def total_blocks(self) -> int:
        """Number of blocks."""
        return len(self._blocks)

    @property
    def free_blocks(self) -> int:
        """Number of blocks without references."""
        return len(self._free)

    def owner(self, block_id: int) -> int:
        """How often a block was handed out."""
        return self._blocks[block_id].owner

    def owners(self, block_ids: Iterable[int]) -> list[int]:
        """How often each block was handed out."""
        blocks = self._blocks
        return [blocks[block_id].owner for block_id in block_ids]

    def references(self, block_id: int) -> int:
        """References on a block."""
        return self._blocks[block_id].references

    def cached_prefix(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix of `keys` that the cache holds, not referenced yet."""
        found: list[int] = []
        for key in keys:
            block_id = self._cached.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def touch(self, block_ids: Iterable[int]) -> None:
        """References blocks that hold something."""
        for block_id in block_ids:
            self._blocks[block_id].references += 1
            self._free.pop(block_id, None)

    def allocate(self, count: int) -> list[int] | None:
        """Hands out blocks, the least recently freed first; None when there are not enough."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            block = self._blocks[block_id]
            if block.cache_key is not None:
                self._forget(block_id)
            block.references, block.owner, block.content = 1, block.owner + 1, NO_CONTENT
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each, tail first, so that the head of a prefix is forgotten last."""
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            block.references -= 1
            if block.references == 0:
                self._free[block_id] = None
                if block.cache_key is None:
                    self._free.move_to_end(block_id, last=False)

    def cache(self, block_id: int, key: bytes) -> None:
        """Puts a full block into the prefix cache, unless another block stands for the prefix."""
        if key not in self._cached:
            self._blocks[block_id].cache_key = key
            self._cached[key] = block_id

    def write(self, block_id: int, content: bytes) -> None:
        """Stores KV, whoever owns the block."""
        self._blocks[block_id].content = content

    def read(self, block_id: int) -> bytes:
        """The stored KV."""
        return self._blocks[block_id].content

    def read_all(self, block_ids: Iterable[int]) -> list[bytes]:
        """The stored KV of each."""
        blocks = self._blocks
        return [blocks[block_id].content for block_id in block_ids]

    def forget_prefixes(self) -> bool:
        """Empties the prefix cache; False, and nothing done, while a block is referenced."""
        if len(self._free) < len(self._blocks):
            return False
        for block_id in range(len(self._blocks)):
            self._forget(block_id)
        return True

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.cache_key is not None:
            del self._cached[block.cache_key]
            block.cache_key = None
