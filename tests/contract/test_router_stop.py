"""A router that stops: turns in flight end in its grace, and those that do not are told."""

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from kvlease.core.records import EngineRole
from stubs.engines import Received, StubEngine, delta, send_chunks
from stubs.router import FIRST, Answer, Stack, running_stack
from stubs.waiting import eventually


async def stack_with_engines(exits: AsyncExitStack, stop_grace_s: float) -> tuple[Stack, StubEngine]:
    stack = await exits.enter_async_context(running_stack(stop_grace_s=stop_grace_s))
    await stack.add(StubEngine("prefill-1", EngineRole.PREFILL))
    return stack, await stack.add(StubEngine("decode-1", EngineRole.DECODE))


async def answer_while_it_stops(stack: Stack, decode: StubEngine, *, stream: bool) -> Answer:
    """What a client gets whose turn is at the decode engine when the router is told to stop."""
    turn = asyncio.create_task(stack.chat(FIRST, stream=stream))
    await eventually(lambda: decode.received)
    async with asyncio.timeout(60):
        await stack.router.stop()
        return await turn


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_that_does_not_end_in_the_grace_ends_with_an_error(*, stream: bool) -> None:
    async def hang(request: web.Request, received: Received) -> web.StreamResponse:
        if stream:
            await send_chunks(request, [delta("a")])
        await asyncio.Event().wait()
        raise AssertionError

    async with AsyncExitStack() as exits:
        stack, decode = await stack_with_engines(exits, 0.3)
        decode.script = hang
        answer = await answer_while_it_stops(stack, decode, stream=stream)
        raw = answer.raw
        if stream and raw.startswith(delta("a")):
            raw = raw.removeprefix(delta("a")).removeprefix(b"data: ")
            assert answer.status == 200
        else:
            assert answer.status == 503
        assert json.loads(raw)["error"]["code"] == "router_stops"
        async with asyncio.timeout(30):
            await decode.aborted.wait()


async def test_a_turn_that_ends_in_the_grace_ends_well() -> None:
    async with AsyncExitStack() as exits:
        stack, decode = await stack_with_engines(exits, 3600.0)
        go_on = asyncio.Event()

        async def wait(request: web.Request, received: Received) -> web.StreamResponse:
            await go_on.wait()
            return await decode.answer(request, received)

        decode.script = wait
        turn = asyncio.create_task(stack.chat(FIRST))
        await eventually(lambda: decode.received)
        stopping = asyncio.create_task(stack.router.stop())
        await asyncio.sleep(0)
        go_on.set()
        async with asyncio.timeout(60):
            assert (await turn).status == 200
            await stopping
