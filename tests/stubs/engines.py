"""An engine's HTTP side without an engine: records what it gets, answers by script, can break off anywhere."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvlease.core.ids import Holder
from kvlease.core.records import Engine, EngineRole, KvLayout
from kvlease.core.turn import PARAMS_KEY, TurnReport
from stubs.answers import Counts, message, message_stream, response, response_stream

MODEL = "tiny"
TURN_PATHS = ("/chat/completions", "/completions", "/responses", "/messages")
LAYOUT = KvLayout(16, "float32", 1, 1, 4096, "layout-1")


@dataclass(frozen=True)
class Received:
    """One request as an engine got it."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]
    raw: bytes = b""

    @property
    def orders(self) -> dict[str, Any] | None:
        """The router's orders in it."""
        params = self.body.get("kv_transfer_params")
        return params.get(PARAMS_KEY) if isinstance(params, dict) else None


Script = Callable[[web.Request, Received], Awaitable[web.StreamResponse]]


@dataclass
class StubEngine:
    """Serves one engine. `script` answers instead of the default; it may raise, hang or close the transport."""

    engine_id: str
    role: EngineRole
    reply: str = "hello"
    prompt_tokens: int = 200
    cached_tokens: int = 0
    report: TurnReport = field(default_factory=lambda: TurnReport(200, 0, 0, 0, "none", kept_tokens=200))
    layout: KvLayout = LAYOUT
    retain: bool = True
    model: str = MODEL
    script: Script | None = None
    received: list[Received] = field(default_factory=list[Received])
    connections: set[object] = field(default_factory=set[object])
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    epoch: int = 1
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    @property
    def engine(self) -> Engine:
        """The engine as its sidecar would register it."""
        return Engine(
            holder=Holder(self.engine_id, "boot-" + self.engine_id, self.epoch),
            role=self.role,
            model=self.model,
            url=self.url,
            sidecar_address=f"sidecar-of-{self.engine_id}:1",
            layout=self.layout,
            retain=self.retain,
        )

    async def _models(self, _request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        json_body = raw and not request.content_type.startswith("multipart/")
        received = Received(request.path_qs, request.headers, json.loads(raw) if json_body else {}, raw)
        self.received.append(received)
        if request.transport is not None:
            self.connections.add(request.transport.get_extra_info("peername"))
        try:
            if self.script is not None:
                return await self.script(request, received)
            return await self.answer(request, received)
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    async def answer(self, request: web.Request, received: Received) -> web.StreamResponse:
        """What a healthy engine answers."""
        if not received.path.partition("?")[0].endswith(TURN_PATHS):
            return web.json_response({"served": received.path, "by": self.engine_id})
        if received.body.get("stream"):
            return await send_chunks(request, [self.stream(received)])
        return web.json_response(self.whole(received))

    def whole(self, received: Received) -> dict[str, Any]:
        """The answer to a request without a stream, the connector's report in it."""
        if received.path == "/v1/responses":
            answer = response(self.reply, self.counts())
        elif received.path == "/v1/messages":
            answer = message(self.reply, self.counts())
        else:
            answer = self._choices(received)
        if received.orders is not None:
            answer["kv_transfer_params"] = {PARAMS_KEY: self.report.to_json()}
        return answer

    def counts(self) -> Counts:
        """The counts of a turn."""
        return Counts(self.prompt_tokens, 5, self.cached_tokens)

    def _choices(self, received: Received) -> dict[str, Any]:
        chat = received.path.endswith("chat/completions")
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if chat:
            choice["message"] = {"role": "assistant", "content": self.reply}
        else:
            choice["text"] = self.reply
        return {"id": "x", "choices": [choice], "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """The counts of a turn."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def stream(self, received: Received) -> bytes:
        """The events of a streamed answer."""
        if received.path == "/v1/responses":
            return response_stream(self.reply, self.counts())
        if received.path == "/v1/messages":
            return message_stream(self.reply, self.counts())
        events = [delta(text) for text in self.reply]
        events.append(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        options = received.body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            events.append(event({"choices": [], "usage": self.usage()}))
        return b"".join([*events, b"data: [DONE]\n\n"])


def event(chunk: dict[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(text: str) -> bytes:
    """An event that carries a piece of the reply."""
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


async def send_chunks(
    request: web.Request, chunks: list[bytes], *, close: bool = False
) -> web.StreamResponse:
    """Streams byte pieces, split where the caller split them; `close` breaks the connection afterwards."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(chunk)
        await asyncio.sleep(0)
    if close and request.transport is not None:
        request.transport.abort()
    return response
