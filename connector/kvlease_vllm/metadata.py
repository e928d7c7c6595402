"""What the two halves of the connector tell each other, beside what vLLM's NIXL connector tells itself."""

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A READ that the scheduler half has given up; its destination blocks are already referenced.

    Attributes:
        request_id: the request that waits for it.
        attempt_id: names the READ; what is left of it is reported under this id.
        block_ids: destination blocks.
    """

    request_id: str
    attempt_id: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class WorkerOrders:
    """Orders of the scheduler half for one step.

    Attributes:
        boot_ids: boot id per remote engine that this step reads from.
        given_up: READs to move into quarantine and to report as failed.
        refused: READs that ended but came too late: to be reported as failed by every rank.
    """

    boot_ids: dict[str, str] = field(default_factory=dict[str, str])
    given_up: list[GivenUp] = field(default_factory=list[GivenUp])
    refused: list[GivenUp] = field(default_factory=list[GivenUp])


class KvleaseMetadata(NixlConnectorMetadata):
    """vLLM's metadata of one step with our orders."""

    orders: WorkerOrders

    @classmethod
    def extend(cls, metadata: NixlConnectorMetadata, orders: WorkerOrders) -> "KvleaseMetadata":
        """Takes over everything of `metadata` and adds `orders`."""
        extended = cls()
        extended.__dict__.update(metadata.__dict__)
        extended.orders = orders
        return extended


class KvleaseWorkerMetadata(KVConnectorWorkerMetadata):
    """What the ranks report: per attempt, on how many ranks nothing of a given-up READ is left."""

    def __init__(self, ended: Counter[int]) -> None:
        self.ended = ended

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Adds another rank's report."""
        if not isinstance(other, KvleaseWorkerMetadata):
            raise TypeError(f"cannot add {type(other).__name__} to KvleaseWorkerMetadata")
        return KvleaseWorkerMetadata(self.ended + other.ended)
