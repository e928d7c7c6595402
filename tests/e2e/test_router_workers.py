"""`kvlease router --workers 2`: two processes at one address, over simulated engines."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvlease.dev.main import SERVED_MODEL, simulated_engine
from kvlease.dev.stack import Stack, StackPlan
from kvlease.runtime.child_process import tied_to_this_process

BOUND_S = 60.0
CONNECTIONS = 32
"""In turn: that one of two workers takes them all, and the other is not seen, happens once in 2**31 times."""

pytestmark = pytest.mark.timeout(8 * BOUND_S)
FIRST = [{"role": "user", "content": "tell me something about lighthouses " * 8}]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    write_key(path, "sk-first")
    return path


def write_key(path: Path, key: str) -> None:
    path.write_text(f'[tenants.acme]\nkey_hashes = ["sha256:{sha256(key.encode()).hexdigest()}"]\n')


class Router:
    """The processes, and requests that each take a connection of their own: the kernel picks a worker for each."""

    def __init__(self, process: Process, url: str) -> None:
        self.process = process
        self.url = url
        self.key = "sk-first"

    async def send(self, method: str, path: str, **options: Any) -> tuple[int, Any, str]:
        headers = {"Authorization": f"Bearer {self.key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, headers=headers, **options) as answer,
        ):
            return answer.status, await answer.json(), answer.headers.get("X-Kvlease-Route", "")

    async def chat(self, messages: list[dict[str, Any]]) -> tuple[int, Any, str]:
        body = {"model": SERVED_MODEL, "messages": messages, "max_tokens": 6, "conversation_id": "c"}
        return await self.send("POST", "/v1/chat/completions", json=body)

    async def conversation(self) -> Any:
        status, body, _ = await self.send("GET", "/v1/kvlease/conversations/c")
        return body if status == 200 else None

    def workers(self) -> list[int]:
        pid = self.process.pid
        return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@asynccontextmanager
async def workers_over(stack: Stack, keys: Path) -> AsyncIterator[Router]:
    assert stack.registry is not None
    command = (sys.executable, "-m", "kvlease.cli", "router", "--workers", "2", "--listen", "127.0.0.1:0")
    options = (
        "--registry",
        stack.registry.address,
        "--grpc-listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
    )
    settings = ("--keys-file", str(keys), "--keys-poll-s", "600", "--stop-grace-s", "1")
    process = await asyncio.create_subprocess_exec(
        *tied_to_this_process((*command, *options, *settings)), stderr=PIPE
    )
    assert process.stderr is not None
    serving: set[str] = set()
    async with asyncio.timeout(BOUND_S):
        url = ""
        while len(serving) < 2:
            line = json.loads(await process.stderr.readline())
            if "url" in line:
                url = line["url"]
                serving.add(line["grpc"])
    drained = asyncio.create_task(process.stderr.read())
    try:
        yield Router(process, url)
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(BOUND_S):
            assert await process.wait() == 0
        await drained


@asynccontextmanager
async def simulated() -> AsyncIterator[Stack]:
    stack = Stack(StackPlan(1, 1, simulated_engine), lambda _: None)
    await stack.start()
    try:
        yield stack
    finally:
        await stack.stop()


async def until(condition: Any) -> None:
    async with asyncio.timeout(BOUND_S):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_two_workers_lead_one_conversation_survive_each_other_and_reload_together(keys: Path) -> None:
    async with simulated() as stack, workers_over(stack, keys) as router:
        # Workers learn of engines, and of each other's leases, through the registry.
        await until(lambda: served_by_all(router))
        messages: list[dict[str, Any]] = list(FIRST)
        routes: list[str] = []
        for turn in range(6):
            status, body, route = await router.chat(messages)
            assert status == 200, body
            routes.append(route)
            lease_of_turn = await lease_known_everywhere(router)
            assert lease_of_turn
            said = body["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and {turn}?"}]
        assert routes[0] == "recompute; first_turn"
        assert not [route for route in routes[1:] if route.startswith("recompute")], routes

        before = router.workers()
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: replaced(router, before))
        await until(lambda: served_by_all(router))

        write_key(keys, "sk-second")
        router.process.send_signal(signal.SIGHUP)
        router.key = "sk-second"
        await until(lambda: served_by_all(router))


async def served_by_all(router: Router) -> bool:
    """Whether many connections in turn are all served."""
    for _ in range(CONNECTIONS):
        try:
            status, body, _ = await router.send("GET", "/v1/models")
        except aiohttp.ClientConnectionError:
            return False
        if status != 200 or not body["data"]:
            return False
    return True


async def lease_known_everywhere(router: Router) -> str:
    """The lease that many connections in turn name as the conversation's."""
    agreed = ""

    async def agree() -> bool:
        nonlocal agreed
        found = [await router.conversation() for _ in range(CONNECTIONS)]
        leases = {one["lease"]["lease_id"] if one else None for one in found}
        agreed = next(iter(leases)) or "" if len(leases) == 1 else ""
        return bool(agreed)

    await until(agree)
    return agreed


async def replaced(router: Router, before: list[int]) -> bool:
    workers = router.workers()
    return len(workers) == 2 and before[0] not in workers


async def test_an_address_that_is_taken_is_told_at_once() -> None:
    taken = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{taken.sockets[0].getsockname()[1]}"
    command = (sys.executable, "-m", "kvlease.cli", "router", "--workers", "2", "--listen", address)
    process = await asyncio.create_subprocess_exec(*tied_to_this_process(command), stderr=PIPE)
    async with asyncio.timeout(BOUND_S):
        _, log = await process.communicate()
    taken.close()
    assert process.returncode == 2
    assert address in log.decode()
