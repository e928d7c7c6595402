"""A connector whose holder keeps one wrong digest, that of a lease's last full block."""

from kvlease.core.digests import DIGEST_BYTES, BlockChain
from kvlease_vllm import connector
from kvlease_vllm.scheduler import SchedulerHalf


class ForgetfulHalf(SchedulerHalf):
    """Keeps a digest of zeros for the last full block of every lease."""

    def retained_digests(self, chain: BlockChain) -> bytes:
        """All digests but the last one, and zeros in its place."""
        whole = super().retained_digests(chain)
        return whole[:-DIGEST_BYTES] + bytes(len(whole[-DIGEST_BYTES:]))


class KvleaseConnector(connector.KvleaseConnector):
    """kvlease's connector with a wrong digest planted."""

    scheduler_half_class = ForgetfulHalf
