"""Stands between a gRPC client and its server, and passes the bytes of every call on."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio


class Forwarding(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards every call to the server at `target`; what a subclass overrides happens on the way.

    Attributes:
        address: where it listens once it was started.
    """

    def __init__(self, target: str, streams: frozenset[str]) -> None:
        self.target = target
        self._streams = streams
        self._channel: grpc.aio.Channel | None = None
        self._server: grpc.aio.Server | None = None
        self.address = ""

    async def start(self, listen: str = "127.0.0.1:0") -> None:
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers((self,))
        port = self._server.add_insecure_port(listen)
        self.address = listen if listen.startswith("unix:") else f"127.0.0.1:{port}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
        if self._channel is not None:
            await self._channel.close()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        path: str = handler_call_details.method
        if path.rpartition("/")[2] in self._streams:
            return grpc.stream_stream_rpc_method_handler(self._stream(path))
        return grpc.unary_unary_rpc_method_handler(self._unary(path))

    async def admit(self, method: str, context: Any) -> None:
        """Refuses a unary call, or returns."""

    def request(self, path: str, message: bytes) -> bytes:
        """What the server gets to see of a message."""
        return message

    def response(self, path: str, message: bytes) -> bytes:
        """What the client gets to see of a message."""
        return message

    def _unary(self, path: str) -> Any:
        async def forward(message: bytes, context: Any) -> bytes:
            await self.admit(path.rpartition("/")[2], context)
            try:
                call = self._connected().unary_unary(path)(self.request(path, message), timeout=10)
                return self.response(path, bytes(await call))
            except grpc.aio.AioRpcError as error:
                trailers = tuple(error.trailing_metadata() or ())
                return bytes(await context.abort(error.code(), error.details() or "", trailers))

        return forward

    def _stream(self, path: str) -> Any:
        async def forward(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
            async def passed_on() -> AsyncIterator[bytes]:
                async for message in messages:
                    yield self.request(path, message)

            call = self._connected().stream_stream(path)(passed_on())
            try:
                async for message in call:
                    yield self.response(path, message)
            finally:
                call.cancel()

        return forward

    def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            options = (("grpc.use_local_subchannel_pool", 1),)
            self._channel = grpc.aio.insecure_channel(self.target, options=options)
        return self._channel


class RefusingRegistry(Forwarding):
    """Refuses the first attempt of every unary call of a registry: its clients must ask again.

    Attributes:
        attempts: calls by method.
    """

    def __init__(self, target: str) -> None:
        super().__init__(target, frozenset({"WatchEngines", "WatchLeases", "RenewLeases"}))
        self.attempts: dict[str, int] = {}

    async def admit(self, method: str, context: Any) -> None:
        self.attempts[method] = self.attempts.get(method, 0) + 1
        if self.attempts[method] == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "ask again")
