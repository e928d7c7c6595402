"""Engines, and what a connector says of itself and its holds, on the wire."""

from collections.abc import Iterable, Mapping, Sequence

from kvlease.core.attachment import EngineFacts, LeaseOffer
from kvlease.core.errors import VersionMismatch
from kvlease.core.holding import HoldEvent
from kvlease.core.ids import Holder
from kvlease.core.lease import MissReason
from kvlease.core.records import Engine
from kvlease.v1 import connector_pb2, registry_pb2
from kvlease.wire.leases import (
    layout_from_wire,
    layout_to_wire,
    lease_from_wire,
    lease_to_wire,
    location_from_wire,
    location_to_wire,
)
from kvlease.wire.values import (
    duration_from_wire,
    duration_to_wire,
    holder_from_wire,
    holder_to_wire,
    lease_id_from_wire,
    miss_from_wire,
    miss_to_wire,
    role_from_wire,
    role_to_wire,
    state_from_wire,
    state_to_wire,
)

PROTOCOL_VERSION = 1
"""Version of what connectors and sidecars say to each other; both sides must speak the same."""


def engine_to_wire(engine: Engine) -> registry_pb2.Engine:
    """The message of a registered engine."""
    return registry_pb2.Engine(
        holder=holder_to_wire(engine.holder),
        role=role_to_wire(engine.role),
        model=engine.model,
        url=engine.url,
        sidecar_address=engine.sidecar_address,
        layout=layout_to_wire(engine.layout),
        vllm_version=engine.vllm_version,
        data_parallel_rank=engine.data_parallel_rank,
        total_blocks=engine.total_blocks,
        prefix_caching=engine.prefix_caching,
        retain=engine.retain,
        retain_refusal=engine.retain_refusal,
        draining=engine.draining,
        location=location_to_wire(engine.location) if engine.location is not None else None,
        details=engine.details,
    )


def engine_from_wire(message: registry_pb2.Engine) -> Engine:
    """The engine of a message.

    Raises:
        InvalidArgument: holder, role or layout are missing or unknown.
    """
    return Engine(
        holder=holder_from_wire(message.holder),
        role=role_from_wire(message.role),
        model=message.model,
        url=message.url,
        sidecar_address=message.sidecar_address,
        layout=layout_from_wire(message.layout),
        vllm_version=message.vllm_version,
        data_parallel_rank=message.data_parallel_rank,
        total_blocks=message.total_blocks,
        prefix_caching=message.prefix_caching,
        retain=message.retain,
        retain_refusal=message.retain_refusal,
        draining=message.draining,
        location=location_from_wire(message.location) if message.HasField("location") else None,
        details=dict(message.details),
    )


def offer_to_wire(offer: LeaseOffer) -> connector_pb2.LeaseOffer:
    """The message of a hold that a connector offers."""
    return connector_pb2.LeaseOffer(
        lease=lease_to_wire(offer.record),
        remaining=duration_to_wire(offer.remaining_s),
        provisional=offer.provisional,
        supersedes=offer.supersedes,
        pin_ids=offer.pin_ids,
    )


def offer_from_wire(message: connector_pb2.LeaseOffer) -> LeaseOffer:
    """The hold that a connector offers.

    Raises:
        InvalidArgument: a part of its lease is missing or unknown.
    """
    return LeaseOffer(
        record=lease_from_wire(message.lease),
        remaining_s=duration_from_wire(message.remaining),
        provisional=message.provisional,
        supersedes=message.supersedes,
        pin_ids=tuple(message.pin_ids),
    )


def hello_to_wire(facts: EngineFacts, holds: Iterable[LeaseOffer]) -> connector_pb2.ConnectorHello:
    """What a connector says first: who the engine is, and all that it holds."""
    return connector_pb2.ConnectorHello(
        protocol_version=PROTOCOL_VERSION,
        holder=holder_to_wire(facts.holder),
        vllm_version=facts.vllm_version,
        model=facts.model,
        layout=layout_to_wire(facts.layout),
        location=location_to_wire(facts.location),
        data_parallel_rank=facts.data_parallel_rank,
        total_blocks=facts.total_blocks,
        prefix_caching=facts.prefix_caching,
        retain=facts.retain,
        retain_refusal=facts.retain_refusal,
        holds=[offer_to_wire(hold) for hold in holds],
        details=facts.details,
    )


def hello_from_wire(message: connector_pb2.ConnectorHello) -> tuple[EngineFacts, tuple[LeaseOffer, ...]]:
    """Who attaches, and what it holds.

    Raises:
        VersionMismatch: the connector speaks another version of the protocol.
        InvalidArgument: a part is missing or unknown.
    """
    if message.protocol_version != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the connector speaks protocol version {message.protocol_version}, "
            f"the sidecar version {PROTOCOL_VERSION}"
        )
    facts = EngineFacts(
        holder=holder_from_wire(message.holder),
        model=message.model,
        layout=layout_from_wire(message.layout),
        location=location_from_wire(message.location),
        vllm_version=message.vllm_version,
        data_parallel_rank=message.data_parallel_rank,
        total_blocks=message.total_blocks,
        prefix_caching=message.prefix_caching,
        retain=message.retain,
        retain_refusal=message.retain_refusal,
        details=dict(message.details),
    )
    return facts, tuple(offer_from_wire(hold) for hold in message.holds)


def events_to_wire(holder: Holder, events: Iterable[HoldEvent]) -> connector_pb2.LeaseEvents:
    """The message of what happened to an engine's holds; `holder` is the table's at that moment."""
    return connector_pb2.LeaseEvents(
        holder=holder_to_wire(holder),
        events=[
            connector_pb2.LeaseEvents.Event(
                lease_id=event.lease_id, state=state_to_wire(event.state), confirmed=event.confirmed
            )
            for event in events
        ],
    )


def events_from_wire(message: connector_pb2.LeaseEvents) -> tuple[Holder, list[HoldEvent]]:
    """What happened to an engine's holds, in order.

    Raises:
        InvalidArgument: the holder or a state is missing or unknown.
    """
    events = [
        HoldEvent(lease_id_from_wire(event.lease_id), state_from_wire(event.state), event.confirmed)
        for event in message.events
    ]
    return holder_from_wire(message.holder), events


def misses_to_wire(misses: Mapping[int, MissReason]) -> list[connector_pb2.LeaseMiss]:
    """The messages of the leases that could not be renewed."""
    return [
        connector_pb2.LeaseMiss(lease_id=lease_id, reason=miss_to_wire(miss))
        for lease_id, miss in misses.items()
    ]


def misses_from_wire(messages: Sequence[connector_pb2.LeaseMiss]) -> dict[int, MissReason]:
    """The leases that could not be renewed. One that is listed without a reason is UNKNOWN."""
    return {message.lease_id: miss_from_wire(message.reason) or MissReason.UNKNOWN for message in messages}
