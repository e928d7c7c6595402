"""A block pool with reference counts that refuses what vLLM's would choke on."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class FakeBlock:
    """One block; 0 references mean that it is free."""

    block_id: int
    ref_cnt: int = 0


class FakePool:
    """The part of vLLM's `BlockPool` that the connector uses. Block 0 stands for the null block."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = blocks
        self.blocks = [FakeBlock(block_id) for block_id in range(blocks)]
        self.blocks[0].ref_cnt = 1
        self.freed: list[int] = []
        self.resets = 0

    def get_num_free_blocks(self) -> int:
        return sum(block.ref_cnt == 0 for block in self.blocks)

    def touch(self, blocks: Iterable[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[FakeBlock]) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0, f"block {block.block_id} is freed more often than it was referenced"
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return self.get_num_free_blocks() == self.num_gpu_blocks - 1
