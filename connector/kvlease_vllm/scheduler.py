"""The scheduler half: what the connector does on vLLM's scheduler thread.

It never blocks: pins are asked for through the sidecar and answered on the link's thread; blocks are kept by
reference, so that a finished request is freed as usual and an idle engine is not stepped.
"""

import logging
import math
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlease.core import details
from kvlease.core.digests import BlockChain, verified_tokens
from kvlease.core.errors import InvalidArgument
from kvlease.core.holding import Grant, HoldEvent, HoldLimits
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, LeaseKind
from kvlease.core.records import BlockList
from kvlease.core.turn import PARAMS_KEY, KeepOrder, TurnParams, TurnReport
from kvlease_vllm.chain import can_verify, request_chain, request_root
from kvlease_vllm.engine_facts import describe_engine
from kvlease_vllm.fabric import fabric_handles
from kvlease_vllm.holder import BlockHolder
from kvlease_vllm.metadata import GivenUp, KvleaseWorkerMetadata, WorkerOrders
from kvlease_vllm.notifications import PIN_PREFIX
from kvlease_vllm.quarantine import Quarantine
from kvlease_vllm.reader import Read, Reads, Stage
from kvlease_vllm.room import make_room
from kvlease_vllm.service import SidecarService
from kvlease_vllm.settings import ConnectorSettings
from kvlease_vllm.tracing import RequestTraces, note_verified

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvlease.scheduler")


FIRST_EPOCH = 1
"""Epoch of a fresh engine: 0 would mean "whichever" in a question, and outlive the first reset."""


