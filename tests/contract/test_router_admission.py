"""Turns that are not let in are told so in the shape of their API, and when to try again."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import web

from stubs.engines import MODEL, Received, StubEngine
from stubs.router import FIRST, Answer, Stack

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]
ONE_AT_A_TIME = {"decode_inflight_max": 1, "queue_wait_s": 100.0}


def body_of(path: str) -> dict[str, Any]:
    asked = {
        "/v1/completions": {"prompt": "tell me"},
        "/v1/responses": {"input": "tell me"},
        "/v1/messages": {"messages": FIRST, "max_tokens": 5},
    }
    return {"model": MODEL, **asked.get(path, {"messages": FIRST})}


async def send(stack: Stack, path: str, tenant: str = "a") -> Answer:
    headers = {"Authorization": f"Bearer {tenant}"}
    return await stack.send("POST", path, json=body_of(path), headers=headers)


@asynccontextmanager
async def full(stack: Stack, decode: StubEngine, *, waiting: tuple[str, ...]) -> AsyncGenerator[None]:
    """A decode engine that is as busy as it may be, and a queue in which a turn of each of the tenants waits."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def hold(request: web.Request, received: Received) -> web.StreamResponse:
        asked.set()
        await go_on.wait()
        return await decode.answer(request, received)

    decode.script = hold
    turns = [asyncio.create_task(send(stack, PATHS[0], "busy"))]
    await asked.wait()
    for number, tenant in enumerate(waiting, start=1):
        turns.append(asyncio.create_task(send(stack, PATHS[0], tenant)))
        async with asyncio.timeout(30.0):
            while await waiting_turns(stack) != number:
                pass
    yield
    go_on.set()
    assert {answer.status for answer in await asyncio.gather(*turns)} == {200}


async def waiting_turns(stack: Stack) -> int:
    async with stack.session.get(stack.router.admin_url + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("kvlease_waiting_turns"))


def assert_refused(answer: Answer, path: str, status: int, code: str) -> None:
    assert answer.status == status
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.headers["Content-Type"].startswith("application/json")
    assert answer.headers["X-Request-Id"]
    error = answer.json["error"]
    assert (error["code"], bool(error["message"])) == (code, True)
    kinds = {429: ("rate_limit_error", "rate_limit_error"), 503: ("server_error", "overloaded_error")}[status]
    if path == "/v1/messages":
        assert (answer.json["type"], error["type"]) == ("error", kinds[1])
        assert answer.headers["Request-Id"]
    else:
        assert ("type" in answer.json, error["type"], error["param"]) == (False, kinds[0], None)


@pytest.mark.parametrize("router_settings", [{**ONE_AT_A_TIME, "queue_max": 2}], ids=["queue of two"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_full_queue_is_429_for_whom_it_is_full_of_and_503_for_others(
    stack: Stack, decode: StubEngine, path: str
) -> None:
    async with full(stack, decode, waiting=("a",)):
        assert_refused(await send(stack, path, "a"), path, 429, "tenant_queue_full")
    async with full(stack, decode, waiting=("a", "b")):
        assert_refused(await send(stack, path, "c"), path, 503, "queue_full")


@pytest.mark.parametrize(
    "router_settings", [{"decode_inflight_max": 1, "queue_wait_s": 0.05}], ids=["short wait"]
)
@pytest.mark.parametrize("path", PATHS)
async def test_a_turn_that_waited_too_long_is_503(stack: Stack, decode: StubEngine, path: str) -> None:
    async with full(stack, decode, waiting=()):
        assert_refused(await send(stack, path), path, 503, "queue_timeout")
    assert (await send(stack, path)).status == 200


@pytest.mark.parametrize("router_settings", [{**ONE_AT_A_TIME, "queue_max": 2}], ids=["queue of two"])
async def test_official_clients_take_it_for_what_it_is(stack: Stack, decode: StubEngine) -> None:
    url = stack.router.url
    by_openai = openai.AsyncOpenAI(base_url=url + "/v1", api_key="a", max_retries=0)
    by_anthropic = anthropic.AsyncAnthropic(base_url=url, auth_token="a", max_retries=0)
    async with full(stack, decode, waiting=("a",)), by_openai, by_anthropic:
        with pytest.raises(openai.RateLimitError) as refused:
            await by_openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        assert (refused.value.code, refused.value.response.headers["Retry-After"]) == (
            "tenant_queue_full",
            "50",
        )
        with pytest.raises(anthropic.RateLimitError) as limited:
            await by_anthropic.messages.create(
                model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "x"}]
            )
        assert limited.value.response.headers["Retry-After"] == "50"
