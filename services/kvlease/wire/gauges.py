"""A holder's gauges on the wire."""

from kvlease.core.records import HolderGauges
from kvlease.v1 import connector_pb2


def gauges_to_wire(gauges: HolderGauges, call_id: int = 0) -> connector_pb2.HolderGauges:
    """The message of an engine's gauges."""
    return connector_pb2.HolderGauges(
        call_id=call_id,
        held_blocks=gauges.held_blocks,
        reading_blocks=gauges.reading_blocks,
        quarantined_blocks=gauges.quarantined_blocks,
        free_blocks=gauges.free_blocks,
        total_blocks=gauges.total_blocks,
        running_requests=gauges.running_requests,
        counters=gauges.counters,
    )


def gauges_from_wire(message: connector_pb2.HolderGauges) -> HolderGauges:
    """The gauges of a message."""
    return HolderGauges(
        held_blocks=message.held_blocks,
        reading_blocks=message.reading_blocks,
        quarantined_blocks=message.quarantined_blocks,
        free_blocks=message.free_blocks,
        total_blocks=message.total_blocks,
        running_requests=message.running_requests,
        counters=dict(message.counters),
    )
