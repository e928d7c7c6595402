"""The digest chain of a vLLM request: its tokens and all else that their KV depends on."""

import struct
from typing import TYPE_CHECKING

from kvlease.core.digests import BlockChain, ChainRoot, chain

if TYPE_CHECKING:
    from vllm.v1.request import Request


def request_root(request: "Request", tenant: str, model: str, weights_version: str) -> ChainRoot:
    """The root of a request's chain: tenant, model, weights, LoRA adapter (name and path) and cache salt."""
    lora = request.lora_request
    return ChainRoot(
        tenant=tenant,
        model=model,
        weights_version=weights_version,
        lora_name=lora.lora_name if lora is not None else "",
        lora_path=lora.lora_path if lora is not None else "",
        cache_salt=request.cache_salt or "",
    )


def request_chain(
    request: "Request", root: ChainRoot, tokens: int, block_size: int, known: bytes = b""
) -> BlockChain:
    """Digests the first `tokens` tokens of a request (prompt and output), block by block.

    Args:
        known: digests of the request's own chain, as far as they were computed before.
    """
    token_ids = request._all_token_ids[:tokens]
    return chain(root, token_ids, block_size, _multimodal_extras(request, tokens, block_size), known)


def _multimodal_extras(request: "Request", tokens: int, block_size: int) -> dict[int, bytes]:
    """Per block, the identity and place of every multimodal item that reaches into it."""
    extras: dict[int, bytes] = {}
    for feature in request.mm_features:
        start, length = feature.mm_position.offset, feature.mm_position.length
        identity = str(feature.identifier).encode()
        last = min(start + length, tokens) - 1
        for block in range(start // block_size, last // block_size + 1):
            place = struct.pack("<qqI", start - block * block_size, length, len(identity))
            extras[block] = extras.get(block, b"") + place + identity
    return extras


def can_verify(request: "Request") -> bool:
    """Whether the digests cover all that the KV of a request depends on.

    Prompts given as embeddings have no token ids. An adapter that is loaded in place may be another one than
    before, under the same name and path.
    """
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return False
    return not getattr(request.lora_request, "load_inplace", False)
