"""Engines, leases and turns as rows: the keys are those of `--output json`."""

from kvlease.core.ids import lease_id_to_hex
from kvlease.core.records import Engine, HolderGauges, LeaseRecord
from kvlease.operator.command import Row


def engine_row(engine: Engine, gauges: HolderGauges | None = None) -> Row:
    """An engine; its blocks are null when its connector could not be asked."""
    return {
        "engine_id": engine.holder.engine_id,
        "boot_id": engine.holder.boot_id,
        "epoch": engine.holder.epoch,
        "role": engine.role.value,
        "state": engine_state(engine, answers=gauges is not None),
        "model": engine.model,
        "url": engine.url,
        "sidecar_address": engine.sidecar_address,
        "vllm_version": engine.vllm_version,
        "layout_hash": engine.layout.layout_hash,
        "block_size": engine.layout.block_size,
        "data_parallel_rank": engine.data_parallel_rank,
        "retain": engine.retain,
        "retain_refusal": engine.retain_refusal,
        "prefix_caching": engine.prefix_caching,
        "held_blocks": gauges.held_blocks if gauges else None,
        "reading_blocks": gauges.reading_blocks if gauges else None,
        "quarantined_blocks": gauges.quarantined_blocks if gauges else None,
        "free_blocks": gauges.free_blocks if gauges else None,
        "total_blocks": engine.total_blocks,
        "running_requests": gauges.running_requests if gauges else None,
        "counters": dict(sorted(gauges.counters.items())) if gauges else None,
    }


def engine_state(engine: Engine, *, answers: bool) -> str:
    """What an engine is good for at the moment."""
    if not answers:
        return "silent"
    if engine.draining:
        return "draining"
    return "ready" if engine.retain else "no leases"


def lease_row(record: LeaseRecord) -> Row:
    """A recorded lease."""
    return {
        "lease_id": lease_id_to_hex(record.lease_id),
        "kind": record.kind.value,
        "state": record.state.value,
        "engine_id": record.holder.engine_id,
        "epoch": record.holder.epoch,
        "tenant": record.tenant,
        "tokens": record.tokens,
        "exclusive_bytes": record.exclusive_bytes,
        "model": record.model,
        "lora": record.lora,
        "layout_hash": record.layout_hash,
        "generation": record.generation,
        "conversation_key": record.conversation_key.hex(),
    }
