"""The RoutingService: what the router knows of a conversation, for operators and other fronts."""

from typing import Any, TypeAlias

import grpc.aio

from kvlease.core.errors import InvalidArgument
from kvlease.core.signals import TurnPath
from kvlease.router.conversation import Conversation, TurnRecord
from kvlease.router.purge import release_conversation, release_tenant
from kvlease.router.turn import TurnServices
from kvlease.v1 import routing_pb2, routing_pb2_grpc
from kvlease.wire.values import duration_from_wire, duration_to_wire

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

_PATHS = {
    TurnPath.APPEND: routing_pb2.TURN_PATH_APPEND,
    TurnPath.READBACK: routing_pb2.TURN_PATH_READBACK,
    TurnPath.RECOMPUTE: routing_pb2.TURN_PATH_RECOMPUTE,
}


class RoutingServicer(routing_pb2_grpc.RoutingServiceServicer):
    """Converts, calls, converts."""

    def __init__(self, services: TurnServices) -> None:
        self._services = services
        self._conversations = services.conversations
        self._heartbeat = services.heartbeat

    async def GetConversation(
        self, request: routing_pb2.GetConversationRequest, context: Context
    ) -> routing_pb2.GetConversationResponse:
        """The latest turns; none of a conversation that is not known."""
        found = self._conversations.find(request.tenant, request.conversation_id)
        if found is None:
            return routing_pb2.GetConversationResponse(known=False)
        turns = [_turn_to_wire(record) for record in found.turns]
        current = self._conversations.leaves(found)[-1]
        return routing_pb2.GetConversationResponse(turns=turns, known=True, lease=self._lease_of(current))

    async def RenewConversation(
        self, request: routing_pb2.RenewConversationRequest, context: Context
    ) -> routing_pb2.RenewConversationResponse:
        """Keeps the conversation's leases alive for a while."""
        found = self._conversations.find(request.tenant, request.conversation_id)
        duration_s = duration_from_wire(request.duration)
        live = found is not None and self._conversations.keep_all_live(found, duration_s)
        if live:
            self._heartbeat.wake()
        return routing_pb2.RenewConversationResponse(live=live)

    async def ReleaseConversation(
        self, request: routing_pb2.ReleaseConversationRequest, context: Context
    ) -> routing_pb2.ReleaseConversationResponse:
        """Releases the conversation's leases at their holders."""
        found = self._conversations.find(request.tenant, request.conversation_id)
        released = found is not None and await release_conversation(self._services, found)
        return routing_pb2.ReleaseConversationResponse(released=released)

    async def ReleaseTenant(
        self, request: routing_pb2.ReleaseTenantRequest, context: Context
    ) -> routing_pb2.ReleaseTenantResponse:
        """Releases every lease of a tenant."""
        if not request.tenant:
            raise InvalidArgument("tenant must not be empty")
        released = await release_tenant(self._services, request.tenant)
        return routing_pb2.ReleaseTenantResponse(leases_released=released)

    def _lease_of(self, conversation: Conversation) -> routing_pb2.BelievedLease | None:
        lease = conversation.lease
        if lease is None:
            return None
        return routing_pb2.BelievedLease(
            lease_id=lease.lease_id,
            engine_id=lease.holder.engine_id,
            belief=self._conversations.belief(conversation),
        )


def _turn_to_wire(record: TurnRecord) -> routing_pb2.TurnRecord:
    message = routing_pb2.TurnRecord(
        path=_PATHS[record.path],
        reason=record.reason.value,
        lease_id=record.lease_id,
        prompt_tokens=record.prompt_tokens,
        reused_tokens=record.reused_tokens,
        prefill_engine_id=record.prefill_engine_id,
        decode_engine_id=record.decode_engine_id,
        request_id=record.request_id,
        ended=record.ended,
        completion_tokens=record.completion_tokens,
        read_tokens=record.read_tokens,
        local_tokens=record.local_tokens,
        verified_tokens=record.verified_tokens,
        outcome=record.outcome,
    )
    if record.ttft_s is not None:
        message.ttft.CopyFrom(duration_to_wire(record.ttft_s))
    return message
