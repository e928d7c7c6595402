"""`kvlease conversation`: the latest turns of a conversation, which path each one took, and why."""

from argparse import ArgumentParser, Namespace

from kvlease.core.conversation import tenant_digest
from kvlease.core.ids import lease_id_to_hex
from kvlease.operator.command import Exit, Output, Row, not_found, perform, show
from kvlease.operator.connection import fleet, heard
from kvlease.operator.flags import add_common_flags, add_routing_flag
from kvlease.runtime.identity import Identity
from kvlease.v1 import routing_pb2, routing_pb2_grpc
from kvlease.wire.values import duration_from_wire

WITHOUT_KEY = tenant_digest("anonymous")
COLUMNS = (
    "path",
    "reason",
    "ended",
    "prompt_tokens",
    "reused_tokens",
    "read_tokens",
    "completion_tokens",
    "ttft_ms",
    "outcome",
    "lease_id",
    "decode_engine_id",
)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the flags of `kvlease conversation`."""
    parser.add_argument(
        "conversation_id", metavar="ID", help="the client's, or what X-Conversation-Id answered"
    )
    parser.add_argument(
        "--tenant",
        default=WITHOUT_KEY,
        metavar="DIGEST",
        help="whose it is, as `kvlease leases list` shows tenants (default: clients without a key)",
    )
    add_routing_flag(parser)
    add_common_flags(parser)
    parser.epilog = (
        "A router knows the conversations whose turns went through it; ask the others too. "
        "Exit status: 0, 1 it is not known there, 2 usage, 3 the router does not answer."
    )


def run(arguments: Namespace) -> int:
    """Shows the turns. The exit status: 1 when the router does not know the conversation."""
    return perform("conversation", _show, arguments)


async def _show(arguments: Namespace) -> int:
    request = routing_pb2.GetConversationRequest(
        tenant=arguments.tenant, conversation_id=arguments.conversation_id
    )
    async with fleet(arguments) as ways:
        stub = routing_pb2_grpc.RoutingServiceStub(await ways.channel(Identity.ROUTER, arguments.routing))
        call = stub.GetConversation(request, timeout=ways.timeout_s)
        answer = await heard(call, f"the router at {arguments.routing}")
    if not answer.known:
        raise not_found(
            f"the router at {arguments.routing} knows no conversation {arguments.conversation_id!r} of "
            f"{_whose(arguments.tenant)}"
        )
    if arguments.output is Output.TABLE:
        print(_lease_line(answer))
    show([_turn_row(turn) for turn in answer.turns], COLUMNS, arguments.output)
    return Exit.OK


def _whose(tenant: str) -> str:
    """Which tenant was meant; every SDK sends a key, and so belongs to another one than no key."""
    if tenant == WITHOUT_KEY:
        return "clients without a key (others': --tenant DIGEST, which `kvlease leases list` shows)"
    return f"tenant {tenant}"


def _lease_line(answer: routing_pb2.GetConversationResponse) -> str:
    if not answer.HasField("lease"):
        return "no lease"
    lease = answer.lease
    return f"lease {lease_id_to_hex(lease.lease_id)} at engine {lease.engine_id}: {lease.belief}"


def _turn_row(turn: routing_pb2.TurnRecord) -> Row:
    has_ttft = turn.HasField("ttft")
    return {
        "request_id": turn.request_id,
        "path": routing_pb2.TurnPath.Name(turn.path).removeprefix("TURN_PATH_").lower(),
        "reason": turn.reason,
        "ended": turn.ended,
        "lease_id": lease_id_to_hex(turn.lease_id) if turn.lease_id else None,
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "reused_tokens": turn.reused_tokens,
        "read_tokens": turn.read_tokens,
        "local_tokens": turn.local_tokens,
        "verified_tokens": turn.verified_tokens,
        "ttft_ms": round(duration_from_wire(turn.ttft) * 1e3, 3) if has_ttft else None,
        "outcome": turn.outcome,
        "prefill_engine_id": turn.prefill_engine_id or None,
        "decode_engine_id": turn.decode_engine_id or None,
    }
