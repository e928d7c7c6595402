"""Leases, their blocks and pins on the wire."""

from kvlease.core.digests import DIGEST_BYTES
from kvlease.core.errors import InvalidArgument
from kvlease.core.holding import PinAsk
from kvlease.core.records import BlockList, KvLayout, KvLocation, LeaseRecord, Pinned, PinOutcome
from kvlease.v1 import lease_pb2
from kvlease.wire.values import (
    duration_from_wire,
    duration_to_wire,
    holder_from_wire,
    holder_to_wire,
    kind_from_wire,
    kind_to_wire,
    lease_id_from_wire,
    miss_from_wire,
    miss_to_wire,
    state_from_wire,
    state_to_wire,
    text_from_wire,
)


def layout_to_wire(layout: KvLayout) -> lease_pb2.KvLayout:
    """The message of a layout."""
    return lease_pb2.KvLayout(
        block_size=layout.block_size,
        dtype=layout.dtype,
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        block_bytes=layout.block_bytes,
        layout_hash=layout.layout_hash,
    )


def layout_from_wire(message: lease_pb2.KvLayout) -> KvLayout:
    """The layout of a message.

    Raises:
        InvalidArgument: a block of no tokens.
    """
    if message.block_size == 0:
        raise InvalidArgument("block_size must be at least 1 token")
    return KvLayout(
        block_size=message.block_size,
        dtype=message.dtype,
        tensor_parallel_size=message.tensor_parallel_size,
        pipeline_parallel_size=message.pipeline_parallel_size,
        block_bytes=message.block_bytes,
        layout_hash=message.layout_hash,
    )


def location_to_wire(location: KvLocation) -> lease_pb2.KvLocation:
    """The message of a location, `extra` verbatim."""
    return lease_pb2.KvLocation(
        side_channel_host=location.side_channel_host,
        side_channel_port=location.side_channel_port,
        tensor_parallel_size=location.tensor_parallel_size,
        pipeline_parallel_size=location.pipeline_parallel_size,
        extra=location.extra,
    )


def location_from_wire(message: lease_pb2.KvLocation) -> KvLocation:
    """The location of a message, `extra` verbatim."""
    return KvLocation(
        side_channel_host=message.side_channel_host,
        side_channel_port=message.side_channel_port,
        tensor_parallel_size=message.tensor_parallel_size,
        pipeline_parallel_size=message.pipeline_parallel_size,
        extra=dict(message.extra),
    )


def blocks_to_wire(blocks: BlockList) -> lease_pb2.BlockList:
    """The message of a lease's blocks."""
    return lease_pb2.BlockList(
        block_ids=blocks.block_ids,
        digests=blocks.digests,
        tokens=blocks.tokens,
        tail_digest=blocks.tail_digest,
    )


def blocks_from_wire(message: lease_pb2.BlockList) -> BlockList:
    """The blocks of a message.

    Raises:
        InvalidArgument: the digests do not fit the blocks, so nothing could be verified.
    """
    full_blocks, rest = divmod(len(message.digests), DIGEST_BYTES)
    partial = 1 if message.tail_digest else 0
    if rest or full_blocks + partial != len(message.block_ids):
        raise InvalidArgument(
            f"{len(message.digests)} bytes of digests do not fit {len(message.block_ids)} blocks, "
            f"{partial} of them partial"
        )
    if partial and len(message.tail_digest) != DIGEST_BYTES:
        raise InvalidArgument(f"the digest of a partial block has {DIGEST_BYTES} bytes")
    return BlockList(tuple(message.block_ids), message.digests, message.tokens, message.tail_digest)


