"""The router's part of a turn, done by hand: pins, and requests straight to an engine with orders of a test."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from tests.engine.pair import Message, Outcome, Pair, request_body

from kvlease.core.conversation import cache_salt, tenant_digest
from kvlease.core.holding import PinAsk
from kvlease.core.ids import lease_id_from_hex
from kvlease.core.lease import LeaseKind
from kvlease.core.records import Engine, EngineRole, Pinned
from kvlease.core.turn import PARAMS_KEY, ReadOrder, TurnParams
from kvlease.dev.completion import Completion, complete
from kvlease.runtime.sidecars import GrpcSidecars

TENANT = tenant_digest("anonymous")
"""Whom the router takes a request without credentials for."""
SALT = cache_salt(TENANT, "")
CALL_S = 30.0


async def engine_of(pair: Pair, role: EngineRole) -> Engine:
    """The registered engine of a role."""
    return next(engine for engine in await pair.stack.store.list_engines() if engine.role is role)


async def read_order(pair: Pair, turn: Outcome, pin_id: str) -> ReadOrder:
    """The order to READ the lease that a turn left at the decode engine."""
    engine = await engine_of(pair, EngineRole.DECODE)
    lease_id = lease_id_from_hex(turn.record["lease_id"])
    return ReadOrder(lease_id, pin_id, LeaseKind.CONVERSATION, engine.holder, engine.sidecar_address)


@asynccontextmanager
async def pinned(
    pair: Pair, turn: Outcome, pin_id: str, reservation_s: float = 300.0
) -> AsyncGenerator[ReadOrder, None]:
    """A pin on a turn's lease, as long as the context lasts."""
    order = await read_order(pair, turn, pin_id)
    sidecars = GrpcSidecars()
    try:
        ask = PinAsk(order.lease_id, pin_id, order.holder, TENANT, reservation_s=reservation_s)
        outcome = await sidecars.pin(order.sidecar_address, ask, 1.0, CALL_S)
        assert isinstance(outcome, Pinned), outcome
        yield order
        await sidecars.unpin(order.sidecar_address, order.holder, order.lease_id, pin_id, CALL_S)
    finally:
        await sidecars.close()


def reading(order: ReadOrder) -> dict[str, Any]:
    """`kv_transfer_params` that READ a lease and keep nothing."""
    return {PARAMS_KEY: TurnParams(TENANT, read=order).to_json()}


async def send(
    pair: Pair,
    role: EngineRole,
    messages: list[Message],
    params: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Completion:
    """A prompt straight to an engine, in the anonymous tenant's cache."""
    body = {**request_body(messages, **fields), "cache_salt": SALT}
    if params is not None:
        body["kv_transfer_params"] = params
    reply, _ = await complete(pair.session, pair.url(role), body)
    return reply
