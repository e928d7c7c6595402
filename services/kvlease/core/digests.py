"""The chain of block digests that proves that retained KV belongs to a prompt.

One 16 byte keyed BLAKE2b digest per full block, chained: a digest covers every token up to its block's end,
and all else that KV depends on. The key of the chain is the digest of its root, so chains of two tenants, two
weights or two LoRA adapters never meet.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ChainRoot:
    """What KV depends on besides the tokens of one prompt.

    Attributes:
        tenant: hex digest of the tenant.
        model: served model and its revision.
        weights_version: the operator's version of the weights, empty when there is one only.
        lora_name: name of the LoRA adapter, empty without one.
        lora_path: path of the LoRA adapter, empty without one.
        cache_salt: the salt of the prefix cache, empty without one.
    """

    tenant: str
    model: str
    weights_version: str = ""
    lora_name: str = ""
    lora_path: str = ""
    cache_salt: str = ""

    def key(self) -> bytes:
        """32 bytes that key the chain."""
        fields = (
            self.tenant,
            self.model,
            self.weights_version,
            self.lora_name,
            self.lora_path,
            self.cache_salt,
        )
        digest = blake2b(digest_size=32, person=b"kvlease-root")
        for field in fields:
            encoded = field.encode("utf-8", "surrogatepass")
            digest.update(struct.pack("<Q", len(encoded)) + encoded)
        return digest.digest()


@dataclass(frozen=True, slots=True)
class BlockChain:
    """The digests of a run of tokens.

    Attributes:
        block_size: tokens of one block.
        digests: 16 bytes per full block, concatenated.
        tokens: tokens covered, those of the partial last block among them.
        tail: digest of the partial last block, chained; empty when the run ends at a block's end.
    """

    block_size: int
    digests: bytes
    tokens: int
    tail: bytes = b""

    @property
    def full_blocks(self) -> int:
        """Number of full blocks."""
        return len(self.digests) // DIGEST_BYTES


def chain(
    root: ChainRoot,
    token_ids: Sequence[int],
    block_size: int,
    extras: Mapping[int, bytes] | None = None,
    known: bytes = b"",
) -> BlockChain:
    """Digests `token_ids` block by block.

    Args:
        root: what the KV depends on besides the tokens.
        token_ids: ids below 2**32, from the start of the prompt.
        block_size: tokens of one block.
        extras: per block index, what else its KV depends on (multimodal hashes and their places).
        known: digests of these tokens' chain as far as somebody has them: they are not computed again.
    """
    begun, full_blocks = _begun(root), len(token_ids) // block_size
    done = min(len(known) // DIGEST_BYTES, full_blocks)
    digests = [known[: done * DIGEST_BYTES]]
    previous = digests[0][-DIGEST_BYTES:]
    packed = struct.pack(f"<{len(token_ids) - done * block_size}I", *token_ids[done * block_size :])
    width, length = block_size * 4, struct.pack("<I", block_size)
    for block, start in enumerate(range(0, (full_blocks - done) * width, width), done):
        digest = begun.copy()
        digest.update(previous + length + packed[start : start + width])
        if extras:
            digest.update(extras.get(block, b""))
        previous = digest.digest()
        digests.append(previous)
    tail = b""
    if rest := len(token_ids) % block_size:
        digest = begun.copy()
        digest.update(previous + struct.pack("<I", rest) + packed[-rest * 4 :])
        if extras:
            digest.update(extras.get(full_blocks, b""))
        tail = digest.digest()
    return BlockChain(block_size, b"".join(digests), len(token_ids), tail)


@lru_cache(maxsize=1024)
def _begun(root: ChainRoot) -> blake2b:
    """A digest keyed for a root, to be copied."""
    return blake2b(digest_size=DIGEST_BYTES, key=root.key())


def common_full_blocks(left: bytes, right: bytes) -> int:
    """Length in blocks of the longest common prefix of two chains' digests."""
    blocks = min(len(left), len(right)) // DIGEST_BYTES
    if left[: blocks * DIGEST_BYTES] == right[: blocks * DIGEST_BYTES]:
        return blocks
    for block in range(blocks):
        place = slice(block * DIGEST_BYTES, (block + 1) * DIGEST_BYTES)
        if left[place] != right[place]:
            return block
    return blocks


def verified_tokens(held: BlockChain, prompt: BlockChain) -> int:
    """Tokens at the head of `held` that belong to `prompt`.

    Whole blocks, and the partial last block only when the prompt ends exactly where the held run ends.
    """
    blocks = common_full_blocks(held.digests, prompt.digests)
    whole = blocks == held.full_blocks == prompt.full_blocks
    if whole and held.tail and held.tail == prompt.tail and held.tokens == prompt.tokens:
        return held.tokens
    return blocks * held.block_size
