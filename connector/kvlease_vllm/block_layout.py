"""How the KV of a block lies in memory: all its layers side by side where vLLM can.

A READ takes its time by descriptors, not by bytes, and vLLM makes one per block and layer unless the layers of a
block follow each other. vLLM 0.26 then allocates one tensor for all layers, with attention kernels that find their
blocks by stride; it does so when the connector prefers it, with kernels and a layout that it knows to fit. In 0.32
the layout is the engine's own choice (`VLLM_KV_CACHE_LAYOUT`).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

LAYERS_TOGETHER = "enable_cross_layers_blocks"
"""vLLM's own key of the connector's extra config; what an operator says counts."""


def prefer_layers_together(extra_config: dict[str, Any], kv_cache_config: "KVCacheConfig") -> None:
    """Asks for one descriptor per block, where the model has the one KV cache group that vLLM demands for it."""
    if len(kv_cache_config.kv_cache_groups) == 1:
        extra_config.setdefault(LAYERS_TOGETHER, "True")


def layout_factors(extra_config: dict[str, Any], kv_cache_config: "KVCacheConfig") -> dict[str, str]:
    """What engines that READ each other must agree on about the order of layers and blocks."""
    return {
        "layers_together": str(extra_config.get(LAYERS_TOGETHER, "False")).lower(),
        "cache_layout": str(getattr(kv_cache_config, "kv_cache_layout", None)),
    }
