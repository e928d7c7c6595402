"""The worker half: quarantines READs that were given up, and reports them as failed.

A one-sided READ cannot be stopped at the memory. What the scheduler half gives up is moved out of vLLM's tables, its
handles are polled until they end, and only then are the destination blocks let go (by the scheduler half, which holds
a reference on them). A READ that still waits for its handshake when it is given up is never posted.
"""

import logging
from collections import Counter
from typing import Any

from kvlease_vllm.metadata import GivenUp, KvleaseMetadata, KvleaseWorkerMetadata, WorkerOrders
from kvlease_vllm.notifications import drop_own_notifications

logger = logging.getLogger(__name__)


class WorkerHalf:
    """Works on vLLM's NIXL worker, on its main thread only."""

    def __init__(self, nixl_worker: Any) -> None:
        self._worker = nixl_worker
        self._quarantine: dict[int, list[int]] = {}
        self._ended: Counter[int] = Counter()
        self._failed: dict[str, tuple[int, ...]] = {}
        self._boot_ids: dict[str, str] = {}
        self._notifications_wrapped = False

    def before_load(self, metadata: object) -> None:
        """Applies this step's orders; call before vLLM starts the loads."""
        if not self._notifications_wrapped:
            drop_own_notifications(self._worker.nixl_wrapper)
            self._notifications_wrapped = True
        orders = metadata.orders if isinstance(metadata, KvleaseMetadata) else WorkerOrders()
        for engine_id, boot_id in orders.boot_ids.items():
            self._forget_former_boot(engine_id, boot_id)
        for given_up in orders.given_up:
            self._give_up(given_up)
        for refused in orders.refused:
            self._failed[refused.request_id] = refused.block_ids
        self._drop_late_handshakes()

    def take_failed(self) -> dict[str, tuple[int, ...]]:
        """Requests to report as finished and failed in this step, with their destination blocks."""
        failed, self._failed = self._failed, {}
        return failed

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

    def _drop_late_handshakes(self) -> None:
        """Takes out of vLLM's queue the READs whose request stopped waiting while they waited for a handshake."""
        queue = self._worker._ready_requests
        for _ in range(queue.qsize()):
            request_id, meta = queue.get_nowait()
            if self._worker._recving_metadata.get(request_id) is meta:
                queue.put((request_id, meta))

    def drop_late_failures(self) -> None:
        """The same for handshakes that failed late; call before vLLM collects its results."""
        queue = self._worker._failed_recv_reqs
        for _ in range(queue.qsize()):
            request_id = queue.get_nowait()
            if request_id in self._worker._recving_metadata:
                queue.put(request_id)

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

    def _forget_former_boot(self, engine_id: str, boot_id: str) -> None:
        """Drops the NIXL agent of an engine that came back under the same id: its addresses are stale."""
        known = self._boot_ids.get(engine_id)
        self._boot_ids[engine_id] = boot_id
        if known is None or known == boot_id or engine_id not in self._worker._remote_agents:
            return
        busy = any(meta.remote.engine_id == engine_id for meta in self._worker._recving_metadata.values())
        if busy:
            self._boot_ids[engine_id] = known
            return
        logger.warning("engine %s has another boot id; shaking hands again", engine_id)
        self._worker._cleanup_remote_engine(engine_id)
