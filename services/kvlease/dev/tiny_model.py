"""A tiny model with real random weights, on which wrong KV shows as wrong tokens.

Qwen3 architecture, hidden 256, 4 layers, 2 KV heads of 64, float32, about 10 MB; one token per byte of
text, so lengths in tokens are lengths in bytes. Constant dummy weights cannot tell right KV from wrong;
these weights make the logits react to every earlier token.

The model writes printable ASCII only and never ends by itself: what it wrote, sent back as history, is
tokenized into the very tokens it sampled. Pure standard library: `python -m kvlease.dev.tiny_model DIR`.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import sys
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

from kvlease.dev.engine_env import cache_root

SEED = 20250
HIDDEN = 256
INTERMEDIATE = 512
LAYERS = 4
ATTENTION_HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 64
POSITIONS_MAX = 16384

BEGIN, END, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
MESSAGE_START, MESSAGE_END = "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
# Ids follow the 256 bytes in this order. The think marks are ordinary text to a client, as in Qwen3.
ADDED_TOKENS = (BEGIN, END, PAD, MESSAGE_START, MESSAGE_END, THINK_START, THINK_END)
VOCABULARY = 256 + len(ADDED_TOKENS)
PRINTABLE = range(0x20, 0x7F)

# One hidden dimension holds this constant in every token and no layer writes to it, so that the output
# matrix can read it as a bias. Qwen3 has none of its own.
_BIAS_DIMENSION = 0
_BIAS_INPUT = 2.0
_BIAS_UNPRINTABLE = -400.0

# In the manner of Qwen3: the think part of an assistant message is dropped once a later user message
# exists, so such a history differs from what the KV cache holds.
CHAT_TEMPLATE = """\
{%- macro text_of(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content is not none -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set text = text_of(message.content) -%}
{%- if message.role == 'assistant' and '</think>' in text and loop.index0 < last.user -%}
{%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + text -}}
{%- if message.role == 'assistant' and message.tool_calls -%}
{%- for call in message.tool_calls -%}
{%- set function = call.function if call.function else call -%}
{{- '\\n<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""


@dataclass(frozen=True)
class Tensor:
    """One named weight: its shape and how to fill it (`std` 0 means all ones)."""

    name: str
    shape: tuple[int, ...]
    std: float


def model_path(root: Path | None = None) -> Path:
    """Returns where the model belongs; the name changes with the code that makes it."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return (root or cache_root()) / f"tiny-qwen3-{digest[:12]}"


def ensure_tiny_model(root: Path | None = None) -> Path:
    """Returns the model's folder, generating it first (seconds) when it does not exist.

    Atomic and safe to call from several processes at once.
    """
    target = model_path(root)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_model(scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        # Another process was first: a folder that is not empty is never replaced.
        if not target.exists():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def write_model(folder: Path) -> None:
    """Writes weights, configuration, tokenizer and chat template; the same bytes on every call."""
    _write_json(folder / "config.json", _config())
    _write_json(folder / "generation_config.json", {"eos_token_id": _end_ids()})
    _write_json(folder / "tokenizer.json", _tokenizer())
    _write_json(folder / "tokenizer_config.json", _tokenizer_config())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_safetensors(folder / "model.safetensors", list(_tensors()))


def token_id(token: str) -> int:
    """Returns the id of one of ADDED_TOKENS; a byte's id is the byte."""
    return 256 + ADDED_TOKENS.index(token)


def _end_ids() -> list[int]:
    return [token_id(END), token_id(MESSAGE_END)]


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": ATTENTION_HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "max_position_embeddings": POSITIONS_MAX,
        "vocab_size": VOCABULARY,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": token_id(BEGIN),
        "eos_token_id": token_id(END),
        "pad_token_id": token_id(PAD),
    }


def _tensors() -> Iterator[Tensor]:
    def linear(name: str, rows: int, columns: int) -> Tensor:
        return Tensor(f"{name}.weight", (rows, columns), 1.5 / sqrt(columns))

    def norm(name: str, size: int) -> Tensor:
        return Tensor(f"{name}.weight", (size,), 0.0)

    yield Tensor("model.embed_tokens.weight", (VOCABULARY, HIDDEN), 0.25)
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        yield norm(f"{layer}.input_layernorm", HIDDEN)
        yield linear(f"{layer}.self_attn.q_proj", ATTENTION_HEADS * HEAD_SIZE, HIDDEN)
        yield linear(f"{layer}.self_attn.k_proj", KV_HEADS * HEAD_SIZE, HIDDEN)
        yield linear(f"{layer}.self_attn.v_proj", KV_HEADS * HEAD_SIZE, HIDDEN)
        yield linear(f"{layer}.self_attn.o_proj", HIDDEN, ATTENTION_HEADS * HEAD_SIZE)
        yield norm(f"{layer}.self_attn.q_norm", HEAD_SIZE)
        yield norm(f"{layer}.self_attn.k_norm", HEAD_SIZE)
        yield norm(f"{layer}.post_attention_layernorm", HIDDEN)
        yield linear(f"{layer}.mlp.gate_proj", INTERMEDIATE, HIDDEN)
        yield linear(f"{layer}.mlp.up_proj", INTERMEDIATE, HIDDEN)
        yield linear(f"{layer}.mlp.down_proj", HIDDEN, INTERMEDIATE)
    yield norm("model.norm", HIDDEN)
    yield linear("lm_head", VOCABULARY, HIDDEN)


def _values(tensor: Tensor, generator: random.Random) -> array[float]:
    size = prod(tensor.shape)
    if tensor.std == 0.0:
        return array("f", [1.0]) * size
    values = array("f", (generator.gauss(0.0, tensor.std) for _ in range(size)))
    columns = tensor.shape[1]
    if tensor.name == "model.embed_tokens.weight":
        for row in range(tensor.shape[0]):
            values[row * columns + _BIAS_DIMENSION] = _BIAS_INPUT
    elif tensor.name == "lm_head.weight":
        for row in range(tensor.shape[0]):
            bias = 0.0 if row in PRINTABLE else _BIAS_UNPRINTABLE
            values[row * columns + _BIAS_DIMENSION] = bias
    elif tensor.name.endswith(("o_proj.weight", "down_proj.weight")):
        start = _BIAS_DIMENSION * columns
        values[start : start + columns] = array("f", [0.0]) * columns
    return values


def _write_safetensors(file: Path, tensors: list[Tensor]) -> None:
    """Writes the format of https://github.com/huggingface/safetensors: header length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + 4 * prod(tensor.shape)
        header[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    generator = random.Random(SEED)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for tensor in tensors:
            values = _values(tensor, generator)
            if sys.byteorder == "big":
                values.byteswap()
            out.write(values.tobytes())


def _byte_characters() -> list[str]:
    """Returns the character that byte-level tokenizers write for each byte (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    table = {byte: chr(byte) for byte in shown}
    table.update({byte: chr(256 + position) for position, byte in enumerate(hidden)})
    return [table[byte] for byte in range(256)]


def _tokenizer() -> dict[str, Any]:
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    vocabulary.update({token: token_id(token) for token in ADDED_TOKENS})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added_token(token) for token in ADDED_TOKENS],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }


def _added_token(token: str) -> dict[str, Any]:
    return {
        "id": token_id(token),
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": token not in (THINK_START, THINK_END),
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": POSITIONS_MAX,
        "clean_up_tokenization_spaces": False,
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Writes the model into the folder named, or into the cache, and prints the folder."""
    if arguments:
        folder = Path(arguments[0])
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder)
    else:
        folder = ensure_tiny_model()
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
