"""One turn while it runs: its state, what its legs need, and how it ends badly.

A pin belongs to the reader that was told about it: only a pin that no engine ever learnt of, or whose engine
has refused the request, is ended by the router. Any other one is the reader's to end, or ends with its
reservation, since its READ may still be running.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

from kvlease.core.clock import Clock
from kvlease.core.ids import Holder, lease_id_to_hex
from kvlease.core.planning import Plan
from kvlease.core.renewal import RenewalPolicy, RenewalTable
from kvlease.core.reuse_rules import ReuseRules
from kvlease.core.signals import DEFAULT_LIMITS, PlanLimits, PlanReason, TurnPath, TurnSignals
from kvlease.core.turn import TurnReport
from kvlease.core.values import value
from kvlease.router.admission import Admission, Overloaded
from kvlease.router.background import Background
from kvlease.router.bodies import TurnRequest
from kvlease.router.conversation import OpenTurn, TurnRecord
from kvlease.router.conversations import ConversationTable
from kvlease.router.counted import Held
from kvlease.router.decisions import DecisionLog, Noted
from kvlease.router.dialect import Api, ReplyReader
from kvlease.router.engines import EngineTable
from kvlease.router.errors import error_body, error_event, refusal_body
from kvlease.router.health import EngineHealth
from kvlease.router.heartbeat import Heartbeat
from kvlease.router.in_flight import InFlight
from kvlease.router.metrics import TurnMetrics
from kvlease.router.ports import ClientPort, EnginePort, RandomPort, RegistryPort
from kvlease.router.responses import ResponseStore
from kvlease.router.resume import StreamMemory
from kvlease.router.tenancy import Tenancy, TenancyByCredential
from kvlease.router.tracing import NO_TRACING, TurnTracing

TRIES_A_LEG = 2
NOT_SERVED = frozenset({404, 405})
"""Statuses of an engine that does not have the model (an adapter is often loaded in some only), or the API."""

REQUEST_TIMEOUT = 408
BUSY = frozenset({REQUEST_TIMEOUT, 429})
"""Statuses of an engine that has no time or no room for a request, which another one may have."""

CREDENTIALS = frozenset({401, 403})
JSON_HEADERS = {"Content-Type": "application/json"}
BROKEN_CODES = {503: "router_stops", 504: "turn_timeout"}


@dataclass(slots=True)
class TurnLimits:
    """Bounds of one turn; one object for all turns, so that a reload reaches each part.

    Attributes:
        turn_timeout_s: of everything, the streamed answer included.
        prefill_timeout_s: of one try of the prefill leg.
        wait_for_offer_s: how long the holder may wait for the lease of a turn that has just ended.
        resume_streams: a stream that breaks off goes on at another engine, where that is possible.
        audit_interval_s: between audits of turns whose reuse is only verified; 0: none.
    """

    plan: PlanLimits = DEFAULT_LIMITS
    turn_timeout_s: float = 1800.0
    prefill_timeout_s: float = 120.0
    wait_for_offer_s: float = 0.02
    resume_streams: bool = False
    audit_interval_s: float = 60.0

    def take(self, other: "TurnLimits") -> None:
        """From here on the bounds are those of the other."""
        for field_ in fields(self):
            setattr(self, field_.name, getattr(other, field_.name))


@value
class RequestHead:
    """What came beside the body: headers for the engines, and the id that ties logs together.

    Attributes:
        api: the API of the request, which shapes its errors.
    """

    request_id: str
    engine_headers: Mapping[str, str]
    api: Api = Api.CHAT


@value
class PinnedLease:
    """A lease under a pin that a leg is to read.

    Attributes:
        sidecar_address: host:port of the holder's sidecar.
    """

    lease_id: int
    pin_id: str
    holder: Holder
    sidecar_address: str


@value
class Refusal:
    """An engine's own answer to a request that it refused."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class Turn:
    """What one turn is made of while it runs.

    Attributes:
        loose_pins: pins that no engine has to end.
        answered: the client got the head of an answer.
        decode_begun_s: when the decode engine was asked last.
        signals: what the plan was made of.
        report: what the prefill engine's connector did.
        memory: what it takes to resume the stream; None: that is not wanted, or not possible.
        reader: has read what came of a stream so far.
        noted: how the plan was noted; to be ended with the turn.
        until_first_byte: what the decode engine is counted to have to do, until its first byte reached the client.
    """

    request: TurnRequest
    head: RequestHead
    client: ClientPort
    opened: OpenTurn
    plan: Plan
    record: TurnRecord
    started_s: float
    loose_pins: dict[str, PinnedLease] = field(default_factory=dict[str, PinnedLease])
    answered: bool = False
    decode_begun_s: float = 0.0
    signals: TurnSignals | None = None
    report: TurnReport | None = None
    memory: StreamMemory | None = None
    reader: ReplyReader | None = None
    noted: Noted | None = None
    until_first_byte: Held = field(default_factory=Held)

    def change_plan(self, changed: Plan) -> None:
        """Takes another path than planned at first."""
        self.plan = changed
        self.record.path, self.record.reason = changed.path, changed.reason

    def note_report(self, report: TurnReport) -> None:
        """Takes what the prefill engine's connector did."""
        self.report = report
        self.record.prompt_tokens = report.prompt_tokens
        self.record.read_tokens = report.read_tokens
        self.record.read_s = report.read_s
        self.record.local_tokens = report.local_tokens
        self.record.verified_tokens = report.verified_tokens
        self.record.outcome = report.outcome
        self.record.reused_tokens = report.read_tokens + report.local_tokens


