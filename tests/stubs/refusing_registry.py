"""A way to a registry that refuses the first attempt of every call: clients must ask again."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

STREAMS = frozenset({"WatchEngines", "WatchLeases", "RenewLeases"})


class RefusingRegistry(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards the bytes of every call to the registry at `target`; unary ones from their second attempt on.

    Attributes:
        address: where it listens once it was started.
        attempts: calls by method.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._channel: grpc.aio.Channel | None = None
        self._server: grpc.aio.Server | None = None
        self.attempts: Counter[str] = Counter()
        self.address = ""

    async def start(self) -> None:
        self._channel = grpc.aio.insecure_channel(self._target)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
        if self._channel is not None:
            await self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        path: str = handler_call_details.method
        method = path.rpartition("/")[2]
        if method in STREAMS:
            return grpc.stream_stream_rpc_method_handler(self._stream(path))
        return grpc.unary_unary_rpc_method_handler(self._unary(path, method))

    def _unary(self, path: str, method: str) -> Any:
        async def forward(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            self.attempts[method] += 1
            if self.attempts[method] == 1:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "ask again")
            assert self._channel is not None
            try:
                return bytes(await self._channel.unary_unary(path)(request, timeout=10))
            except grpc.aio.AioRpcError as error:
                trailers = tuple(error.trailing_metadata() or ())
                await context.abort(error.code(), error.details() or "", trailers)

        return forward

    def _stream(self, path: str) -> Any:
        async def forward(requests: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
            assert self._channel is not None
            call = self._channel.stream_stream(path)(requests)
            try:
                async for response in call:
                    yield response
            finally:
                call.cancel()

        return forward
