"""What processes tell each other about engines and leases, free of any wire format."""

from dataclasses import dataclass, field
from enum import Enum

from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState, MissReason


class EngineRole(Enum):
    """What an engine is for; every engine can do both."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How KV lies in an engine's cache.

    Attributes:
        block_size: tokens of one block.
        block_bytes: bytes of one block over all layers and ranks.
        layout_hash: digest of everything that must be equal on both sides of a READ.
    """

    block_size: int
    dtype: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    block_bytes: int
    layout_hash: str


@dataclass(frozen=True, slots=True)
class KvLocation:
    """Where a reader's NIXL agent shakes hands; `extra` holds connector keys verbatim."""

    side_channel_host: str
    side_channel_port: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    extra: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine as its sidecar registered it.

    Attributes:
        url: base URL of the OpenAI API as routers reach it, without a trailing slash.
        sidecar_address: host:port of the sidecar's gRPC server.
        retain: whether the engine can retain and read; if not, `retain_refusal` says why.
        draining: an operator wants it to get no new turns.
        location: where other engines READ from it; None from a sidecar that does not tell.
        details: what people read to find out what is wrong, by `core.details`; no process decides by it.
    """

    holder: Holder
    role: EngineRole
    model: str
    url: str
    sidecar_address: str
    layout: KvLayout
    vllm_version: str = ""
    data_parallel_rank: int = 0
    total_blocks: int = 0
    prefix_caching: bool = True
    retain: bool = True
    retain_refusal: str = ""
    draining: bool = False
    location: KvLocation | None = None
    details: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """A lease as the store and watches carry it.

    Attributes:
        generation: revision of the transaction that recorded the grant, 0 until then.
        exclusive_bytes: bytes that only this lease keeps from the pool.
        chain_keys: newest keys of the conversation's message chain; hints only, digests verify.
    """

    lease_id: int
    kind: LeaseKind
    state: LeaseState
    holder: Holder
    tenant: str
    conversation_key: bytes
    tokens: int
    generation: int = 0
    exclusive_bytes: int = 0
    model: str = ""
    lora: str = ""
    layout_hash: str = ""
    chain_keys: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockList:
    """The blocks of one lease.

    Attributes:
        block_ids: physical ids, in prompt order.
        digests: 16 bytes per full block, concatenated.
        tokens: tokens whose KV lies in the blocks.
        tail_digest: digest of a partial last block, empty when there is none.
    """

    block_ids: tuple[int, ...]
    digests: bytes
    tokens: int
    tail_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin that the holder's table acked. `blocks` and `location` come with a read part only."""

    holder: Holder
    tokens: int
    layout_hash: str = ""
    blocks: BlockList | None = None
    location: KvLocation | None = None


PinOutcome = Pinned | MissReason


@dataclass(frozen=True, slots=True)
class HolderGauges:
    """An engine's blocks as its holder counts them.

    Attributes:
        counters: by name: bytes_read, reads, verified_tokens, mismatches, ...
    """

    held_blocks: int = 0
    reading_blocks: int = 0
    quarantined_blocks: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    running_requests: int = 0
    counters: dict[str, int] = field(default_factory=dict[str, int])