@dataclass(frozen=True, slots=True)
class TurnServices:
    """Everything a leg needs."""

    clock: Clock
    engines: EngineTable
    conversations: ConversationTable
    renewals: RenewalTable
    heartbeat: Heartbeat
    registry: RegistryPort
    engine_port: EnginePort
    random: RandomPort
    background: Background
    metrics: TurnMetrics
    policy: RenewalPolicy
    limits: TurnLimits
    health: EngineHealth
    admission: Admission
    decisions: DecisionLog
    reuse: ReuseRules
    tracing: TurnTracing = NO_TRACING
    tenancy: Tenancy = field(default_factory=TenancyByCredential)
    responses: ResponseStore = field(default_factory=lambda: ResponseStore(10_000, 256 << 20))
    in_flight: InFlight = field(default_factory=InFlight)

    def unpin(self, pin: PinnedLease) -> None:
        """Ends a pin in the background."""
        self.background.run(self.registry.unpin(pin.holder, pin.lease_id, pin.pin_id))


def can_differ(status: int) -> bool:
    """Whether another engine may answer what one answered so."""
    return status >= 500 or status in NOT_SERVED or status in BUSY


def end_of(status: int) -> str:
    """How a turn ended that an engine answered so: 4xx is the fault of its request, unless the engine is busy.

    The credentials that an engine refuses may be the router's own.
    """
    return "refused" if 400 <= status < 500 and status not in BUSY | CREDENTIALS else "badly"


def may_go_on(status: int) -> bool:
    """Whether an engine may still work on a request that was answered so, and read for it.

    What stands before the engine may have lost patience, and answered in its place.
    """
    return status >= 500 or status == REQUEST_TIMEOUT


def without_prefill(turn: Turn, reason: PlanReason) -> Plan:
    """The plan in which the decode engine does everything."""
    return replace(turn.plan, path=TurnPath.RECOMPUTE, reason=reason, prefill_engine_id="")


def route_headers(turn: Turn) -> dict[str, str]:
    """What the router tells the client about the turn."""
    nonce = "; prompt_nonce" if turn.request.nonce else ""
    headers = {
        "X-Kvlease-Route": f"{turn.plan.path.value}; {turn.plan.reason.value}{nonce}",
        "X-Request-Id": turn.head.request_id,
    }
    if turn.record.lease_id:
        headers["X-Kvlease-Lease"] = lease_id_to_hex(turn.record.lease_id)
    conversation_id = turn.opened.conversation.conversation_id
    if conversation_id and conversation_id.isascii() and conversation_id.isprintable():
        headers["X-Conversation-Id"] = conversation_id
    return headers


async def unavailable(client: ClientPort, head: RequestHead, message: str, code: str = "unavailable") -> None:
    """Tells the client that nobody can serve the turn for the moment."""
    headers = {**JSON_HEADERS, "Retry-After": "1", "X-Request-Id": head.request_id}
    await client.answer(503, headers, error_body(503, message, code, head.api))


async def overloaded(client: ClientPort, head: RequestHead, refusal: Overloaded) -> None:
    """Tells the client that its turn was not let in, and when to try again."""
    headers = {**JSON_HEADERS, "Retry-After": str(refusal.retry_after_s), "X-Request-Id": head.request_id}
    body = error_body(refusal.status, str(refusal), refusal.code, head.api)
    await client.answer(refusal.status, headers, body)


async def refused(turn: Turn, refusal: Refusal) -> None:
    """Passes on what an engine says of a request that it does not serve."""
    turn.record.ended = end_of(refusal.status)
    body = refusal_body(refusal.status, refusal.body, turn.request.api)
    headers = {**refusal.headers, **(JSON_HEADERS if body is not refusal.body else {}), **route_headers(turn)}
    await turn.client.answer(refusal.status, headers, body)


async def broken(turn: Turn, status: int, message: str) -> None:
    """Ends a turn that failed: with an error answer, or with an error event when the answer has begun."""
    turn.record.ended = turn.record.ended or "badly"
    code, api = BROKEN_CODES.get(status, "engine_failed"), turn.request.api
    if turn.answered:
        await turn.client.write(error_event(status, message, code, api))
        await turn.client.end()
    else:
        headers = {**JSON_HEADERS, **route_headers(turn)}
        await turn.client.answer(status, headers, error_body(status, message, code, api))
