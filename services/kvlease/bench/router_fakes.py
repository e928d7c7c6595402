"""Engines that answer at once, and a registry that knows them: what routers are measured in front of.

A request costs them next to nothing, so that what is measured is the router's. Run as a process of its own, this
prints one line of JSON with its addresses and serves until it is ended.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

from kvlease.core.ids import Holder
from kvlease.core.records import Engine, EngineRole, KvLayout
from kvlease.core.turn import PARAMS_KEY, TurnReport
from kvlease.runtime.grpc_server import GrpcServer
from kvlease.v1 import registry_pb2, registry_pb2_grpc
from kvlease.wire.engines import engine_to_wire

MODEL = "bench"
EVENTS_A_STREAM = 64
PROMPT_TOKENS = 500
HEAD_END = b"\r\n\r\n"


def _answer(status: str, body: bytes, kind: bytes = b"application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nContent-Type: ".encode()
    return head + kind + HEAD_END + body


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(body: object) -> bytes:
    return _chunk(b"data: " + json.dumps(body).encode() + b"\n\n")


def _usage() -> dict[str, object]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": EVENTS_A_STREAM,
        "total_tokens": PROMPT_TOKENS + EVENTS_A_STREAM,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _whole() -> bytes:
    report = TurnReport(PROMPT_TOKENS, 0, 0, 0, "none", kept_tokens=PROMPT_TOKENS)
    message = {"role": "assistant", "content": "word " * EVENTS_A_STREAM}
    body = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": _usage(),
        # What stock vLLM's connector says on its prefill side, for the routers that pass it on; ours beside it.
        "kv_transfer_params": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": "bench",
            "remote_request_id": "bench",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
            PARAMS_KEY: report.to_json(),
        },
    }
    return _answer("200 OK", json.dumps(body).encode())


def _stream() -> list[bytes]:
    def piece(delta: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return _event(
            {
                "id": "chatcmpl-0",
                "object": "chat.completion.chunk",
                "created": 0,
                "model": MODEL,
                "choices": [choice],
            }
        )

    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    usage: dict[str, object] = {
        "id": "chatcmpl-0",
        "object": "chat.completion.chunk",
        "choices": [],
        "usage": _usage(),
    }
    return [
        head + piece({"role": "assistant", "content": ""}),
        *(piece({"content": "word "}) for _ in range(EVENTS_A_STREAM)),
        piece({}, "stop"),
        _event(usage),
        _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
    ]


WHOLE = _whole()
STREAM = _stream()
OTHER = _answer(
    "200 OK",
    json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL}).encode(),
)


class FakeEngine(asyncio.Protocol):
    """One connection. Events of a stream are written one by one, as an engine writes them."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        """Answers each request whose last byte came."""
        self._buffer += data
        while (request := _take_request(self._buffer)) is not None:
            self._reply(request)

    def _reply(self, request: bytes) -> None:
        if self._transport is None:
            return
        if not request.startswith(b"POST"):
            self._transport.write(OTHER)
        elif b'"stream":true' in request or b'"stream": true' in request:
            self._write_next(0)
        else:
            self._transport.write(WHOLE)

    def _write_next(self, place: int) -> None:
        if self._transport is None or self._transport.is_closing() or place == len(STREAM):
            return
        self._transport.write(STREAM[place])
        asyncio.get_running_loop().call_soon(self._write_next, place + 1)


def _take_request(buffer: bytearray) -> bytes | None:
    """The first whole request of a buffer, taken out of it; None while bytes of it are missing."""
    end = buffer.find(HEAD_END)
    if end < 0:
        return None
    head = bytes(buffer[:end]).lower()
    size = end + len(HEAD_END)
    if b"transfer-encoding: chunked" in head:
        last = buffer.find(b"0\r\n\r\n", size)
        if last < 0:
            return None
        size = last + 5
    else:
        _, named, rest = head.partition(b"content-length:")
        size += int(rest.partition(b"\r\n")[0]) if named else 0
    if len(buffer) < size:
        return None
    request = bytes(buffer[:size])
    del buffer[:size]
    return request


@dataclass(frozen=True, slots=True)
class FakeFleet:
    """Where the fakes are: base URLs of the engines, and the registry's host:port."""

    prefill: str
    decode: str
    registry: str


class FakeRegistry(registry_pb2_grpc.RegistryServiceServicer):
    """Knows the engines, and that every lease is renewed as soon as it is asked for."""

    def __init__(self, engines: list[Engine]) -> None:
        self._engines = engines

    async def WatchEngines(self, request: registry_pb2.WatchEnginesRequest, context: Any) -> None:
        """A snapshot, and no change."""
        message = registry_pb2.WatchEnginesResponse
        changes = [message.Change(engine=engine_to_wire(engine)) for engine in self._engines]
        await context.write(message(snapshot=True, changes=changes))
        await asyncio.get_running_loop().create_future()

    async def WatchLeases(self, request: registry_pb2.WatchLeasesRequest, context: Any) -> None:
        """No lease of other routers."""
        await context.write(registry_pb2.WatchLeasesResponse(snapshot=True))
        await asyncio.get_running_loop().create_future()

    async def RenewLeases(
        self, request_iterator: AsyncIterator[registry_pb2.RenewLeasesRequest], context: Any
    ) -> None:
        """Every beat is applied."""
        async for beat in request_iterator:
            await context.write(registry_pb2.RenewLeasesResponse(sequence=beat.sequence))

    async def ReleaseLease(
        self, request: registry_pb2.ReleaseLeaseRequest, context: Any
    ) -> registry_pb2.ReleaseLeaseResponse:
        """Released."""
        return registry_pb2.ReleaseLeaseResponse()

    async def UnpinLease(
        self, request: registry_pb2.UnpinLeaseRequest, context: Any
    ) -> registry_pb2.UnpinLeaseResponse:
        """Ended."""
        return registry_pb2.UnpinLeaseResponse()


async def _serve() -> None:
    loop, engines = asyncio.get_running_loop(), list[Engine]()
    for role in EngineRole:
        listener = await loop.create_server(FakeEngine, "127.0.0.1", 0)
        engines.append(
            Engine(
                holder=Holder(f"{role.value}-1", "boot", 1),
                role=role,
                model=MODEL,
                url=f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}",
                sidecar_address="127.0.0.1:1",
                layout=KvLayout(16, "bfloat16", 1, 1, 4096, "layout"),
            )
        )
    name = registry_pb2.DESCRIPTOR.services_by_name["RegistryService"].full_name
    server = GrpcServer("127.0.0.1:0", [name])
    registry_pb2_grpc.add_RegistryServiceServicer_to_server(FakeRegistry(engines), server.server)
    server.bind()
    await server.start()
    fleet = {engine.role.value: engine.url for engine in engines} | {"registry": server.address}
    sys.stdout.write(json.dumps(fleet) + "\n")
    sys.stdout.flush()
    await loop.create_future()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_serve())
