"""Settings of an engine that decide which KV a prompt has, beside the names of its model and its adapter.

The digests of a prompt do not cover them, so engines that differ in one of them must not READ each other. What is
not set says nothing: versions of vLLM that lack a setting, and those that have it, agree where nobody uses it.
"""

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_MODEL = ("hf_config_path", "quantization_config", "model_class_overrides")

_IMAGES = {
    "images": "mm_processor_kwargs",
    "media": "media_io_kwargs",
    "encoder_dtype": "mm_encoder_attn_dtype",
}
"""An image or a video is named by its content or by its client, and either goes through these before it is KV."""


def settings_factors(vllm_config: "VllmConfig") -> dict[str, Any]:
    """The settings that are in use, by name."""
    model = vllm_config.model_config
    return {
        "hf_overrides": _overrides_of(model.hf_overrides),
        **_named({name: getattr(model, name, None) for name in _MODEL}),
        **_rope_factors(model),
        **_image_factors(model.multimodal_config),
        **_adapter_factors(getattr(vllm_config, "lora_config", None), model.dtype),
    }


def _named(settings: dict[str, Any]) -> dict[str, str]:
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in settings.items() if value}


def _overrides_of(overrides: Any) -> str:
    """What `--hf-overrides` changes, rope scaling for one: KV computed under others is other KV."""
    if callable(overrides):
        return f"{overrides.__module__}.{overrides.__qualname__}"
    return json.dumps(overrides, sort_keys=True, default=str)


def _rope_factors(model: Any) -> dict[str, list[bool]]:
    """What the KV of LongRoPE depends on beside the model: its factors go by `--max-model-len`, not by the prompt."""
    parameters: dict[str, Any] = getattr(model.hf_text_config, "rope_parameters", None) or {}
    kinds = list(parameters.values()) if "rope_type" not in parameters else [parameters]
    long = [kind for kind in kinds if isinstance(kind, dict) and kind.get("rope_type") == "longrope"]
    trained = [kind.get("original_max_position_embeddings", 0) for kind in long]
    return {"long_rope": [model.max_model_len > tokens for tokens in trained]} if long else {}


def _image_factors(multimodal: Any) -> dict[str, str]:
    if multimodal is None:
        return {}
    settings: dict[str, Any] = {factor: getattr(multimodal, name, None) for factor, name in _IMAGES.items()}
    if rate := getattr(multimodal, "video_pruning_rate", None):
        # Two methods leave as many tokens of a video, but not the same ones.
        settings["pruning"] = [rate, getattr(multimodal, "video_pruning_method", None)]
    return _named(settings)


def _adapter_factors(lora: Any, dtype: Any) -> dict[str, str]:
    """How adapters are applied; engines that have them without a choice of their own, and engines that have none,
    agree on what is computed without one.
    """
    if lora is None:
        return {}
    modules = getattr(lora, "target_modules", None)
    settings: dict[str, Any] = {"lora_modules": sorted(modules) if modules else None}
    if lora.lora_dtype not in (None, "auto", dtype):
        settings["lora_dtype"] = str(lora.lora_dtype)
    return _named(settings)
