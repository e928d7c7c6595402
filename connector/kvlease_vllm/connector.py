"""`KvleaseConnector`: the class that vLLM loads.

A subclass of vLLM's NIXL connector; no file of vLLM is patched. Handshakes, descriptors and READs stay vLLM's;
what is kept, what is read and what counts is decided here. See `docs/protocol.md` for the promises.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

from kvlease_vllm.block_layout import pack_layers, prefer_layers_together
from kvlease_vllm.metadata import KvleaseMetadata
from kvlease_vllm.scheduler import SchedulerHalf
from kvlease_vllm.seams import (
    UnsupportedEngineError,
    check_alone,
    check_connector,
    check_worker,
    has_background_handshake,
)
from kvlease_vllm.settings import ConnectorSettings
from kvlease_vllm.warming import Warming
from kvlease_vllm.worker import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class KvleaseConnector(NixlConnector):
    """vLLM's NIXL connector with leases: the holder's and the reader's half on either role.

    Raises:
        UnsupportedEngineError: this vLLM's connector API is not the one that was verified.
        InvalidArgument: `kv_connector_extra_config.kvlease` is wrong.
    """

    scheduler_half_class: type[SchedulerHalf] = SchedulerHalf

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        from vllm import __version__ as vllm_version
        from vllm.v1.core.block_pool import BlockPool

        check_connector(NixlConnector, BlockPool, vllm_version)
        check_alone(vllm_version)
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = self.kv_transfer_config
        if vllm_config.parallel_config.prefill_context_parallel_size == 1:
            # Both engines read and are read from: vLLM defers freeing blocks that a running step may still
            # write only for a consumer. It looks at the role after it has made the connector.
            transfer.kv_role = "kv_both"
        # A READ that fails ends in recompute, never in an error to the client.
        transfer.kv_load_failure_policy = "recompute"
        settings = ConnectorSettings.from_extra_config(transfer.kv_connector_extra_config)
        prefer_layers_together(transfer.kv_connector_extra_config, kv_cache_config)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        self._warming: Warming | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler_half = self.scheduler_half_class(
                vllm_config, self.engine_id, kv_cache_config, self.connector_scheduler, settings
            )
        else:
            check_worker(self.connector_worker, vllm_version)
            if getattr(self, "prefer_cross_layer_blocks", False) and vllm_config.use_v2_model_runner:
                worker = self.connector_worker
                pack_layers(
                    kv_cache_config, worker.backend_name, worker._physical_blocks_per_logical_kv_block
                )
            self._worker_half = WorkerHalf(self.connector_worker)
            self._warming = Warming(
                settings.socket_dir,
                self.engine_id,
                vllm_config.parallel_config.rank,
                self._worker_half.begin_handshake,
            )

    @property
    def _scheduling(self) -> SchedulerHalf:
        if self._scheduler_half is None:
            raise UnsupportedEngineError("vLLM asked the worker's connector a scheduler's question")
        return self._scheduler_half

    @property
    def _working(self) -> WorkerHalf:
        if self._worker_half is None:
            raise UnsupportedEngineError("vLLM asked the scheduler's connector a worker's question")
        return self._worker_half

    # --- scheduler ----------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Takes the block pool, on which holds are references."""
        super().bind_gpu_block_pool(gpu_block_pool)
        self._scheduling.bind(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        """Begins the turn's pin, so that it overlaps with queueing."""
        self._scheduling.on_new_request(request)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens of the verified prefix beyond those computed; None while the pin is asked for."""
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Hands the verified head of the lease to vLLM's reader."""
        if self._scheduling.before_load(request, blocks, num_external_tokens):
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> "KVConnectorMetadata":
        """vLLM's metadata of the step and our orders."""
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, NixlConnectorMetadata)
        return KvleaseMetadata.extend(metadata, self._scheduling.end_step(scheduler_output))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Settles READs that ended."""
        super().update_connector_output(connector_output)
        self._scheduling.on_output(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the turn's blocks by reference; vLLM frees the request as usual."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the turn's blocks by reference; vLLM frees the request as usual."""
        return False, self._scheduling.on_finished(request, block_ids)

    def has_pending_block_frees(self) -> bool:
        """Evicts a retained conversation rather than let vLLM preempt a live request."""
        return self._scheduling.has_pending_block_frees()

    def take_events(self) -> "Iterable[KVCacheEvent]":
        """Called after every step: ended leases give their blocks back."""
        self._scheduling.give_back()
        return super().take_events()

    def reset_cache(self) -> bool | None:
        """Loses every hold."""
        self._scheduling.lose_all()
        return super().reset_cache()

    # --- worker -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: "dict[str, torch.Tensor]") -> None:
        """Registers the memory, a tensor per layer; from here on the worker can shake hands."""
        super().register_kv_caches(kv_caches)
        self._begin_warming()

    def register_cross_layers_kv_cache(self, kv_cache: "torch.Tensor", attn_backend: type) -> None:
        """Registers the memory, one tensor for all layers (vLLM 0.26)."""
        super().register_cross_layers_kv_cache(kv_cache, attn_backend)
        self._begin_warming()

    def _begin_warming(self) -> None:
        if self._warming is not None and has_background_handshake(self.connector_worker):
            self._warming.start()

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Applies our orders, then lets vLLM post the READs."""
        with self._working.tables:
            self._working.before_load(self._connector_metadata)
            super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """vLLM 0.32's results of the step, with the READs that were given up or came too late as failed."""
        with self._working.tables:
            results = super().get_transfer_results(finished_req_ids)
        failed = set(self._working.take_failed())
        results.finished_recving.update(failed)
        results.failed_recving.update(failed)
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """vLLM 0.26's results of the step; the failed READs' blocks are reported as invalid."""
        with self._working.tables:
            sending, receiving = super().get_finished(finished_req_ids)
        failed = self._working.take_failed()
        self._invalid_block_ids = {block_id for block_ids in failed.values() for block_id in block_ids}
        return sending, receiving | set(failed)

    _invalid_block_ids: frozenset[int] | set[int] = frozenset()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that failed to load; where only blocks can be reported, those of given-up READs too."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, frozenset()
        return super().get_block_ids_with_load_errors() | invalid

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What ended in quarantine."""
        return self._working.report()

    def shutdown(self) -> None:
        """Leaves the sidecar, then lets vLLM shut its half down."""
        if (warming := getattr(self, "_warming", None)) is not None:
            warming.stop()
        if getattr(self, "_scheduler_half", None) is not None:
            self._scheduling.stop()
        super().shutdown()
