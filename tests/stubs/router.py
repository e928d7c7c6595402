"""A router as its server runs it, with stub engines behind it and the registry in the test's process."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvlease.core.turn import TurnParams
from kvlease.router.config import RouterConfig
from kvlease.router.server import RouterServer
from kvlease.runtime.clock import LoopClock
from stubs.engines import MODEL, Received, StubEngine
from stubs.registry import StubRegistry

LONG = "a long tool result " * 300
FIRST = [{"role": "user", "content": "tell me something about lighthouses " * 8}]


def router_config(**settings: Any) -> RouterConfig:
    """A router's settings for a test: no beat comes by itself, so what is confirmed was confirmed at once."""
    defaults: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "grpc_listen": "127.0.0.1:0",
        "stop_grace_s": 0.1,
        "prefill_timeout_s": 90.0,
        "heartbeat_interval_s": 600.0,
        "lease_duration_s": 1800.0,
        "reservation_s": 700.0,
    }
    return RouterConfig(**{**defaults, **settings})


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.raw)

    @property
    def route(self) -> str:
        return self.headers["X-Kvlease-Route"]


@dataclass
class Stack:
    registry: StubRegistry
    router: RouterServer
    session: aiohttp.ClientSession
    engines: list[StubEngine] = field(default_factory=list[StubEngine])

    async def add(self, engine: StubEngine) -> StubEngine:
        await engine.start()
        self.engines.append(engine)
        self.registry.register(engine.engine)
        await self.know(len(self.engines))
        return engine

    async def know(self, count: int) -> None:
        async with asyncio.timeout(30):
            while True:
                async with self.session.get(self.router.url + "/health") as response:
                    if sum((await response.json())["engines"].values()) == count:
                        return

    async def send(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, self.router.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def chat(
        self, messages: list[dict[str, Any]], headers: dict[str, str] | None = None, **fields: Any
    ) -> Answer:
        body = {"model": MODEL, "messages": messages, **fields}
        return await self.send("POST", "/v1/chat/completions", json=body, headers=headers)

    async def turns(
        self, conversation_id: str, headers: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        return (await self.conversation(conversation_id, headers))["turns"]

    async def conversation(
        self, conversation_id: str, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        answer = await self.send("GET", f"/v1/kvlease/conversations/{conversation_id}", headers=headers)
        assert answer.status == 200
        return answer.json


def said(messages: list[dict[str, Any]], reply: str, text: str) -> list[dict[str, Any]]:
    return [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": text}]


def orders(received: Received) -> TurnParams:
    return TurnParams.from_json(received.orders)


@asynccontextmanager
async def running_stack(**settings: Any) -> AsyncGenerator[Stack, None]:
    """A router without engines, stopped with what was added to it."""
    registry = StubRegistry()
    router = RouterServer(router_config(**settings), LoopClock(), registry)
    await router.start()
    async with aiohttp.ClientSession() as session:
        built = Stack(registry, router, session)
        try:
            yield built
        finally:
            for engine in built.engines:
                await engine.stop()
            await router.stop()
