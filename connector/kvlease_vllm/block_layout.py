"""How the KV of a block lies in memory: all its layers side by side where vLLM can.

A READ takes its time by descriptors, not by bytes, and vLLM makes one per block and layer unless the layers of a
block follow each other. vLLM 0.26 has two ways for that, both for attention kernels that find their blocks by
stride. Its first model runner allocates one tensor for all layers when the connector prefers it. Its second one,
the default of dense models, looks at the plan of the cache alone, where each layer may be a part of every block
of one allocation; vLLM plans that for some models only, so the connector does it. In 0.32 the layout is the
engine's own choice (`VLLM_KV_CACHE_LAYOUT`).
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger("vllm.kvlease.layout")

LAYERS_TOGETHER = "enable_cross_layers_blocks"
"""vLLM's own key of the connector's extra config; what an operator says counts."""

PACKABLE = frozenset({"FLASH_ATTN", "TRITON_ATTN"})
"""Attention backends whose kernels take blocks of any stride, and have a block's number as outermost dimension."""


def prefer_layers_together(extra_config: dict[str, Any], kv_cache_config: "KVCacheConfig") -> None:
    """Asks for one descriptor per block, where the model has the one KV cache group that vLLM demands for it."""
    if len(kv_cache_config.kv_cache_groups) == 1:
        extra_config.setdefault(LAYERS_TOGETHER, "True")


def pack_layers(kv_cache_config: "KVCacheConfig", backend: str, kernel_blocks: int) -> bool:
    """Makes each layer a part of every block of one allocation; call before anything is allocated.

    Nothing is changed, and False returned, where the plan or the kernels do not allow it.

    Args:
        backend: name of the attention backend.
        kernel_blocks: how many blocks of the attention kernels make one of the scheduler's.
    """
    tensors = kv_cache_config.kv_cache_tensors
    sizes = {tensor.size for tensor in tensors}
    if len(tensors) < 2 or len(sizes) != 1 or backend not in PACKABLE or kernel_blocks != 1:
        return False
    if any(len(tensor.shared_by) != 1 or getattr(tensor, "block_stride", None) != 0 for tensor in tensors):
        return False
    page, rest = divmod(sizes.pop(), kv_cache_config.num_blocks)
    if rest:
        return False
    stride = page * len(tensors)
    kv_cache_config.kv_cache_tensors = [
        replace(tensor, size=stride * kv_cache_config.num_blocks, offset=page * number, block_stride=stride)
        for number, tensor in enumerate(tensors)
    ]
    logger.info("the %d layers of a block lie together, %d bytes in all", len(tensors), stride)
    return True


def layout_factors(extra_config: dict[str, Any], kv_cache_config: "KVCacheConfig") -> dict[str, str]:
    """What engines that READ each other must agree on about the order of layers and blocks."""
    return {
        "layers_together": str(extra_config.get(LAYERS_TOGETHER, "False")).lower(),
        "cache_layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
    }
