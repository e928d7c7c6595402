"""The blocks of a simulated engine: references, a prefix cache that forgets the least recently used, and contents."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvlease.sim.model import NO_CONTENT


class BlockPool:
    """All blocks of one engine. A block without references is free, and keeps its content until it is handed out."""

    def __init__(self, total_blocks: int) -> None:
        self._references = [0] * total_blocks
        # How often each was handed out; a READ that saw two owners read garbage.
        self._owners = [0] * total_blocks
        # The prefix that each content belongs to, None when it is not in the prefix cache.
        self._cache_keys: list[bytes | None] = [None] * total_blocks
        self._contents = [NO_CONTENT] * total_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total_blocks))
        self._cached: dict[bytes, int] = {}

    @property
    def total_blocks(self) -> int:
        """Number of blocks."""
        return len(self._owners)

    @property
    def free_blocks(self) -> int:
        """Number of blocks without references."""
        return len(self._free)

    def owner(self, block_id: int) -> int:
        """How often a block was handed out."""
        return self._owners[block_id]

    def owners(self, block_ids: Iterable[int]) -> list[int]:
        """How often each block was handed out."""
        return list(map(self._owners.__getitem__, block_ids))

    def references(self, block_id: int) -> int:
        """References on a block."""
        return self._references[block_id]

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
            self._references[block_id] += 1
            self._free.pop(block_id, None)

    def allocate(self, count: int) -> list[int] | None:
        """Hands out blocks, the least recently freed first; None when there are not enough."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in taken:
            self._forget(block_id)
            self._references[block_id] = 1
            self._owners[block_id] += 1
            self._contents[block_id] = NO_CONTENT
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Drops one reference of each, tail first, so that the head of a prefix is forgotten last."""
        for block_id in reversed(block_ids):
            self._references[block_id] -= 1
            if self._references[block_id] == 0:
                self._free[block_id] = None
                if self._cache_keys[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def cache(self, block_id: int, key: bytes) -> None:
        """Puts a full block into the prefix cache, unless another block stands for the prefix."""
        if key not in self._cached:
            self._cache_keys[block_id] = key
            self._cached[key] = block_id

    def write(self, block_id: int, content: bytes) -> None:
        """Stores KV, whoever owns the block."""
        self._contents[block_id] = content

    def read(self, block_id: int) -> bytes:
        """The stored KV."""
        return self._contents[block_id]

    def read_all(self, block_ids: Iterable[int]) -> list[bytes]:
        """The stored KV of each."""
        return list(map(self._contents.__getitem__, block_ids))

    def forget_prefixes(self) -> bool:
        """Empties the prefix cache; False, and nothing done, while a block is referenced."""
        if len(self._free) < self.total_blocks:
            return False
        for block_id in range(self.total_blocks):
            self._forget(block_id)
        return True

    def _forget(self, block_id: int) -> None:
        key = self._cache_keys[block_id]
        if key is not None:
            del self._cached[key]
            self._cache_keys[block_id] = None
