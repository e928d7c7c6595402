"""One conversation as a router knows it: its lease, its turns, and the leaf that a next request may extend."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvlease.core.conversation import Leaf, Transcript
from kvlease.core.cost import TokenEstimate
from kvlease.core.ids import Holder
from kvlease.core.signals import PlanReason, TurnPath
from kvlease.core.values import value

TURNS_KEPT = 32
NOTHING_LEARNT = TokenEstimate()


@value
class ConversationLease:
    """The lease of a conversation's latest turn.

    Attributes:
        model: the name that the client asked for; empty when another router granted the lease, since a record
            names the model of the engine, for which a client may say an adapter's name or another one.
        tokens: 0 when it is not known.
        traceparent: names the span of the turn that granted it; empty when that was not traced, or not here.
    """

    lease_id: int
    holder: Holder
    model: str
    leaf: Leaf
    tokens: int = 0
    traceparent: str = ""

    def of_tokens(self, tokens: int) -> "ConversationLease":
        """The lease when it is known how many tokens it has."""
        return ConversationLease(self.lease_id, self.holder, self.model, self.leaf, tokens, self.traceparent)


@dataclass(slots=True)
class TurnRecord:
    """One turn as the router planned and saw it.

    Attributes:
        completion_tokens: as the decode engine counts them at the end; 0 of a turn that did not get there.
        reused_tokens: tokens of the prompt whose KV was not computed again.
        read_tokens: those among them that were READ from the lease.
        local_tokens: those among them that the prefill engine's own cache held.
        verified_tokens: tokens of the lease that belong to the prompt, as the reader verified.
        outcome: what the reader says of its READ; empty without one.
        prefill_s: how long the router waited for the prefill leg that it used, 0 without one.
        read_s: of those, what the prefill engine's READ took.
        ended: `well`, `badly`, `refused` (an engine found fault with the request) or `aborted`; empty while the turn
            runs.
        nonce: the prompt began with what changes in every request.
        decode_anew_id: the decode engine that was chosen in place of the planned one when the prompt was computed;
            empty when that stayed.
        decode_engine_id: the one that was asked last.
        prefill_retries: tries of the prefill leg after the first one; `decode_retries` likewise.
    """

    request_id: str
    path: TurnPath
    reason: PlanReason
    lease_id: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    read_tokens: int = 0
    local_tokens: int = 0
    verified_tokens: int = 0
    outcome: str = ""
    ttft_s: float | None = None
    prefill_s: float = 0.0
    read_s: float = 0.0
    prefill_engine_id: str = ""
    decode_engine_id: str = ""
    decode_anew_id: str = ""
    ended: str = ""
    nonce: bool = False
    prefill_retries: int = 0
    decode_retries: int = 0


def _no_keys() -> list[bytes]:
    return []


def _no_turns() -> deque[TurnRecord]:
    return deque(maxlen=TURNS_KEPT)


@dataclass(slots=True)
class Conversation:
    """One conversation of one tenant.

    Attributes:
        conversation_id: the client's, or minted; empty when only another router knows it.
        named: the client gave the id.
        lease: of the turn that finished last.
        leaf: where that turn ended.
        claim: the key of the request that goes on from the leaf and is in flight; None without one.
        branches: keys of the other leaves under the same id, the newest last.
        last_gap_s: seconds before its latest turn; None when there was none, or tools took them.
        keep_s: for how long it was worth keeping after its latest turn.
        idle_since_s: when the last turn ended well, None once another turn has begun.
        awaits_tools: that turn's reply called tools.
    """

    key: bytes
    tenant: str
    conversation_id: str
    named: bool
    lease: ConversationLease | None = None
    leaf: Leaf | None = None
    claim: int | None = None
    branches: list[bytes] = field(default_factory=_no_keys)
    decode_engine_id: str = ""
    estimate: TokenEstimate = NOTHING_LEARNT
    turns: deque[TurnRecord] = field(default_factory=_no_turns)
    last_gap_s: float | None = None
    keep_s: float = 0.0
    idle_since_s: float | None = None
    awaits_tools: bool = False
    used_s: float = 0.0
    open_turns: int = 0


@dataclass(slots=True)
class OpenTurn:
    """A turn that found its conversation.

    Attributes:
        base: the lease that the turn may reuse.
        suffix_bytes: text after the leased history, None when the request does not extend it.
        supersedes: the lease that a new one replaces; 0 for a first turn and for a fork.
        claims: the turn goes on from the conversation's leaf, so that another one forks.
        traceparent: names the turn's span.
        ended: it ended well.
        prompt_tokens: as the engine counted them, 0 until it did; `reply_tokens` likewise.
    """

    conversation: Conversation
    transcript: Transcript | None
    model: str
    base: ConversationLease | None = None
    suffix_bytes: int | None = None
    supersedes: int = 0
    claims: bool = False
    first: bool = True
    traceparent: str = ""
    ended: bool = False
    prompt_tokens: int = 0
    reply_tokens: int = 0


def key_of(transcript: Transcript | None) -> int:
    """The key that covers a whole request, 0 when there is none."""
    return transcript.key if transcript is not None else 0


def model_of(conversation: Conversation) -> str:
    """The model of the lease, empty without one."""
    return conversation.lease.model if conversation.lease is not None else ""


def known_leaves(conversation: Conversation) -> list[Leaf]:
    """Where the last turn ended, and where its lease does: another router's turn is known by its lease alone."""
    lease = conversation.lease
    return [leaf for leaf in (conversation.leaf, lease.leaf if lease else None) if leaf is not None]


def shared_place(places: Mapping[int, int], conversation: Conversation) -> int:
    """The place in a request of the last key that a leaf, or the turn in flight there, shares; -1 without one."""
    keys = [key for leaf in known_leaves(conversation) for key in leaf.keys]
    if conversation.claim is not None:
        keys.append(conversation.claim)
    return max((places.get(key, -1) for key in keys), default=-1)


def extends(transcript: Transcript, conversation: Conversation) -> bool:
    """The request goes on from the leaf, or asks for its reply once more."""
    return any(
        transcript.suffix_bytes(leaf) is not None or transcript.key == leaf.anchor
        for leaf in known_leaves(conversation)
    )
