"""Which engines neither retain nor READ, and which do not READ each other."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.lora import LoRAConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    RSWASpec,
)

from kvlease_vllm.engine_facts import describe_layout, retain_refusal

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
GROUPS = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], SPEC)])
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 4096}


def cache_of(spec: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )


def refusal(
    spec: KVCacheSpec = SPEC,
    *,
    host_buffer: bool = False,
    sleep_mode: bool = False,
    sleep_allocator: bool = False,
    diffusion: bool = False,
    image_cache_gb: float | None = None,
    routed_experts: bool = False,
    routed_experts_in_model: bool = False,
    **cache: Any,
) -> str:
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        aux_output_config=SimpleNamespace(enabled=routed_experts),
        model_config=SimpleNamespace(
            enable_sleep_mode=sleep_mode,
            enable_cumem_allocator=sleep_allocator,
            is_diffusion=diffusion,
            enable_return_routed_experts=routed_experts_in_model,
            multimodal_config=None
            if image_cache_gb is None
            else SimpleNamespace(mm_processor_cache_gb=image_cache_gb),
        ),
        cache_config=SimpleNamespace(**{"enable_prefix_caching": True, **cache}),
    )
    return retain_refusal(config, cache_of(spec), SimpleNamespace(use_host_buffer=host_buffer))


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"enable_prefix_caching": False},
        {"image_cache_gb": 0.0},
        {"image_cache_gb": 4.0, "enable_prefix_caching": False},
    ],
)
def test_an_engine_whose_memory_is_what_nixl_reads_retains(facts: Any) -> None:
    assert refusal(**facts) == ""


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"host_buffer": True}, "kv_buffer_device"),
        ({"sleep_mode": True}, "enable_sleep_mode"),
        ({"diffusion": True}, "diffusion"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales"),
        ({"image_cache_gb": 0.0, "enable_prefix_caching": False}, "images"),
    ],
)
def test_where_a_read_could_get_other_kv_nothing_is_retained_or_read(facts: Any, named: str) -> None:
    assert named in refusal(**facts)


@pytest.mark.parametrize(("dev_mode", "refused"), [("0", False), ("1", True)])
def test_an_engine_that_can_be_sent_to_sleep_without_sleep_mode_retains_and_reads_nothing(
    monkeypatch: pytest.MonkeyPatch, dev_mode: str, refused: bool
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", dev_mode)
    assert ("enable_cumem_allocator" in refusal(sleep_allocator=True)) is refused
    assert refusal() == ""


@pytest.mark.parametrize("where", ["routed_experts", "routed_experts_in_model"])
def test_an_engine_that_tells_experts_of_every_token_retains_and_reads_nothing(where: str) -> None:
    assert "experts" in refusal(**{where: True})


def test_only_attention_to_all_tokens_before_retains_and_reads() -> None:
    shape: Any = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    assert refusal(MLAAttentionSpec(**shape)) == ""
    assert "RSWASpec" in refusal(RSWASpec(**shape, rswa_window=64))


def layout_hash(
    length_max: int = 4096,
    rope_parameters: dict[str, Any] | None = None,
    images: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    **model: Any,
) -> str:
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            model="m",
            revision=None,
            dtype=torch.float32,
            quantization=None,
            hf_overrides={},
            hf_text_config=SimpleNamespace(rope_parameters=rope_parameters),
            max_model_len=length_max,
            multimodal_config=SimpleNamespace(**{"mm_processor_kwargs": None, **(images or {})}),
            **model,
        ),
        lora_config=LoRAConfig(max_lora_rank=8, **lora) if lora is not None else None,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=16),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}),
    )
    return describe_layout(config, cache_of(SPEC), "0.32").layout_hash


@pytest.mark.parametrize("rope_parameters", [LONG, {"full_attention": LONG}])
def test_engines_whose_longest_prompts_choose_other_rope_factors_do_not_read_each_other(
    rope_parameters: dict[str, Any],
) -> None:
    short, long, longer = (layout_hash(tokens, rope_parameters) for tokens in (4096, 4097, 131072))
    assert short != long == longer


@pytest.mark.parametrize("rope_parameters", [None, {}, {"rope_type": "yarn"}])
def test_other_models_read_each_other_whatever_their_longest_prompts(
    rope_parameters: dict[str, Any] | None,
) -> None:
    assert layout_hash(4096, rope_parameters) == layout_hash(131072, rope_parameters)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"mm_processor_kwargs": {"max_pixels": 1000}}, {"mm_processor_kwargs": {"max_pixels": 2000}}),
        (
            {"media_io_kwargs": {"video": {"num_frames": 8}}},
            {"media_io_kwargs": {"video": {"num_frames": 9}}},
        ),
        (
            {"video_pruning_rate": 0.5, "video_pruning_method": "evs"},
            {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
        ),
        ({"mm_encoder_attn_dtype": "fp8"}, {"mm_encoder_attn_dtype": None}),
    ],
)
def test_engines_that_see_images_otherwise_do_not_read_each_other(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert layout_hash(images=one) != layout_hash(images=other)
    assert layout_hash(images=one) == layout_hash(images=copy.deepcopy(one)) != layout_hash()


def test_settings_for_images_that_say_nothing_tell_no_engines_apart() -> None:
    nothing = {"mm_processor_kwargs": {}, "media_io_kwargs": {}, "video_pruning_method": "evs"}
    assert layout_hash(images=nothing) == layout_hash()


def test_engines_that_take_an_adapter_otherwise_do_not_read_each_other() -> None:
    queries, outputs = {"target_modules": ["q_proj"]}, {"target_modules": ["q_proj", "o_proj"]}
    assert len({layout_hash(lora={}), layout_hash(lora=queries), layout_hash(lora=outputs)}) == 3
    swapped = {"target_modules": ["o_proj", "q_proj"]}
    assert layout_hash(lora=outputs) == layout_hash(lora=swapped)
    assert layout_hash(lora={"lora_dtype": torch.bfloat16}) != layout_hash(lora={})


def test_engines_with_and_without_adapters_read_what_none_was_used_for() -> None:
    assert layout_hash(lora={}) == layout_hash(lora={"lora_dtype": torch.float32}) == layout_hash()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"quantization_config": {"ignore": ["lm_head"]}}, {"quantization_config": {"ignore": []}}),
        (
            {"quantization_config": QuantizationConfigArgs(linear="fp8_per_tensor")},
            {"quantization_config": QuantizationConfigArgs(linear="mxfp8")},
        ),
        ({"hf_config_path": "one"}, {"hf_config_path": "other"}),
        ({"model_class_overrides": {"A": "m:B"}}, {"model_class_overrides": {"A": "m:C"}}),
    ],
)
def test_engines_that_make_other_models_of_the_same_weights_do_not_read_each_other(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    assert layout_hash(**one) != layout_hash(**other)
    assert layout_hash(**one) == layout_hash(**copy.deepcopy(one)) != layout_hash()
