"""The HTTP face of a simulated engine: a subset of vLLM's."""

from contextlib import aclosing
from dataclasses import replace

from aiohttp import web
from opentelemetry.trace import Tracer

from kvlease.core.errors import InvalidArgument
from kvlease.core.turn import TurnReport
from kvlease.runtime.telemetry import NO_TELEMETRY
from kvlease.sim.engine import PromptTooLong, SimEngine, SimRequest
from kvlease.sim.model import Sample
from kvlease.sim.openai import Ask, ReplyWriter, error_body, read_ask, read_tokens
from kvlease.sim.tracing import request_span

BODY_BYTES_MAX = 64 << 20


class EngineApi:
    """Serves one engine."""

    def __init__(self, engine: SimEngine, tracer: Tracer = NO_TELEMETRY.tracer) -> None:
        self._engine = engine
        self._tracer = tracer

    def app(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.post("/tokenize", self._tokenize),
                web.post("/reset_prefix_cache", self._reset),
            ]
        )
        return app

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        with request_span(self._tracer, request.headers):
            return await self._complete(request, chat=True)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        with request_span(self._tracer, request.headers):
            return await self._complete(request, chat=False)

    async def _complete(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        try:
            body = await request.json()
            ask = read_ask(body, chat=chat, default_model=self._engine.settings.model)
            if ask.stream:
                return await self._stream(request, ask)
            return web.json_response(await self._whole(ask))
        except PromptTooLong as error:
            return web.json_response(error_body(400, str(error)), status=400)
        except InvalidArgument as error:
            return web.json_response(error_body(400, str(error)), status=400)
        except (ValueError, RecursionError):
            return web.json_response(error_body(400, "the body is not valid JSON"), status=400)

    async def _whole(self, ask: Ask) -> dict[str, object]:
        choices: list[tuple[list[Sample], str]] = []
        first: TurnReport | None = None
        for index in range(ask.choices):
            generation = self._engine.generate(_of_choice(ask, index))
            async with aclosing(generation.tokens()) as tokens:
                samples = [sample async for sample in tokens]
            choices.append((samples, generation.finish_reason))
            first = first or generation.report()
        if first is None:
            raise InvalidArgument("n must be at least 1")
        return ReplyWriter(ask).whole(choices, first)

    async def _stream(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        writer, counted = ReplyWriter(ask), 0
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        report: TurnReport | None = None
        for index in range(ask.choices):
            generation = self._engine.generate(_of_choice(ask, index))
            async with aclosing(generation.tokens()) as tokens:
                first = True
                async for sample in tokens:
                    if not response.prepared:
                        await response.prepare(request)
                    counted += 1
                    await response.write(writer.chunk(index, sample, generation.finish_reason, first=first))
                    first = False
            report = report or generation.report()
        if report is not None:
            await response.write(writer.last_chunk(counted, report))
        await response.write_eof()
        return response

    async def _models(self, _: web.Request) -> web.Response:
        model = {"id": self._engine.settings.model, "object": "model", "owned_by": "kvlease", "created": 0}
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _metrics(self, _: web.Request) -> web.Response:
        gauges = self._engine.gauges()
        lines = [
            f"vllm:nixl_bytes_transferred_sum {gauges.counters.get('bytes_read', 0)}",
            f"vllm:num_requests_running {gauges.running_requests}",
            f"vllm:kv_cache_usage_perc {1 - gauges.free_blocks / gauges.total_blocks}",
            f"kvlease_held_blocks {gauges.held_blocks}",
            f"kvlease_reading_blocks {gauges.reading_blocks}",
            f"kvlease_quarantined_blocks {gauges.quarantined_blocks}",
            *(f"kvlease_{name}_total {value}" for name, value in sorted(gauges.counters.items())),
        ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            tokens = read_tokens(await request.json())
        except (ValueError, RecursionError):
            return web.json_response(error_body(400, "the body is not valid JSON"), status=400)
        except InvalidArgument as error:
            return web.json_response(error_body(400, str(error)), status=400)
        return web.json_response({"tokens": tokens, "count": len(tokens)})

    async def _reset(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.reset_prefix_cache() else 500)


def _of_choice(ask: Ask, index: int) -> SimRequest:
    """The first choice carries the orders; a turn grants one lease."""
    return ask.request if index == 0 else replace(ask.request, params=None)