def awake_s() -> float:
    """Seconds that also pass while the machine sleeps: a fence must not outlast the holder's pin."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class Turn:
    """One leg of a turn in this engine.

    Attributes:
        local_tokens: prompt tokens that the engine's own prefix cache held.
        chain: digests of the prompt, once they were needed.
    """

    request: "Request"
    params: TurnParams
    local_tokens: int = 0
    chain: BlockChain | None = None
    outcome: str = "none"
    verified_tokens: int = 0
    read_tokens: int = 0
    read_s: float = 0.0


class SchedulerHalf:
    """Holder and reader on the scheduler's thread; one per EngineCore."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        engine_id: str,
        kv_cache_config: "KVCacheConfig",
        nixl_scheduler: Any,
        settings: ConnectorSettings,
    ) -> None:
        self._settings = settings
        self._ranks = vllm_config.parallel_config.world_size
        self._block_size: int = vllm_config.cache_config.block_size
        self._facts = describe_engine(
            vllm_config,
            kv_cache_config,
            nixl_scheduler,
            Holder(engine_id, uuid.uuid4().hex, FIRST_EPOCH),
            settings,
        )
        self._uses_libfabric = "LIBFABRIC" in self._facts.details[details.NIXL_BACKENDS].split(",")
        self._traces = RequestTraces()
        self._service = SidecarService(settings.socket_dir, settings.outbox_max, self._traces)
        self._reads = Reads(
            ask_pin=self._service.send_pin,
            send_unpin=self._service.send_unpin,
            read_part_s=settings.read_part_s,
            first_read_part_s=settings.first_read_part_s,
            pin_wait_s=settings.pin_wait_s,
            now_s=awake_s,
        )
        self._room = make_room(vllm_config, kv_cache_config.num_blocks)
        self._root_model = f"{vllm_config.model_config.model}@{vllm_config.model_config.revision}"
        self._turns: dict[str, Turn] = {}
        self._orders = WorkerOrders()
        self._refused_params = 0
        self._scheduled: dict[str, int] = {}
        self._holder: BlockHolder
        self._quarantine: Quarantine
        if self._facts.retain_refusal:
            logger.warning("kvlease neither retains nor reads here: %s", self._facts.retain_refusal)

    def bind(self, pool: "BlockPool") -> None:
        """Takes vLLM's block pool and begins to attach to the sidecar."""
        if self._facts.details[details.DEVICE] != "cpu":
            sys.setswitchinterval(self._settings.switch_interval_s)
        total = pool.num_gpu_blocks
        budget = int(total * self._settings.retention_budget)
        limits = HoldLimits(
            reading_blocks_max=int(total * self._settings.reading_cap),
            lifetime_max_s=self._settings.lifetime_max_s,
            tenant_leases_max=self._settings.tenant_leases_max,
            tenant_blocks_max=int(budget * self._settings.tenant_share),
        )
        self._holder = BlockHolder(
            self._facts.holder, pool, limits, budget, self._on_events, before_reset=self._reads.lose
        )
        self._quarantine = Quarantine(pool, self._ranks)
        self._service.start(self._facts, self._holder, self._reads, self.counters)

    def stop(self) -> None:
        """Leaves the sidecar."""
        self._service.stop()

    def counters(self) -> Counter[str]:
        """What happened so far, by name, with the gauges that only this half knows."""
        counters = Counter(self._reads.counters)
        counters["bytes_read"] = counters.pop("read_blocks", 0) * self._facts.layout.block_bytes
        counters["evictions"] = self._holder.evictions
        for cause, evictions in self._holder.evictions_by_cause.items():
            counters[f"evictions_{cause.value}"] = evictions
        counters["refused_params"] = self._refused_params
        counters["quarantined_blocks"] = self._quarantine.blocks
        counters["running_requests"] = len(self._scheduled)
        if self._uses_libfabric:
            counters[details.FABRIC_HANDLES] = fabric_handles()
        return counters

    # --- requests come and go -----------------------------------------------------------------------

    def on_new_request(self, request: "Request") -> None:
        """Reads our orders, removes everything else from the request's parameters, and asks for the pin."""
        self._holder.give_back()
        params = self._take_params(request)
        self._room.arrived(request)
        if params is None:
            return
        self._turns[request.request_id] = Turn(request, params)
        if params.read is not None and self._facts.retain and can_verify(request):
            self._traces.begin(getattr(request, "trace_headers", None), params.read)
            self._reads.begin(request.request_id, params.read, params.tenant)

    def on_finished(self, request: "Request", block_ids: Sequence[Sequence[int]]) -> dict[str, Any] | None:
        """Grants the lease that the turn asked for; returns the report for the engine's response."""
        request_id = request.request_id
        self._room.gone(request_id)
        read = self._reads.forget(request_id)
        turn = self._turns.pop(request_id, None)
        if turn is None:
            return None
        if turn.params.read is not None:
            self._traces.forget(turn.params.read.pin_id)
        if read is not None:
            self._note_outcome(turn, read)
        kept_tokens = self._keep(request, turn, block_ids)
        report = TurnReport(
            prompt_tokens=request.num_prompt_tokens,
            local_tokens=turn.local_tokens,
            read_tokens=turn.read_tokens,
            verified_tokens=turn.verified_tokens,
            outcome=turn.outcome,
            kept_tokens=kept_tokens,
            read_s=turn.read_s,
        )
        return {PARAMS_KEY: report.to_json()}

    # --- before the model runs ----------------------------------------------------------------------

    def matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to READ beyond those computed, or None for "later". At most one READ per request."""
        self._holder.make_free(self._room.to_admit(request, num_computed_tokens) + len(self._scheduled))
        read = self._reads.get(request.request_id)
        turn = self._turns.get(request.request_id)
        if turn is not None and not request.num_preemptions and not turn.read_tokens:
            turn.local_tokens = num_computed_tokens
        if read is None or turn is None or read.stage in (Stage.POSTED, Stage.SETTLED):
            return 0, False
        if getattr(request, "skip_reading_prefix_cache", False):
            self._reads.settle(read, "skipped")
            return 0, False
        if self._reads.is_waiting(read):
            self._prompt_chain(turn)  # While the answer is on its way.
            return None, False
        if read.stage is not Stage.PINNED or not self._has_our_layout(read):
            return 0, False
        tokens = self._usable_tokens(turn, read) - num_computed_tokens
        if tokens < max(1, self._settings.recompute_threshold_tokens):
            self._reads.settle(read, self._why_not(turn, read, tokens))
            return 0, False
        return tokens, True

    def before_load(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> bool:
        """Fills vLLM's parameters with the verified head of the lease. False when nothing is to be loaded."""
        self._room.admitted(request)
        read = self._reads.get(request.request_id)
        if read is None or read.stage is Stage.POSTED:
            return False
        if num_external_tokens <= 0:
            # Admitted without a READ, whatever the reason: there will be none any more.
            self._reads.settle(read, "unused")
            return False
        local = tuple(blocks.get_unhashed_block_ids_all_groups()[0])
        posted = self._reads.post(read, local, num_external_tokens)
        pinned = read.pinned
        head = self._blocks_of(min(read.verified_tokens, request.num_prompt_tokens))
        computed = (read.verified_tokens - num_external_tokens) // self._block_size
        # A block more (to speculate into) or less, and each would get the KV of another one's tokens.
        usable = posted and len(local) == head - computed
        if not usable or pinned is None or pinned.blocks is None or pinned.location is None:
            read.failed = True
            self._orders.refused.append(GivenUp(request.request_id, read.attempt_id, local))
            return False
        source = pinned.blocks.block_ids[head - len(local) : head]
        location = pinned.location
        request.kv_transfer_params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": (list(source),),
            "remote_engine_id": pinned.holder.engine_id,
            "remote_request_id": PIN_PREFIX + read.order.pin_id,
            "remote_host": location.side_channel_host,
            "remote_port": location.side_channel_port,
            "tp_size": location.tensor_parallel_size,
            "pp_size": location.pipeline_parallel_size,
            **location.extra,
        }
        self._orders.boot_ids[pinned.holder.engine_id] = pinned.holder.boot_id
        block_bytes = self._facts.layout.block_bytes
        self._traces.posted(request.request_id, read.order.pin_id, len(local), block_bytes)
        return True

    def end_step(self, scheduler_output: "SchedulerOutput") -> WorkerOrders:
        """Gives up overdue READs, makes room for the next step, and returns this step's orders."""
        for read in self._reads.overdue():
            self._quarantine.keep(read.attempt_id, read.block_ids)
            self._orders.given_up.append(GivenUp(read.request_id, read.attempt_id, read.block_ids))
        self._scheduled = scheduler_output.num_scheduled_tokens
        self._holder.make_free(self._room.needed(self._scheduled))
        orders, self._orders = self._orders, WorkerOrders()
        return orders

    def has_pending_block_frees(self) -> bool:
        """vLLM lacks a block for a running request: evict rather than let it preempt."""
        return self._holder.gain(len(self._scheduled) + 1)

    # --- after the model ran ------------------------------------------------------------------------

    def on_output(self, output: "KVConnectorOutput") -> None:
        """Accepts READs that were seen done before their fence; the others are reported failed."""
        self._note_failures(output)
        report = output.kv_connector_worker_meta
        if isinstance(report, KvleaseWorkerMetadata):
            self._quarantine.ended(report.ended)
        for request_id in list(output.finished_recving or ()):
            read = self._reads.get(request_id)
            if read is not None and output.finished_recving is not None and not self._end_read(read):
                # vLLM must not use what came too late: every rank reports it failed in the next step.
                output.finished_recving.discard(request_id)
        self._holder.give_back()

    def give_back(self) -> None:
        """Returns the blocks of ended leases; safe to call at any time on this thread."""
        self._holder.give_back()

    def lose_all(self) -> None:
        """Loses every hold: the caches are being cleared."""
        self._holder.lose_all()

    # --- inside -------------------------------------------------------------------------------------

    def _take_params(self, request: "Request") -> TurnParams | None:
        """Our orders. vLLM's own keys are removed: from outside they could name any block, or kill the engine."""
        raw, request.kv_transfer_params = request.kv_transfer_params, None
        if not isinstance(raw, dict) or PARAMS_KEY not in raw:
            return None
        try:
            return TurnParams.from_json(raw[PARAMS_KEY])
        except InvalidArgument as error:
            self._refused_params += 1
            logger.warning("request %s has wrong kvlease parameters: %s", request.request_id, error)
            return None

    def _blocks_of(self, tokens: int) -> int:
        return math.ceil(tokens / self._block_size)

    def _chain_of(self, turn: Turn, tokens: int) -> BlockChain:
        root = request_root(
            turn.request, turn.params.tenant, self._root_model, self._settings.weights_version
        )
        known = turn.chain.digests if turn.chain is not None else b""
        return request_chain(turn.request, root, tokens, self._block_size, known)

    def _prompt_chain(self, turn: Turn) -> BlockChain:
        if turn.chain is None:
            turn.chain = self._chain_of(turn, turn.request.num_prompt_tokens)
        return turn.chain

    def verified(self, held: BlockChain, prompt: BlockChain) -> int:
        """Tokens at the head of the lease that belong to the prompt."""
        return verified_tokens(held, prompt)

    def _usable_tokens(self, turn: Turn, read: Read) -> int:
        """Verified tokens that may be READ: of a conversation, whole blocks that leave a token to compute."""
        blocks = read.pinned.blocks if read.pinned is not None else None
        if blocks is None:
            return 0
        if read.verified_tokens < 0:
            with self._traces.verifying(read.order.pin_id) as span:
                self._verify(turn, read, blocks)
                note_verified(span, read.verified_tokens)
        return read.verified_tokens

    def _verify(self, turn: Turn, read: Read, blocks: BlockList) -> None:
        """Compares the lease's digests with the prompt's."""
        prompt_tokens = turn.request.num_prompt_tokens
        prompt = self._prompt_chain(turn)
        held = BlockChain(self._block_size, blocks.digests, blocks.tokens, blocks.tail_digest)
        verified = self.verified(held, prompt)
        if read.order.kind is LeaseKind.CONVERSATION:
            whole = (prompt_tokens - 1) // self._block_size * self._block_size
            verified = min(verified, whole)
        self._reads.verify(read, held, prompt, verified)

    def _has_our_layout(self, read: Read) -> bool:
        """Whether the holder's KV lies as ours does; settles the READ when it does not."""
        if read.pinned is not None and read.pinned.layout_hash == self._facts.layout.layout_hash:
            return True
        self._reads.count("layout_mismatches")
        self._reads.settle(read, "mismatch")
        return False

    def _why_not(self, turn: Turn, read: Read, tokens: int) -> str:
        if tokens > 0:
            return "below_threshold"
        return "local" if read.verified_tokens else "mismatch"

    def _note_failures(self, output: "KVConnectorOutput") -> None:
        failed_requests = getattr(output, "failed_recving", None) or ()
        for read in self._reads.posted():
            if read.request_id in failed_requests or not output.invalid_block_ids.isdisjoint(read.block_ids):
                read.failed = True

    def _end_read(self, read: Read) -> bool:
        """Settles a READ that vLLM reports as ended. False when it must be reported as failed first."""
        turn = self._turns.get(read.request_id)
        if self._reads.accept(read):
            self._reads.settle(read, "read")
        elif read.failed or turn is None:
            self._reads.settle(read, "fence" if read.given_up else "failed")
            if turn is not None:
                # Nothing of it counts, also where vLLM would keep the blocks below the first failed one.
                turn.request.num_computed_tokens = 0
        else:
            read.failed = read.given_up = True
            self._orders.refused.append(GivenUp(read.request_id, read.attempt_id, read.block_ids))
            return False
        if turn is not None:
            self._note_outcome(turn, read)
        self._traces.ended(read.request_id, read.outcome, read.read_tokens)
        self._reads.drop(read)
        return True

    def _note_outcome(self, turn: Turn, read: Read) -> None:
        turn.outcome = read.outcome or turn.outcome
        turn.verified_tokens = max(0, read.verified_tokens)
        turn.read_tokens = read.read_tokens if read.outcome == "read" else 0
        turn.read_s = read.read_s if read.outcome == "read" else 0.0

    def _keep(self, request: "Request", turn: Turn, block_ids: Sequence[Sequence[int]]) -> int:
        """Grants the lease that the turn asked for. Its tokens, 0 when nothing is kept."""
        keep = turn.params.keep
        if keep is None or not self._facts.retain or not can_verify(request) or not _may_keep(request, keep):
            return 0
        tokens = self._kept_tokens(request, keep)
        blocks = tuple(block_ids[0][: self._blocks_of(tokens)])
        if not tokens or len(blocks) < self._blocks_of(tokens):
            return 0
        chain = self._chain_of(turn, tokens)
        grant = Grant(
            lease_id=keep.lease_id,
            kind=keep.kind,
            block_ids=blocks,
            digests=self.retained_digests(chain),
            tokens=tokens,
            block_size=self._block_size,
            tail_digest=chain.tail,
            tenant=turn.params.tenant,
            conversation_key=keep.conversation_key,
            chain_keys=keep.chain_keys,
            supersedes=keep.supersedes,
            model=self._facts.model,
            lora=request.lora_request.lora_name if request.lora_request is not None else "",
        )
        # The choices of one completion ask for one lease: the report of the last one stands for all.
        return tokens if self._grant(grant, keep) else self._holder.kept_tokens(keep.lease_id)

    def retained_digests(self, chain: BlockChain) -> bytes:
        """The digests that the holder keeps."""
        return chain.digests

    def _kept_tokens(self, request: "Request", keep: KeepOrder) -> int:
        # What a step in flight computes is not written yet, and a READ does not wait for it.
        computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        if keep.kind is LeaseKind.TRANSFER:
            return min(computed, request.num_prompt_tokens)
        # The last sampled token has no KV, and an in-flight step may still write into its block.
        return min(computed, request.num_tokens - 1) // self._block_size * self._block_size

    def _grant(self, grant: Grant, keep: KeepOrder) -> bool:
        if keep.kind is LeaseKind.TRANSFER:
            return self._holder.grant_transfer(grant, keep.pin_id, keep.duration_s)
        if not self._holder.grant(grant, keep.duration_s):
            return False
        offer = self._holder.offer(grant.lease_id, self._facts.layout)
        if offer is None:
            return False
        if not self._service.send_offer(offer):
            logger.warning("outbox full: the hold of a finished turn is given back")
            self._holder.end(grant.lease_id, LeaseEvent.EVICT)
            self._holder.give_back()
            return False
        return True

    def _on_events(self, events: Sequence[HoldEvent]) -> None:
        self._service.send_events(events)


def _may_keep(request: "Request", keep: KeepOrder) -> bool:
    """Whether the way a request ended leaves KV worth keeping.

    A stop string reaches the engine as an abort, so a decode leg that was aborted after its first token is
    kept provisionally: only a router that saw the turn end well confirms it.
    """
    from vllm.v1.request import RequestStatus

    if request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED):
        return True
    aborted = request.status == RequestStatus.FINISHED_ABORTED and request.num_output_tokens > 0
    return aborted and keep.kind is LeaseKind.CONVERSATION
