"""A router with stub engines, for the tests that go through its HTTP server."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from kvlease.core.records import EngineRole
from kvlease.router.server import RouterServer
from kvlease.runtime.clock import LoopClock
from stubs.engines import StubEngine
from stubs.registry import StubRegistry
from stubs.router import Stack, router_config


@pytest.fixture
def router_settings() -> dict[str, Any]:
    """What a module, or a test, sets otherwise."""
    return {}


@pytest.fixture
async def stack(router_settings: dict[str, Any]) -> AsyncIterator[Stack]:
    registry = StubRegistry()
    router = RouterServer(router_config(**router_settings), LoopClock(), registry)
    await router.start()
    async with aiohttp.ClientSession() as session:
        built = Stack(registry, router, session)
        yield built
        for engine in built.engines:
            await engine.stop()
        await router.stop()


@pytest.fixture
async def prefill(stack: Stack) -> StubEngine:
    return await stack.add(StubEngine("prefill-1", EngineRole.PREFILL))


@pytest.fixture
async def decode(stack: Stack, prefill: StubEngine) -> StubEngine:
    return await stack.add(StubEngine("decode-1", EngineRole.DECODE))
