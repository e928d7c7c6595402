"""vLLM's real scheduler, block pool, requests and NIXL bookkeeping around the connector, without a model.

Tokens come from a counter, the NIXL agent's transfers end when a test says so, and the sidecar is a list of what
was sent to it. Metadata is pickled on its way to the ranks, as in an engine.
"""

import pickle
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import kvlease_vllm.scheduler as connector_scheduler
from kvlease.core.holding import Grant, Hold, HoldEvent, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, MissReason
from kvlease.core.records import BlockList, KvLocation, Pinned, PinOutcome
from kvlease.core.turn import KeepOrder, ReadOrder, TurnParams
from kvlease.dev.tiny_model import ensure_tiny_model
from kvlease.testing.clock import ManualClock
from kvlease_vllm.connector import KvleaseConnector
from kvlease_vllm.worker import WorkerHalf

BLOCK = 16
TENANT = "ab" * 16
REMOTE = Holder("remote-engine", "remote-boot")


class FakeSidecar:
    """Stands for `SidecarService`: what was sent waits here for the test."""

    def __init__(self, socket_dir: str, outbox_max: int, traces: object) -> None:
        self.asked: list[tuple[int, PinAsk]] = []
        self.unpinned: list[str] = []
        self.offers: list[Any] = []
        self.events: list[HoldEvent] = []
        self.has_room = True
        self.is_attached = True

    def start(self, *_: object) -> None: ...

    def stop(self) -> None: ...

    def send_offer(self, offer: Any) -> bool:
        self.offers.append(offer)
        return self.has_room

    def send_events(self, events: Sequence[HoldEvent]) -> None:
        self.events.extend(events)

    def send_pin(self, call_id: int, ask: PinAsk, order: ReadOrder) -> bool:
        if self.is_attached:
            self.asked.append((call_id, ask))
        return self.is_attached

    def send_unpin(self, order: ReadOrder) -> None:
        self.unpinned.append(order.pin_id)


class FakeNixl:
    """NIXL's agent: every handle is in progress until the test ends it."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}
        self.released: list[int] = []
        self.stuck: set[int] = set()
        self.notes: dict[str, list[bytes]] = {}

    def check_xfer_state(self, handle: int) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: int) -> None: ...

    def release_xfer_handle(self, handle: int) -> None:
        if handle in self.stuck:
            raise RuntimeError("still in use")
        self.released.append(handle)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notes, self.notes = self.notes, {}
        return notes

    def finish(self, state: str = "DONE") -> None:
        self.states = dict.fromkeys(self.states, state)


class NixlWorker(NixlPullConnectorWorker):
    """vLLM's worker with its own bookkeeping; only handshakes and descriptors are left out."""

    def __init__(self) -> None:
        import queue

        self.engine_id, self.tp_rank, self.pcp_rank, self.pcp_dcp_sharded = "local", 0, 0, True
        self.nixl_wrapper = FakeNixl()
        self.transfer_topo = SimpleNamespace(
            get_engine_info=lambda _: SimpleNamespace(
                remote_block_size=BLOCK, remote_physical_blocks_per_logical=1
            ),
            block_size_ratio=lambda _: 1,
        )
        self._physical_blocks_per_logical_kv_block = 1
        self._recving_metadata: dict[str, Any] = {}
        self._recving_transfers = defaultdict(list)
        self._recv_failures: set[str] = set()
        self._failed_remote_engines: set[str] = set()
        self._pending_recv_notifs: dict[str, Any] = {}
        self._ready_requests: queue.Queue[Any] = queue.Queue()
        self._failed_recv_reqs: queue.Queue[str] = queue.Queue()
        self._invalid_block_ids: queue.Queue[set[int]] = queue.Queue()
        self._remote_agents: dict[str, Any] = {REMOTE.engine_id: {(0, 0): "agent"}}
        self._reqs_to_process: set[str] = set()
        self._reqs_to_send: dict[str, float] = {}
        self._replicated_pcp_done_sending: set[str] = set()
        self._is_hma_required = self.use_host_buffer = self.enable_permute_local_kv = self.use_mla = False
        self.enable_heterogeneous_attn_post_process = False
        self.xfer_stats = SimpleNamespace(
            record_transfer=lambda *_: None,
            record_failed_transfer=lambda *_: None,
            record_notification_after_expiry=lambda *_: None,
        )
        self.posted: list[tuple[str, list[int], list[int]]] = []
        self.waits_for_handshake = False
        self.cleaned: list[str] = []

    def shutdown(self) -> None: ...

    def _logical_to_kernel_block_ids(self, block_ids: Any, _: int) -> Any:
        return block_ids

    def _send_heartbeats(self, metadata: Any) -> None: ...

    def _cleanup_remote_engines(self) -> None: ...

    def _cleanup_remote_engine(self, engine_id: str, *, log_eviction: bool = True) -> None:
        self.cleaned.append(engine_id)
        del self._remote_agents[engine_id]

    def _sync_device_after_direct_recv(self, done: Any) -> None: ...

    def _log_failure(self, **_: Any) -> None: ...

    def _read_blocks_for_req(self, req_id: str, meta: Any) -> None:
        if self.waits_for_handshake:
            return
        handle = len(self.nixl_wrapper.states) + 1
        self.nixl_wrapper.states[handle] = "PROC"
        self._recving_transfers[req_id].append(handle)
        self.posted.append((req_id, list(meta.local_block_ids[0]), list(meta.remote.block_ids[0])))


