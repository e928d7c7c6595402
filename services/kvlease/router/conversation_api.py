"""What a client, or an operator, reads of a conversation and asks for it, beside its turns."""

import json
import math
from collections.abc import Callable
from typing import Any, cast

from aiohttp import web

from kvlease.core.errors import InvalidArgument
from kvlease.core.ids import lease_id_to_hex
from kvlease.router.answers import Refused, json_answer
from kvlease.router.client import BodyBounds, read_body
from kvlease.router.conversation import Conversation, TurnRecord
from kvlease.router.conversations import ConversationTable
from kvlease.router.purge import release_conversation, release_tenant
from kvlease.router.turn import TurnServices
from kvlease.runtime.authorization import AUDIT_LOG


class ConversationApi:
    """The handlers under `/v1/kvlease`.

    Args:
        tenant_of: whom a request belongs to.
        body_bounds: how long its body may take to come.
    """

    def __init__(
        self, services: TurnServices, tenant_of: Callable[[web.Request], str], body_bounds: BodyBounds
    ) -> None:
        self._services = services
        self._tenant_of = tenant_of
        self._body_bounds = body_bounds

    def routes(self) -> list[web.RouteDef]:
        """The routes."""
        conversation = "/v1/kvlease/conversations/{conversation_id}"
        return [
            web.get(conversation, self._read),
            web.post(conversation + "/renew", self._renew),
            web.post(conversation + "/release", self._release),
            web.get("/v1/kvlease/decisions/{turn_id}", self._decision),
            web.delete("/v1/kvlease/tenants/{tenant}/leases", self._release_tenant),
        ]

    async def _read(self, request: web.Request) -> web.StreamResponse:
        return json_answer(conversation_json(self._find(request), self._services.conversations))

    async def _decision(self, request: web.Request) -> web.StreamResponse:
        """What a turn's plan was made of; `kvlease explain` reads it."""
        turn_id = request.match_info["turn_id"]
        decision = self._services.decisions.find(self._tenant_of(request), turn_id)
        if decision is None:
            raise Refused(404, "no decision of such a turn is kept here", "decision_not_found")
        return json_answer(decision.to_json())

    async def _renew(self, request: web.Request) -> web.StreamResponse:
        """The client keeps its conversation for `duration_s` seconds more, for as long as may be without it."""
        conversation = self._find(request)
        raw = await read_body(request, self._body_bounds)
        duration_s = _duration_s(raw, self._services.policy.gap_cap_s)
        live = self._services.conversations.keep_all_live(conversation, duration_s)
        if live:
            self._services.heartbeat.wake()
        return json_answer({"conversation_id": conversation.conversation_id, "live": live})

    async def _release(self, request: web.Request) -> web.StreamResponse:
        """The client is done with its conversation: its leases end at their holders at once."""
        conversation = self._find(request)
        released = await release_conversation(self._services, conversation)
        return json_answer({"conversation_id": conversation.conversation_id, "released": released})

    async def _release_tenant(self, request: web.Request) -> web.StreamResponse:
        """Releases every lease of a tenant: the caller's own, also as `self`, or anybody's for an admin."""
        caller, tenant = self._tenant_of(request), request.match_info["tenant"]
        tenant = caller if tenant == "self" else tenant
        outcome, released = "refused", 0
        try:
            if tenant != caller and not self._services.tenancy.allowance(caller).admin:
                raise Refused(403, "only an admin releases the leases of another tenant", "not_admin")
            outcome = "cancelled"
            released = await release_tenant(self._services, tenant)
            outcome = "done"
        finally:
            named = {"caller": caller, "peer": request.remote, "tenant": tenant}
            AUDIT_LOG.info("audit", extra={"method": "DELETE leases", "outcome": outcome, **named})
        return json_answer({"tenant": tenant, "leases_released": released})

    def _find(self, request: web.Request) -> Conversation:
        """The tenant's conversation that a path names.

        Raises:
            Refused: there is none.
        """
        conversation_id = request.match_info["conversation_id"]
        conversation = self._services.conversations.find(self._tenant_of(request), conversation_id)
        if conversation is None:
            raise Refused(404, "no such conversation", "no_conversation")
        return conversation


def conversation_json(conversation: Conversation, table: ConversationTable) -> dict[str, Any]:
    """What operators, and `kvlease dev --check`, read of a conversation."""
    current = table.leaves(conversation)[-1]
    lease = current.lease
    return {
        "conversation_id": conversation.conversation_id,
        "lease": {
            "lease_id": lease_id_to_hex(lease.lease_id) if lease else None,
            "state": table.belief(current),
            "engine_id": lease.holder.engine_id if lease else None,
        },
        "turns": [_turn_json(record) for record in conversation.turns],
    }


def _turn_json(record: TurnRecord) -> dict[str, Any]:
    return {
        "request_id": record.request_id,
        "path": record.path.value,
        "reason": record.reason.value,
        "ended": record.ended,
        "prompt_nonce": record.nonce,
        "lease_id": lease_id_to_hex(record.lease_id) if record.lease_id else None,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "reused_tokens": record.reused_tokens,
        "read_tokens": record.read_tokens,
        "local_tokens": record.local_tokens,
        "verified_tokens": record.verified_tokens,
        "outcome": record.outcome,
        "ttft_ms": None if record.ttft_s is None else round(record.ttft_s * 1e3, 3),
        "prefill_ms": round(record.prefill_s * 1e3, 3),
        "prefill_read_ms": round(record.read_s * 1e3, 3),
        "prefill_engine_id": record.prefill_engine_id or None,
        "decode_engine_id": record.decode_engine_id or None,
    }


def _duration_s(raw: bytes, cap_s: float) -> float:
    """The `duration_s` of a body, at most the cap; the cap without one.

    Raises:
        InvalidArgument: it is not a number of seconds.
    """
    if not raw:
        return cap_s
    try:
        body: object = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("the body is JSON, or empty") from error
    if not isinstance(body, dict):
        raise InvalidArgument("the body is an object, or empty")
    value = cast("dict[str, Any]", body).get("duration_s", cap_s)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InvalidArgument("duration_s is a number of seconds above 0")
    return float(min(value, cap_s))
