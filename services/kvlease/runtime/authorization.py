"""Refuses calls that a peer's identity may not make, and writes down those that change the fleet."""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, cast

import grpc
import grpc.aio

from kvlease.core.errors import KvleaseError
from kvlease.core.ids import lease_id_to_hex
from kvlease.runtime.grpc_handlers import Behaviour, wrapped_handler
from kvlease.runtime.identity import AUDITED, OPEN_SERVICES, Identity, authorize, identities_of

AUDIT_LOG = logging.getLogger("kvlease.audit")

_AUDITED_FIELDS = ("lease_id", "engine_id", "conversation_id")
_SAN = "x509_subject_alternative_name"


class AuthorizationInterceptor(grpc.aio.ServerInterceptor):
    """Below the interceptor that turns domain errors into statuses.

    Args:
        checked: callers come over mutual TLS; without it everyone who reaches the port may call everything.
    """

    def __init__(self, *, checked: bool) -> None:
        self._checked = checked

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        method = cast(Any, handler_call_details).method.lstrip("/")
        watched = self._checked or method in AUDITED
        if handler is None or not watched or method.rpartition("/")[0] in OPEN_SERVICES:
            return handler
        guarded = wrapped_handler(handler, lambda behaviour: self._authorized(method, behaviour))
        if guarded is None:
            raise TypeError(f"{method} cannot be authorized: its handler is no coroutine function")
        return guarded

    def _authorized(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def call(request: Any, context: Any) -> Any:
            callers = callers_of(context.auth_context())
            outcome = "cancelled"
            try:
                if self._checked:
                    authorize(method, callers)
                answer = await behaviour(request, context)
                outcome = "done"
                return answer
            except KvleaseError as error:
                outcome = type(error).__name__
                raise
            finally:
                if method in AUDITED:
                    _audit(method, callers, context.peer(), request, outcome)

        return call


def callers_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[Identity]:
    """What the peer's certificate says that it is; empty without one."""
    return identities_of(name.decode("utf-8", "replace") for name in auth_context.get(_SAN) or ())


def _audit(method: str, callers: frozenset[Identity], peer: str, request: Any, outcome: str) -> None:
    named = {name: getattr(request, name) for name in _AUDITED_FIELDS if hasattr(request, name)}
    if "lease_id" in named:
        named["lease_id"] = lease_id_to_hex(named["lease_id"])
    caller = ",".join(sorted(identity.value for identity in callers)) or "unauthenticated"
    AUDIT_LOG.info(
        "audit", extra={"method": method, "caller": caller, "peer": peer, "outcome": outcome, **named}
    )
