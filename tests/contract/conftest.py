"""A router with stub engines, for the tests that go through its HTTP server."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvlease.core.records import EngineRole
from stubs.engines import StubEngine
from stubs.router import Stack, running_stack


@pytest.fixture
def router_settings() -> dict[str, Any]:
    """What a module, or a test, sets otherwise."""
    return {}


@pytest.fixture
async def stack(router_settings: dict[str, Any]) -> AsyncIterator[Stack]:
    async with running_stack(**router_settings) as built:
        yield built


@pytest.fixture
async def prefill(stack: Stack) -> StubEngine:
    return await stack.add(StubEngine("prefill-1", EngineRole.PREFILL))


@pytest.fixture
async def decode(stack: Stack, prefill: StubEngine) -> StubEngine:
    return await stack.add(StubEngine("decode-1", EngineRole.DECODE))