def lease_to_wire(record: LeaseRecord) -> lease_pb2.Lease:
    """The message of a lease record."""
    return lease_pb2.Lease(
        lease_id=record.lease_id,
        kind=kind_to_wire(record.kind),
        state=state_to_wire(record.state),
        generation=record.generation,
        holder=holder_to_wire(record.holder),
        tenant=record.tenant,
        conversation_key=record.conversation_key,
        tokens=record.tokens,
        exclusive_bytes=record.exclusive_bytes,
        model=record.model,
        lora=record.lora,
        layout_hash=record.layout_hash,
        chain_keys=record.chain_keys,
    )


def lease_from_wire(message: lease_pb2.Lease) -> LeaseRecord:
    """The lease record of a message.

    Raises:
        InvalidArgument: id, kind, state or holder are missing or unknown.
    """
    return LeaseRecord(
        lease_id=lease_id_from_wire(message.lease_id),
        kind=kind_from_wire(message.kind),
        state=state_from_wire(message.state),
        generation=message.generation,
        holder=holder_from_wire(message.holder),
        tenant=message.tenant,
        conversation_key=message.conversation_key,
        tokens=message.tokens,
        exclusive_bytes=message.exclusive_bytes,
        model=message.model,
        lora=message.lora,
        layout_hash=message.layout_hash,
        chain_keys=tuple(message.chain_keys),
    )


def pin_to_wire(ask: PinAsk, wait_for_offer_s: float = 0.0) -> lease_pb2.PinRequestSpec:
    """The message of a question for a pin; `wait_for_offer_s` is how long an unknown lease is waited for."""
    message = lease_pb2.PinRequestSpec(
        lease_id=ask.lease_id,
        pin_id=ask.pin_id,
        holder=holder_to_wire(ask.holder),
        tenant=ask.tenant,
    )
    if ask.reservation_s > 0:
        message.reservation.CopyFrom(duration_to_wire(ask.reservation_s))
    if ask.read_part_s > 0:
        message.read_part.CopyFrom(duration_to_wire(ask.read_part_s))
    if wait_for_offer_s > 0:
        message.wait_for_offer.CopyFrom(duration_to_wire(wait_for_offer_s))
    return message


def pin_from_wire(message: lease_pb2.PinRequestSpec) -> tuple[PinAsk, float]:
    """The question of a message, and the seconds that an unknown lease is waited for.

    Raises:
        InvalidArgument: ids are missing, or both parts of the pin are.
    """
    ask = PinAsk(
        lease_id=lease_id_from_wire(message.lease_id),
        pin_id=text_from_wire(message.pin_id, "pin_id"),
        holder=holder_from_wire(message.holder),
        tenant=message.tenant,
        reservation_s=duration_from_wire(message.reservation),
        read_part_s=duration_from_wire(message.read_part),
    )
    if ask.reservation_s <= 0 and ask.read_part_s <= 0:
        raise InvalidArgument("a pin needs a reservation or a read part longer than 0 s")
    return ask, duration_from_wire(message.wait_for_offer)


def outcome_to_wire(outcome: PinOutcome) -> lease_pb2.PinResult:
    """The message of a pin's outcome."""
    if not isinstance(outcome, Pinned):
        return lease_pb2.PinResult(miss=miss_to_wire(outcome))
    return lease_pb2.PinResult(
        holder=holder_to_wire(outcome.holder),
        tokens=outcome.tokens,
        layout_hash=outcome.layout_hash,
        blocks=None if outcome.blocks is None else blocks_to_wire(outcome.blocks),
        location=None if outcome.location is None else location_to_wire(outcome.location),
    )


def outcome_from_wire(message: lease_pb2.PinResult) -> PinOutcome:
    """The outcome of a pin.

    Raises:
        InvalidArgument: it names neither a miss nor the holder that acked.
    """
    miss = miss_from_wire(message.miss)
    if miss is not None:
        return miss
    return Pinned(
        holder=holder_from_wire(message.holder),
        tokens=message.tokens,
        layout_hash=message.layout_hash,
        blocks=blocks_from_wire(message.blocks) if message.HasField("blocks") else None,
        location=location_from_wire(message.location) if message.HasField("location") else None,
    )
