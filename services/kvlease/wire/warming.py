"""Handshakes that are done before a turn needs them, on the wire."""

from kvlease.core.attachment import HandshakeOutcome, HandshakeReport, Peer
from kvlease.core.errors import InvalidArgument
from kvlease.v1 import connector_pb2
from kvlease.wire.leases import location_from_wire, location_to_wire
from kvlease.wire.values import duration_from_wire, duration_to_wire, holder_from_wire, holder_to_wire

_OUTCOMES = {
    HandshakeOutcome.DONE: connector_pb2.HANDSHAKE_OUTCOME_DONE,
    HandshakeOutcome.KNOWN: connector_pb2.HANDSHAKE_OUTCOME_KNOWN,
    HandshakeOutcome.FAILED: connector_pb2.HANDSHAKE_OUTCOME_FAILED,
    HandshakeOutcome.LATE: connector_pb2.HANDSHAKE_OUTCOME_LATE,
}
_OUTCOME_OF: dict[int, HandshakeOutcome] = {int(number): outcome for outcome, number in _OUTCOMES.items()}


def peer_to_wire(peer: Peer, within_s: float) -> connector_pb2.WarmResponse:
    """The message that names a peer, with the time within which a report is awaited."""
    return connector_pb2.WarmResponse(
        peer=holder_to_wire(peer.holder),
        location=location_to_wire(peer.location),
        within=duration_to_wire(within_s),
    )


def peer_from_wire(message: connector_pb2.WarmResponse) -> tuple[Peer, float]:
    """The peer of a message, and within how many seconds a report is awaited.

    Raises:
        InvalidArgument: the peer's identity or the time is wrong.
    """
    peer = Peer(holder_from_wire(message.peer), location_from_wire(message.location))
    return peer, duration_from_wire(message.within)


def report_to_wire(report: HandshakeReport) -> connector_pb2.WarmRequest:
    """The message of a report."""
    return connector_pb2.WarmRequest(
        report=connector_pb2.HandshakeReport(
            peer=holder_to_wire(report.peer),
            outcome=_OUTCOMES[report.outcome],
            took=duration_to_wire(report.took_s),
        )
    )


def report_from_wire(message: connector_pb2.HandshakeReport) -> HandshakeReport:
    """The report of a message.

    Raises:
        InvalidArgument: peer or time are wrong, or the outcome is unspecified or unknown.
    """
    outcome = _OUTCOME_OF.get(message.outcome)
    if outcome is None:
        raise InvalidArgument(f"handshake outcome {message.outcome} is unspecified or unknown")
    return HandshakeReport(holder_from_wire(message.peer), outcome, duration_from_wire(message.took))
