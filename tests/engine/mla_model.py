"""The tiny model in DeepSeek-V2's architecture: latent attention, whose cache has one head of 576 numbers a token.

Weights are as random as the tiny model's; tokenizer and chat template are its own.
"""

import json
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from typing import Any

from kvlease.dev import tiny_model
from kvlease.dev.tiny_model import HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY, Tensor

HEADS = 16
LATENT, ROTARY, PLAIN, VALUE = 512, 64, 128, 128
"""Sizes of the published models, for which kernels are made."""
POSITIONS_MAX = 4096


def write_mla_model(folder: Path) -> Path:
    """Writes the model into a folder that exists, and returns it."""
    tiny_model.write_model(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **_changes()}))
    tiny_model._write_safetensors(folder / "model.safetensors", list(_tensors()))
    return folder


def _changes() -> dict[str, Any]:
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": ROTARY,
        "q_lora_rank": None,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROTARY,
        "qk_nope_head_dim": PLAIN,
        "v_head_dim": VALUE,
        "max_position_embeddings": POSITIONS_MAX,
        # Every layer is dense: no expert is ever made.
        "first_k_dense_replace": LAYERS,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "num_experts_per_tok": 1,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
    }


def _tensors() -> Iterator[Tensor]:
    def linear(name: str, rows: int, columns: int) -> Tensor:
        return Tensor(f"{name}.weight", (rows, columns), 1.5 / sqrt(columns))

    def norm(name: str, size: int) -> Tensor:
        return Tensor(f"{name}.weight", (size,), 0.0)

    yield Tensor("model.embed_tokens.weight", (VOCABULARY, HIDDEN), 0.25)
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        yield norm(f"{layer}.input_layernorm", HIDDEN)
        yield linear(f"{layer}.self_attn.q_proj", HEADS * (PLAIN + ROTARY), HIDDEN)
        yield linear(f"{layer}.self_attn.kv_a_proj_with_mqa", LATENT + ROTARY, HIDDEN)
        yield norm(f"{layer}.self_attn.kv_a_layernorm", LATENT)
        yield linear(f"{layer}.self_attn.kv_b_proj", HEADS * (PLAIN + VALUE), LATENT)
        yield linear(f"{layer}.self_attn.o_proj", HIDDEN, HEADS * VALUE)
        yield norm(f"{layer}.post_attention_layernorm", HIDDEN)
        yield linear(f"{layer}.mlp.gate_proj", INTERMEDIATE, HIDDEN)
        yield linear(f"{layer}.mlp.up_proj", INTERMEDIATE, HIDDEN)
        yield linear(f"{layer}.mlp.down_proj", HIDDEN, INTERMEDIATE)
    yield norm("model.norm", HIDDEN)
    yield linear("lm_head", VOCABULARY, HIDDEN)
