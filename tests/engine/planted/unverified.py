"""A connector that believes every lease: retained KV is read whatever prompt it belongs to."""

from kvlease.core.digests import BlockChain
from kvlease_vllm import connector
from kvlease_vllm.scheduler import SchedulerHalf


class BelievingHalf(SchedulerHalf):
    """Takes all tokens of a lease for verified."""

    def verified(self, held: BlockChain, prompt: BlockChain) -> int:
        """Tokens of the lease, compared with nothing."""
        return held.tokens


class KvleaseConnector(connector.KvleaseConnector):
    """kvlease's connector without verification."""

    scheduler_half_class = BelievingHalf
