"""Counts and times what a gRPC server answers. Streams live as long as their process and are not timed."""

import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import grpc
import grpc.aio

from kvlease.runtime.metric_catalogue import RPC_SECONDS
from kvlease.runtime.metrics import CallTimer, Metrics

Behaviour = Callable[[Any, Any], Awaitable[Any]]


class MetricsServerInterceptor(grpc.aio.ServerInterceptor):
    """Times unary handlers. Outermost, so that it sees the status they end with."""

    def __init__(self, metrics: Metrics) -> None:
        self._timer = CallTimer(metrics, RPC_SECONDS)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wraps the handler of one call."""
        handler = await continuation(handler_call_details)
        behaviour = getattr(handler, "unary_unary", None)
        if not inspect.iscoroutinefunction(behaviour):
            return handler
        method = cast(Any, handler_call_details).method.lstrip("/")
        return grpc.unary_unary_rpc_method_handler(
            cast(Any, self._timed(behaviour, method)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _timed(self, behaviour: Behaviour, method: str) -> Behaviour:
        async def call(request: Any, context: Any) -> Any:
            begun_s = time.perf_counter()
            status = grpc.StatusCode.OK
            try:
                return await behaviour(request, context)
            except BaseException:
                code = context.code()
                status = code if isinstance(code, grpc.StatusCode) else _status_of_number(code)
                raise
            finally:
                self._timer.observe(method, status.name, time.perf_counter() - begun_s)

        return call


def _status_of_number(number: object) -> grpc.StatusCode:
    """A context tells a number until the call is over; 0 or nothing: the handler failed without a status."""
    return next(
        (code for code in grpc.StatusCode if number and code.value[0] == number), grpc.StatusCode.UNKNOWN
    )
