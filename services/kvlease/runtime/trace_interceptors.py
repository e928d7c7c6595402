"""Carries traces over gRPC calls.

Only unary calls that belong to a turn are traced: streams live as long as their process, and what runs in the
background has no caller. A span is named by the method, `kvlease.v1.SidecarService/Pin`.
"""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from kvlease.runtime.telemetry import TRACE_HEADERS, context_from, with_trace_headers
from kvlease.wire import attributes

_SERVER_ERRORS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
"""Statuses that are the server's fault, as the semantic conventions list them; the others are the caller's."""


class TracingServerInterceptor(grpc.aio.ServerInterceptor):
    """Continues the caller's trace in unary handlers. Outermost, so that it sees the status they end with."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call that has a caller's trace."""
        handler = await continuation(handler_call_details)
        behaviour = getattr(handler, "unary_unary", None)
        if not inspect.iscoroutinefunction(behaviour):
            return handler
        parent = _caller(handler_call_details)
        if not trace.get_current_span(parent).get_span_context().is_valid:
            return handler
        method = cast(Any, handler_call_details).method.lstrip("/")
        return grpc.unary_unary_rpc_method_handler(
            cast(Any, self._traced(behaviour, method, parent)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _traced(
        self, behaviour: Callable[[Any, Any], Awaitable[Any]], method: str, parent: Context
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            with self._tracer.start_as_current_span(
                method,
                context=parent,
                kind=SpanKind.SERVER,
                attributes=_described(method),
                record_exception=False,
                set_status_on_exception=False,
            ) as span:
                code = grpc.StatusCode.OK
                try:
                    return await behaviour(request, context)
                except BaseException:
                    code = _code_of(context.code()) or grpc.StatusCode.UNKNOWN
                    raise
                finally:
                    _end(span, code, failed=code in _SERVER_ERRORS)

        return call


class TracingClientInterceptor(grpc.aio.UnaryUnaryClientInterceptor):
    """Gives each unary call made within a span a span of its own, and the callee its context."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        """Makes the call, and ends its span with the status."""
        if not trace.get_current_span().get_span_context().is_valid:
            return await continuation(client_call_details, request)
        method = _text(client_call_details.method).lstrip("/")
        with self._tracer.start_as_current_span(
            method,
            kind=SpanKind.CLIENT,
            attributes=_described(method),
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            code = grpc.StatusCode.CANCELLED
            try:
                call = await continuation(_with_context(client_call_details), request)
                code = await call.code()
                return call
            finally:
                _end(span, code, failed=code is not grpc.StatusCode.OK)


def _with_context(details: Any) -> grpc.aio.ClientCallDetails:
    metadata = grpc.aio.Metadata(*(details.metadata or ()))
    for name, value in with_trace_headers({}).items():
        metadata[name] = value
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


def _caller(details: grpc.HandlerCallDetails) -> Context:
    metadata: Any = cast(Any, details).invocation_metadata or ()
    return context_from({name: _text(value) for name, value in metadata if name in TRACE_HEADERS})


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _described(method: str) -> dict[str, str]:
    return {attributes.RPC_SYSTEM: "grpc", attributes.RPC_METHOD: method}


def _code_of(code: Any) -> grpc.StatusCode | None:
    """The status that a handler set: gRPC says it as a number, or not at all."""
    if isinstance(code, grpc.StatusCode):
        return code
    return next((known for known in grpc.StatusCode if code and known.value[0] == code), None)


def _end(span: Span, code: grpc.StatusCode, *, failed: bool) -> None:
    span.set_attribute(attributes.RPC_STATUS, code.name)
    if failed:
        span.set_attribute(attributes.ERROR_TYPE, code.name)
        span.set_status(Status(StatusCode.ERROR))
