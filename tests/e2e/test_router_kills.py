"""Two prefill and two decode engines as processes, one of each killed under load: what clients see of it."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from kvlease.core.records import EngineRole
from kvlease.dev.engine_process import EngineProcess
from kvlease.dev.main import SERVED_MODEL, simulated_engine
from kvlease.dev.stack import Engine, EngineSeat, Stack, StackPlan
from kvlease.router.config import RouterConfig
from kvlease.router.sse import EventSplitter

SEED = 20261130
REQUESTS = 1000
CLIENTS = 16
TOKENS = 8
BOUND_S = 300.0

pytestmark = pytest.mark.timeout(BOUND_S + 200)


@dataclass
class Seen:
    """What clients saw.

    Attributes:
        texts: what was said to each prompt, by streams that ended well.
        cut: streams that ended in neither an end nor an error.
    """

    statuses: dict[int, int] = field(default_factory=dict[int, int])
    texts: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    well: int = 0
    errors: int = 0
    cut: int = 0
    faults: list[str] = field(default_factory=list[str])


def prompt_of(number: int) -> str:
    """Some prompts come again: what one engine says to them, the others must say."""
    return f"question {number % 100}: what does the keeper of lighthouse {number % 100} see? " * 4


async def ask(session: aiohttp.ClientSession, url: str, number: int, seen: Seen) -> None:
    prompt = prompt_of(number)
    body: dict[str, Any] = {
        "model": SERVED_MODEL,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": number % 4 != 0,
        "conversation_id": f"c-{number}",
    }
    async with session.post(url + "/v1/chat/completions", json=body) as answer:
        seen.statuses[answer.status] = seen.statuses.get(answer.status, 0) + 1
        if answer.status != 200:
            seen.faults.append((await answer.text())[:200])
            return
        if not body["stream"]:
            choice = (await answer.json())["choices"][0]
            seen.texts.setdefault(prompt, set()).add(choice["message"]["content"])
            seen.well += 1
            return
        note(await answer.read(), prompt, seen)


def note(raw: bytes, prompt: str, seen: Seen) -> None:
    payloads = [event.partition(b"data: ")[2].strip() for event in EventSplitter().feed(raw)]
    if payloads and payloads[-1] == b"[DONE]":
        chunks = [json.loads(payload) for payload in payloads[:-1]]
        text = "".join(
            choice["delta"].get("content") or "" for chunk in chunks for choice in chunk.get("choices", ())
        )
        seen.texts.setdefault(prompt, set()).add(text)
        seen.well += 1
    elif payloads and "error" in json.loads(payloads[-1]):
        seen.errors += 1
    else:
        seen.cut += 1


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    # Nobody's heartbeat waits for a killed engine's record to vanish: it is out of rotation by its failures.
    router = RouterConfig(suspect_s=60.0)
    plan = StackPlan(2, 2, simulated_engine, router=router)
    built = Stack(plan, lambda _: None)
    await built.start()
    try:
        yield built
    finally:
        await built.stop()


def of_role(stack: Stack, role: EngineRole) -> list[Engine]:
    pairs: list[tuple[EngineSeat, Engine]] = list(zip(stack.seats, stack.engines, strict=True))
    return [engine for seat, engine in pairs if seat.role is role]


async def kill(engine: Engine) -> None:
    assert isinstance(engine, EngineProcess)
    await engine.kill()


async def test_no_client_sees_more_of_two_killed_engines_than_an_error_event(stack: Stack) -> None:
    chance, seen = random.Random(SEED), Seen()
    victims = {
        chance.randrange(200, 450): chance.choice(of_role(stack, EngineRole.PREFILL)),
        chance.randrange(450, 700): chance.choice(of_role(stack, EngineRole.DECODE)),
    }
    numbers = iter(range(REQUESTS))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            if number in victims:
                await kill(victims[number])
            await ask(session, stack.router_url, number, seen)

    async with asyncio.timeout(BOUND_S), aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(client(session))
    assert seen.statuses == {200: REQUESTS}, f"seed {SEED}: {seen.faults}"
    assert seen.cut == 0, f"seed {SEED}"
    # Whatever was broken off is a stream that the killed decode engine had begun, at most one a client.
    assert seen.errors <= CLIENTS, f"seed {SEED}"
    assert seen.well + seen.errors == REQUESTS
    assert all(len(texts) == 1 for texts in seen.texts.values()), (
        f"seed {SEED}: an answer depends on its engine"
    )