class Rank:
    """The worker's side of the connector on one rank."""

    def __init__(self, transfer_config: KVTransferConfig) -> None:
        self.worker = NixlWorker()
        self.connector = KvleaseConnector.__new__(KvleaseConnector)
        self.connector.kv_transfer_config = transfer_config
        self.connector.connector_worker = self.worker
        self.connector.connector_scheduler = None
        self.connector._scheduler_half = None
        self.connector._worker_half = WorkerHalf(self.worker)

    def step(self, metadata: bytes) -> KVConnectorOutput:
        self.connector.bind_connector_metadata(pickle.loads(metadata))
        self.connector.start_load_kv(None)  # type: ignore[arg-type]
        results = self.connector.get_transfer_results(set())
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )


@dataclass
class Harness:
    """One engine without a model."""

    scheduler: Scheduler
    sidecar: FakeSidecar
    clock: ManualClock
    ranks: list[Rank]
    aggregator: KVOutputAggregator
    reports: dict[str, Any] = field(default_factory=dict)
    in_flight: list[Any] = field(default_factory=list)

    @property
    def connector(self) -> KvleaseConnector:
        connector = self.scheduler.connector
        assert isinstance(connector, KvleaseConnector)
        return connector

    @property
    def half(self) -> Any:
        return self.connector._scheduler_half

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free(self) -> int:
        return int(self.pool.get_num_free_blocks())

    def hold(self, lease_id: int) -> Hold | None:
        found: Hold | None = self.half._holder._table.get(lease_id)
        return found

    def add(self, request: Request) -> Request:
        self.scheduler.add_request(request)
        return request

    def schedule(self) -> Any:
        output = self.scheduler.schedule()
        self.in_flight.append(output)
        return output

    def finish_step(self) -> None:
        """Runs the ranks for the oldest scheduled step, and hands their output to the scheduler."""
        output = self.in_flight.pop(0)
        metadata = pickle.dumps(output.kv_connector_metadata)
        req_ids = list(output.num_scheduled_tokens)
        sampled = []
        for req_id in req_ids:
            request = self.scheduler.requests.get(req_id)
            prompt_done = request is not None and request.num_computed_tokens >= request.num_tokens
            sampled.append([7 + request.num_tokens % 50] if prompt_done and request is not None else [])
        outputs: list[ModelRunnerOutput | None] = [
            ModelRunnerOutput(
                req_ids=req_ids,
                req_id_to_index={req_id: index for index, req_id in enumerate(req_ids)},
                sampled_token_ids=sampled,
                kv_connector_output=rank.step(metadata),
            )
            for rank in self.ranks
        ]
        combined = self.aggregator.aggregate(outputs)
        assert combined is not None
        for engine_outputs in self.scheduler.update_from_output(output, combined).values():
            for one in engine_outputs.outputs:
                if one.kv_transfer_params is not None:
                    self.reports[one.request_id] = one.kv_transfer_params["kvlease"]

    def step(self) -> None:
        self.schedule()
        self.finish_step()

    def run(self, steps: int = 60) -> None:
        for _ in range(steps):
            if not self.scheduler.requests:
                return
            self.step()
        raise AssertionError(f"requests are left: {list(self.scheduler.requests)}")

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def finish_reads(self, state: str = "DONE") -> None:
        for rank in self.ranks:
            rank.worker.nixl_wrapper.finish(state)

    def pinned(self, tokens: Sequence[int], first_block: int = 100, **changes: Any) -> Pinned:
        """A holder's answer: a lease of `tokens` in blocks from `first_block` on."""
        root = connector_scheduler.request_root(
            make_request("x", [1]), TENANT, self.half._root_model, self.half._settings.weights_version
        )
        chain = connector_scheduler.request_chain(make_request("x", list(tokens)), root, len(tokens), BLOCK)
        count = -(-len(tokens) // BLOCK)
        blocks = BlockList(
            tuple(range(first_block, first_block + count)), chain.digests, len(tokens), chain.tail
        )
        answer = {
            "holder": REMOTE,
            "tokens": len(tokens),
            "layout_hash": self.half._facts.layout.layout_hash,
            "blocks": blocks,
            "location": KvLocation("host", 1234),
        }
        return Pinned(**{**answer, **changes})

    def answer(self, outcome: PinOutcome | MissReason) -> None:
        """Answers the latest question for a pin."""
        self.half._reads.answer(self.sidecar.asked[-1][0], outcome)


def make_request(
    request_id: str,
    tokens: Sequence[int],
    params: TurnParams | None = None,
    max_tokens: int = 1,
    **changes: Any,
) -> Request:
    """A request with random-looking tokens given by the test."""
    extra = {"kv_transfer_params": {"kvlease": params.to_json()}} if params is not None else None
    raw, stop_ids = changes.pop("raw_params", None), changes.pop("stop_ids", None)
    if raw is not None:
        extra = {"kv_transfer_params": raw}
    sampling = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, extra_args=extra, stop_token_ids=stop_ids
    )
    sampling.update_from_generation_config({}, eos_token_id=999)
    return Request(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling_params=sampling,
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **changes,
    )


