"""Wraps the behaviour of a gRPC handler, whatever its kind, for interceptors."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc

Behaviour: TypeAlias = Callable[[Any, Any], Awaitable[Any]]

_KINDS: dict[str, Callable[..., Any]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def wrapped_handler(handler: Any, wrap: Callable[[Behaviour], Behaviour]) -> Any | None:
    """The handler around `wrap(behaviour)`; None when it is an async generator: ours use `context.write`."""
    for kind, build in _KINDS.items():
        behaviour = getattr(handler, kind)
        if inspect.iscoroutinefunction(behaviour):
            return build(
                wrap(behaviour),
                request_deserializer=handler.request_deserializer,
                response_serializer=handler.response_serializer,
            )
    return None
