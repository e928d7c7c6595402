"""What the connector knows of its engine: layout, location, and whether it can retain."""

import json
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from kvlease import __version__ as kvlease_version
from kvlease.core import details
from kvlease.core.attachment import EngineFacts
from kvlease.core.ids import Holder
from kvlease.core.records import KvLayout, KvLocation
from kvlease_vllm.block_layout import layout_factors
from kvlease_vllm.kv_factors import settings_factors
from kvlease_vllm.settings import ConnectorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def describe_engine(
    vllm_config: "VllmConfig",
    kv_cache_config: "KVCacheConfig",
    nixl_scheduler: Any,
    holder: Holder,
    settings: ConnectorSettings,
) -> EngineFacts:
    """Everything that a sidecar registers about this engine."""
    from vllm import __version__ as vllm_version

    parallel = vllm_config.parallel_config
    refusal = retain_refusal(vllm_config, kv_cache_config, nixl_scheduler)
    return EngineFacts(
        holder=holder,
        model=str(vllm_config.model_config.served_model_name),
        layout=describe_layout(vllm_config, kv_cache_config, vllm_version),
        location=KvLocation(
            side_channel_host=nixl_scheduler.side_channel_host,
            side_channel_port=nixl_scheduler.side_channel_port,
            tensor_parallel_size=parallel.tensor_parallel_size,
            pipeline_parallel_size=parallel.pipeline_parallel_size,
        ),
        vllm_version=vllm_version,
        data_parallel_rank=parallel.data_parallel_index,
        total_blocks=kv_cache_config.num_blocks,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        retain=not refusal,
        retain_refusal=refusal,
        details=describe_details(vllm_config, settings),
    )


def describe_details(vllm_config: "VllmConfig", settings: ConnectorSettings) -> dict[str, str]:
    """What people and `kvlease doctor` want to know of this engine."""
    from vllm.platforms import current_platform

    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    return {
        details.CONNECTOR_VERSION: kvlease_version,
        details.DEVICE: str(current_platform.device_type),
        details.NIXL_VERSION: _nixl_version(),
        details.NIXL_BACKENDS: ",".join(nixl_backends(vllm_config)),
        details.KV_BUFFER_DEVICE: str(transfer.kv_buffer_device),
        details.CACHE_DTYPE: str(cache.cache_dtype),
        details.MODEL_LENGTH_MAX: str(vllm_config.model_config.max_model_len),
        details.SEQUENCES_MAX: str(vllm_config.scheduler_config.max_num_seqs),
        details.RETENTION_BUDGET: f"{settings.retention_budget:g}",
        details.READING_CAP: f"{settings.reading_cap:g}",
    }


def nixl_backends(vllm_config: "VllmConfig") -> list[str]:
    """The backends that vLLM gives to its NIXL agents; its default is UCX."""
    return list(vllm_config.kv_transfer_config.get_from_extra_config("backends", ["UCX"]))