def keep(lease_id: int, supersedes: int = 0, duration_s: float = 6.0) -> KeepOrder:
    """An order to keep a CONVERSATION."""
    return KeepOrder(lease_id, LeaseKind.CONVERSATION, duration_s, "", b"key", (), supersedes)


def keep_transfer(lease_id: int, pin_id: str = "pin") -> KeepOrder:
    """An order to keep a TRANSFER."""
    return KeepOrder(lease_id, LeaseKind.TRANSFER, 30.0, pin_id)


def read(kind: LeaseKind = LeaseKind.CONVERSATION, pin_id: str = "pin") -> ReadOrder:
    """An order to READ the remote engine's lease."""
    return ReadOrder(77, pin_id, kind, REMOTE, "remote:1")


def turn(read_order: ReadOrder | None = None, keep_order: KeepOrder | None = None) -> TurnParams:
    """The orders of one leg."""
    return TurnParams(TENANT, read_order, keep_order)


def grant_of(harness: Harness, lease_id: int) -> Grant:
    """What a lease that must be held is made of."""
    hold = harness.hold(lease_id)
    assert hold is not None
    return hold.grant


def make_harness(
    monkeypatch: pytest.MonkeyPatch,
    blocks: int = 64,
    ranks: int = 1,
    batched_tokens: int = 2048,
    asynchronous: bool = False,
    watermark: float = 0.0,
    speculative_tokens: int = 0,
    **settings: Any,
) -> Harness:
    """A scheduler whose connector is ours, on `blocks` blocks of 16 tokens (one of them is vLLM's null block)."""
    clock = ManualClock()
    monkeypatch.setattr(connector_scheduler, "SidecarService", FakeSidecar)
    monkeypatch.setattr(connector_scheduler, "awake_s", clock.now_s)
    init_none_hash(sha256)
    config = make_config(ranks, batched_tokens, asynchronous, **settings)
    config.scheduler_config.watermark = watermark
    if speculative_tokens:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=speculative_tokens,
            prompt_lookup_max=4,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    scheduler_class = AsyncScheduler if asynchronous else Scheduler
    scheduler = scheduler_class(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )
    connector = scheduler.connector
    assert isinstance(connector, KvleaseConnector)
    half: Any = connector._scheduler_half
    half._holder._now_s = clock.now_s
    return Harness(
        scheduler,
        half._service,
        clock,
        [Rank(config.kv_transfer_config) for _ in range(ranks)],
        KVOutputAggregator(ranks),
    )


def make_config(
    ranks: int = 1, batched_tokens: int = 2048, asynchronous: bool = False, **settings: Any
) -> VllmConfig:
    """vLLM's configuration of an engine with our connector."""
    model: Path = ensure_tiny_model()
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=batched_tokens,
            max_model_len=2048,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=asynchronous,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvleaseConnector",
            kv_connector_module_path="kvlease_vllm.connector",
            kv_role="kv_producer",
            kv_connector_extra_config={
                "kvlease": {"socket_dir": "nowhere", "recompute_threshold_tokens": 1, **settings}
            },
        ),
    )
    config.cache_config.block_size = BLOCK
    config.parallel_config.world_size = ranks
    # vLLM switches it off where the executor cannot do it; there is no executor here.
    config.scheduler_config.async_scheduling = asynchronous
    return config
