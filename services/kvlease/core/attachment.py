"""What an engine's connector tells its sidecar: who the engine is, and what it holds."""

from dataclasses import dataclass, field
from enum import Enum

from kvlease.core.holding import Hold
from kvlease.core.ids import Holder
from kvlease.core.records import KvLayout, KvLocation, LeaseRecord


@dataclass(frozen=True, slots=True)
class LeaseOffer:
    """A hold that the connector granted, or still has.

    Attributes:
        remaining_s: seconds until the hold ends unless it is renewed.
        provisional: the router has not confirmed it.
        supersedes: lease of the conversation's previous turn, 0 when there is none.
        pin_ids: its live pins.
    """

    record: LeaseRecord
    remaining_s: float
    provisional: bool
    supersedes: int = 0
    pin_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What only the engine process knows of itself.

    Attributes:
        retain: whether the engine can retain and read; if not, `retain_refusal` says why.
        details: what people read to find out what is wrong, by `core.details`; no process decides by it.
    """

    holder: Holder
    model: str
    layout: KvLayout
    location: KvLocation
    vllm_version: str = ""
    data_parallel_rank: int = 0
    total_blocks: int = 0
    prefix_caching: bool = True
    retain: bool = True
    retain_refusal: str = ""
    details: dict[str, str] = field(default_factory=dict[str, str])


class HandshakeOutcome(Enum):
    """What came of a handshake that a worker did before a turn needed it.

    KNOWN: the two had shaken hands already. LATE: it did not end in the time given, and may still be under way.
    """

    DONE = "done"
    KNOWN = "known"
    FAILED = "failed"
    LATE = "late"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine from which another may have to READ, and where the two shake hands."""

    holder: Holder
    location: KvLocation


@dataclass(frozen=True, slots=True)
class HandshakeReport:
    """What one worker says of its handshake with a peer."""

    peer: Holder
    outcome: HandshakeOutcome
    took_s: float


def offer_of(
    hold: Hold, holder: Holder, now_s: float, layout: KvLayout, exclusive_bytes: int = 0
) -> LeaseOffer:
    """The offer of a hold at `now_s` (the clock of its table)."""
    grant = hold.grant
    record = LeaseRecord(
        lease_id=grant.lease_id,
        kind=grant.kind,
        state=hold.state,
        holder=holder,
        tenant=grant.tenant,
        conversation_key=grant.conversation_key,
        tokens=grant.tokens,
        exclusive_bytes=exclusive_bytes,
        model=grant.model,
        lora=grant.lora,
        layout_hash=layout.layout_hash,
        chain_keys=grant.chain_keys,
    )
    return LeaseOffer(
        record, max(0.0, hold.deadline_s - now_s), hold.provisional, grant.supersedes, tuple(hold.pins)
    )