def _nixl_version() -> str:
    for name in ("nixl", "nixl-cu12", "nixl-cu13"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def describe_layout(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", vllm_version: str
) -> KvLayout:
    """The layout of this engine's KV; two engines READ each other only when the hashes are equal."""
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    groups = kv_cache_config.kv_cache_groups
    block_bytes = sum(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups)
    factors = {
        "vllm": vllm_version,
        "model": model.model,
        "revision": str(model.revision),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(cache.cache_dtype),
        "calculate_kv_scales": bool(getattr(cache, "calculate_kv_scales", False)),
        "block_size": cache.block_size,
        "block_bytes": block_bytes,
        "groups": [type(group.kv_cache_spec).__name__ for group in groups],
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        **layout_factors(vllm_config.kv_transfer_config.kv_connector_extra_config, kv_cache_config),
        **settings_factors(vllm_config),
    }
    digest = blake2b(json.dumps(factors, sort_keys=True).encode(), digest_size=16).hexdigest()
    return KvLayout(
        block_size=cache.block_size,
        dtype=str(model.dtype).removeprefix("torch."),
        tensor_parallel_size=parallel.tensor_parallel_size,
        pipeline_parallel_size=parallel.pipeline_parallel_size,
        block_bytes=block_bytes * parallel.tensor_parallel_size,
        layout_hash=digest,
    )


def retain_refusal(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", nixl_scheduler: Any) -> str:
    """Why this engine can neither retain nor READ; empty when it can.

    Head-trimming a block list to whole blocks is valid for one group of full attention (MLA among it) only: a
    sliding window keeps the last window, a recurrent state exists at the end alone, and context parallelism
    changes the unit.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    if len(groups) != 1:
        return f"the model has {len(groups)} KV cache groups, only one can be verified"
    spec = groups[0].kv_cache_spec
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        # No subclass: one of them lets blocks go in the middle, and attends to a reply otherwise than to a prompt.
        return f"the KV cache is of {type(spec).__name__}, not full attention"
    if getattr(spec, "sliding_window", None):
        return "the attention has a sliding window"
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) != 1:
            return f"{name} is {getattr(parallel, name)}, not 1"
    backoff = getattr(nixl_scheduler, "_prefill_backoff", None)
    if backoff is not None and backoff():
        return f"prefill stops {backoff()} tokens short of the prompt's end"
    if getattr(nixl_scheduler, "_has_mamba", False):
        return "the model has recurrent layers"
    if getattr(vllm_config.model_config, "is_diffusion", False):
        return "the model is one of diffusion, whose KV depends on tokens that come later"
    if not _names_images_by_content(vllm_config):
        return "without prefix caching and a cache of processed images, images are not named by their content"
    if _tells_routed_experts(vllm_config):
        return (
            "enable_return_routed_experts is set: experts are known of tokens that were computed here alone"
        )
    return _memory_refusal(vllm_config, nixl_scheduler)


def _tells_routed_experts(vllm_config: "VllmConfig") -> bool:
    """vLLM keeps the experts beside the cache and looks for those of every token: for one that was READ, 0.32 ends
    the engine, and 0.26 tells those of another. It refuses NIXL's own connectors by name, not what derives from them.
    """
    output = getattr(vllm_config, "aux_output_config", None)
    of_model = getattr(vllm_config.model_config, "enable_return_routed_experts", False)
    return bool(of_model or (output is not None and output.enabled))


def _names_images_by_content(vllm_config: "VllmConfig") -> bool:
    """vLLM numbers images where it need not know them again: two engines give one number to two images."""
    multimodal = vllm_config.model_config.multimodal_config
    processed = multimodal is None or multimodal.mm_processor_cache_gb > 0
    return bool(processed or vllm_config.cache_config.enable_prefix_caching)


def _memory_refusal(vllm_config: "VllmConfig", nixl_scheduler: Any) -> str:
    """Why what NIXL READs here may be another KV than the digests say; empty when it is that one."""
    if nixl_scheduler.use_host_buffer:
        # Copied there for requests with vLLM's own parameters alone: a READ would get what lay there before.
        return "kv_buffer_device is cpu: NIXL reads a copy of the KV, which is not made of retained blocks"
    if switch := _switch_to_sleep(vllm_config.model_config):
        # NIXL registered the memory once: after a sleep it would read and write what was there before.
        return f"{switch} is set: a sleep puts other memory under the addresses that NIXL knows"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "calculate_kv_scales is set: each engine scales its KV by the first prompt that it gets"
    return ""


def _switch_to_sleep(model: Any) -> str:
    """The setting with which this engine can be sent to sleep; empty when it cannot.

    `/sleep` and `/release_kv_cache_memory` do not ask for sleep mode, only for its allocator; without the latter
    they free nothing. They are served in vLLM's development mode alone.
    """
    from vllm import envs

    if model.enable_sleep_mode:
        return "enable_sleep_mode"
    allocator = getattr(model, "enable_cumem_allocator", False) and envs.VLLM_SERVER_DEV_MODE
    return "enable_cumem_allocator with VLLM_SERVER_DEV_MODE" if allocator else ""
