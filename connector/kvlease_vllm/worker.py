"""The worker half: quarantines READs that were given up, and reports them as failed.

A one-sided READ cannot be stopped at the memory. What the scheduler half gives up is moved out of vLLM's tables,
its handles are polled until they end, and only then are the destination blocks let go (by the scheduler half,
which holds a reference on them). A READ that still waits for its handshake when it is given up is never posted,
whenever the handshake ends.
"""

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvlease.core.attachment import Peer
from kvlease_vllm.metadata import GivenUp, KvleaseMetadata, KvleaseWorkerMetadata
from kvlease_vllm.notifications import drop_own_notifications

logger = logging.getLogger("vllm.kvlease.worker")


class CurrentFailures(queue.Queue[str]):
    """vLLM's queue of requests whose handshake failed, without those that wait for no READ any more.

    vLLM would look for what it no longer knows of them, and the engine would die.
    """

    def __init__(self, is_current: Callable[[str], bool]) -> None:
        super().__init__()
        self._is_current = is_current

    def get_nowait(self) -> str:
        """The next request that still waits; raises `queue.Empty` when there is none."""
        while not self._is_current(request_id := super().get_nowait()):
            continue
        return request_id


def order_by_source(meta: Any) -> None:
    """Names the blocks of a READ in the order in which they lie at the holder.

    NIXL makes one descriptor of blocks that follow each other on both sides, and posting descriptors is what a
    READ spends its time with. A pool that has been used hands out blocks from the last to the first: in prompt
    order no two would follow each other.
    """
    if meta.remote is None:
        return
    local, remote = meta.local_block_ids, meta.remote.block_ids
    if len(local) == len(remote) == 1 and len(local[0]) == len(remote[0]):
        pairs = sorted(zip(remote[0], local[0], strict=True))
        meta.remote.block_ids = ([source for source, _ in pairs],)
        meta.local_block_ids = ([destination for _, destination in pairs],)


class WorkerHalf:
    """Works on vLLM's NIXL worker: on its main thread, but for handshakes that no turn waits for.

    Attributes:
        tables: held by the main thread while it is in the connector, and by whoever begins a handshake: vLLM
            begins and forgets handshakes on one thread. A step waits no longer than it takes to put a
            handshake into a queue.
    """

    def __init__(self, nixl_worker: Any) -> None:
        self.tables = threading.RLock()
        self._worker = nixl_worker
        self._quarantine: dict[int, list[int]] = {}
        self._ended: Counter[int] = Counter()
        self._failed: dict[str, tuple[int, ...]] = {}
        self._boot_ids: dict[str, str] = {}
        self._notifications_wrapped = False
        self._read = nixl_worker._read_blocks_for_req
        nixl_worker._read_blocks_for_req = self._read_if_current
        nixl_worker._failed_recv_reqs = CurrentFailures(lambda it: it in nixl_worker._recving_metadata)

    def before_load(self, metadata: object) -> None:
        """Applies this step's orders; call before vLLM starts the loads."""
        if not self._notifications_wrapped:
            drop_own_notifications(self._worker.nixl_wrapper)
            self._notifications_wrapped = True
        if not isinstance(metadata, KvleaseMetadata):
            return
        orders = metadata.orders
        for given_up in orders.given_up:
            metadata.reqs_to_recv.pop(given_up.request_id, None)
            self._give_up(given_up)
        for engine_id, boot_id in orders.boot_ids.items():
            if not self._forget_former_boot(engine_id, boot_id):
                self._fail_reads_of(engine_id, metadata)
        for refused in orders.refused:
            self._failed[refused.request_id] = refused.block_ids
        for meta in metadata.reqs_to_recv.values():
            order_by_source(meta)

    def take_failed(self) -> dict[str, tuple[int, ...]]:
        """Requests to report as finished and failed in this step, with their destination blocks."""
        failed, self._failed = self._failed, {}
        return failed

    def begin_handshake(self, peer: Peer) -> "Future[Any] | None":
        """Begins to shake hands with a peer on vLLM's own thread for that; None when there is nothing to do.

        A former boot of the peer is left to the next READ, which may have to wait for others.
        """
        engine_id, location = peer.holder.engine_id, peer.location
        # Only where engines can have them, so that older versions are asked as they expect.
        stages = location.pipeline_parallel_size
        more = {"pp_size": stages} if stages > 1 else {}
        with self.tables:
            if self._boot_ids.setdefault(engine_id, peer.holder.boot_id) != peer.holder.boot_id:
                return None
            begun: Future[Any] | None = self._worker._ensure_handshake(
                engine_id,
                location.side_channel_host,
                location.side_channel_port,
                location.tensor_parallel_size,
                **more,
            )
        return begun

    def report(self) -> KvleaseWorkerMetadata | None:
        """Polls the quarantine; what ended since the last step, or None when nothing did."""
        for attempt_id, handles in list(self._quarantine.items()):
            left = [handle for handle in handles if not self._release_if_ended(handle)]
            if left:
                self._quarantine[attempt_id] = left
            else:
                del self._quarantine[attempt_id]
                self._ended[attempt_id] += 1
        if not self._ended:
            return None
        ended, self._ended = self._ended, Counter()
        return KvleaseWorkerMetadata(ended)

    def _give_up(self, given_up: GivenUp) -> None:
        worker, request_id = self._worker, given_up.request_id
        if request_id not in worker._recving_metadata:
            # Ended on this rank before the order came: nothing of it is left, and it was reported.
            self._ended[given_up.attempt_id] += 1
            return
        del worker._recving_metadata[request_id]
        self._quarantine[given_up.attempt_id] = worker._recving_transfers.pop(request_id, [])
        self._failed[request_id] = given_up.block_ids
        logger.warning("READ of request %s given up; its blocks are quarantined", request_id)

    def _read_if_current(self, request_id: str, meta: Any) -> None:
        """vLLM's posting of a READ, but not for a request that stopped waiting during the handshake."""
        if self._worker._recving_metadata.get(request_id) is meta:
            self._read(request_id, meta)

    def _fail_reads_of(self, engine_id: str, metadata: KvleaseMetadata) -> None:
        """Posts no READ of this step from an engine whose former boot is still being read."""
        for request_id, meta in list(metadata.reqs_to_recv.items()):
            if meta.remote is not None and meta.remote.engine_id == engine_id:
                del metadata.reqs_to_recv[request_id]
                self._failed[request_id] = tuple(meta.local_block_ids[0])

    def _release_if_ended(self, handle: int) -> bool:
        wrapper = self._worker.nixl_wrapper
        try:
            if wrapper.check_xfer_state(handle) == "PROC":
                return False
            wrapper.release_xfer_handle(handle)
        except Exception:
            # An error of the status or the release does not say that the memory is left alone.
            logger.exception("quarantined READ cannot be released yet")
            return False
        return True

    def _forget_former_boot(self, engine_id: str, boot_id: str) -> bool:
        """Drops the NIXL agent of an engine that came back under the same id: its addresses are stale.

        False when that must wait, because READs from the former boot are in flight.
        """
        worker, known = self._worker, self._boot_ids.get(engine_id)
        if known is not None and known != boot_id and engine_id in worker._remote_agents:
            if any(meta.remote.engine_id == engine_id for meta in worker._recving_metadata.values()):
                return False
            logger.warning("engine %s has another boot id; shaking hands again", engine_id)
            worker._cleanup_remote_engine(engine_id)
        self._boot_ids[engine_id] = boot_id
        return True
