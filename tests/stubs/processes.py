"""The whole system as processes of their own over a real etcd, with simulated engines; any of them may be killed."""

import asyncio
import itertools
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio

from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.dev.engine_process import free_ports
from kvlease.runtime.child_process import tied_to_this_process
from kvlease.v1 import registry_pb2, registry_pb2_grpc, sidecar_pb2, sidecar_pb2_grpc

BOUND_S = 90.0
MODEL = "sim"
SENTENCE = "tell me something about lighthouses and the people who kept them. "


@dataclass
class Turn:
    """What a client saw of one turn."""

    status: int
    text: str
    route: str

    @property
    def reused(self) -> bool:
        """Whether the turn took a path that needs a lease."""
        return self.route.startswith(("append", "readback"))


@dataclass
class Conversation:
    """A client's side of one conversation; every turn is compared with a cold run of the same prompt."""

    fleet: "ProcessFleet"
    name: str
    messages: list[dict[str, str]] = field(default_factory=list)

    async def turn(self, router: int = 0) -> Turn:
        """The next turn, at one of the routers.

        Raises:
            AssertionError: it failed, or its reply is not that of a cold run.
        """
        self.messages.append({"role": "user", "content": f"{len(self.messages)}. {self.name} {SENTENCE * 6}"})
        turn = await self.fleet.ask(router, self.messages, conversation=self.name)
        assert turn.status == 200, (turn, self.fleet.log())
        cold = await self.fleet.ask(router, self.messages)
        assert (cold.status, cold.text) == (200, turn.text), (turn, cold)
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn

    async def until_reused(self, router: int = 0) -> Turn:
        """Turns until one reuses what the one before left."""
        async with asyncio.timeout(BOUND_S):
            while not (turn := await self.turn(router)).reused:
                await asyncio.sleep(0.1)
        return turn


class ProcessFleet:
    """Two registries, two routers, and a prefill (`-p`) and a decode (`-d`) engine with a sidecar each, by name.

    All ports are chosen once, so that a process that is started again is at its old address.
    """

    def __init__(self, directory: Path, stack: AsyncExitStack, etcd: EmbeddedEtcd) -> None:
        self.etcd = etcd
        self.processes: dict[str, Process] = {}
        self.conversations: dict[str, None] = {}
        self._directory = directory
        self._stack = stack
        self._client = aiohttp.ClientSession()
        self._strangers = itertools.count()
        ports = iter(free_ports(16))
        self._ports = {name: next(ports) for name in (*_NAMES, *(f"{name}-2" for name in _NAMES))}
        stack.push_async_callback(self._client.close)

    @property
    def routers(self) -> tuple[str, str]:
        """Base URLs of the routers."""
        return tuple(f"http://127.0.0.1:{self._ports[f'router-{number}']}" for number in (0, 1))  # type: ignore[return-value]

    def log(self) -> str:
        """The end of what all processes logged."""
        return (self._directory / "log").read_text()[-4000:]

    def address(self, name: str) -> str:
        """host:port at which a process serves."""
        return f"127.0.0.1:{self._ports[name]}"

    def socket_of(self, sidecar: str) -> Path:
        """Where a sidecar serves connectors."""
        return self._directory / f"s{sidecar.partition('-')[2]}" / "sidecar.sock"

    async def start(self, *names: str) -> None:
        """Starts processes; they find each other when they are ready."""
        for name in names:
            command = (sys.executable, "-m", *self._command(name))
            with (self._directory / "log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(*tied_to_this_process(command), stderr=log)
            self.processes[name] = process
            self._stack.push_async_callback(_killed, process)

    async def kill(self, *names: str) -> None:
        """Kills processes, and returns when they are gone."""
        for name in names:
            self.processes[name].kill()
        for name in names:
            await self.processes.pop(name).wait()

    def ended(self) -> dict[str, int]:
        """Processes that ended by themselves, with their status."""
        return {
            name: process.returncode
            for name, process in self.processes.items()
            if process.returncode is not None
        }

    async def ask(self, router: int, messages: list[dict[str, str]], conversation: str = "") -> Turn:
        """One request; without a conversation from a tenant that nobody knows, so that nothing is reused."""
        body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 24}
        key = "sk-owner"
        if conversation:
            self.conversations[conversation] = None
            body["conversation_id"] = conversation
        else:
            key = f"sk-stranger-{next(self._strangers)}"
        async with self._client.post(
            f"{self.routers[router]}/v1/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=BOUND_S),
        ) as answer:
            text = await answer.text()
            if answer.status != 200:
                return Turn(answer.status, text, "")
            said = (await answer.json())["choices"][0]["message"]["content"]
            return Turn(answer.status, said, answer.headers.get("X-Kvlease-Route", ""))

    async def release(self, conversation: str) -> None:
        """Gives up a conversation at both routers."""
        for router in self.routers:
            url = f"{router}/v1/kvlease/conversations/{conversation}/release"
            async with self._client.post(url, headers={"Authorization": "Bearer sk-owner"}) as answer:
                assert answer.status in (200, 404), await answer.text()

    async def until_led(self, conversation: str) -> None:
        """Returns when both routers name one lease as a conversation's: they learn of each other's by their watch."""

        async def is_agreed() -> bool:
            leases = [await self._lease(router, conversation) for router in (0, 1)]
            return leases[0] is not None and leases[0] == leases[1]

        await until(is_agreed)

    async def _lease(self, router: int, conversation: str) -> str | None:
        url = f"{self.routers[router]}/v1/kvlease/conversations/{conversation}"
        async with self._client.get(url, headers={"Authorization": "Bearer sk-owner"}) as answer:
            lease: str | None = (await answer.json())["lease"]["lease_id"] if answer.status == 200 else None
            return lease

    async def held_blocks(self) -> int:
        """Blocks that leases keep, on both engines; asked again while the store is too busy to list them."""
        async with asyncio.timeout(BOUND_S):
            while True:
                try:
                    return await self._held_blocks()
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                    await asyncio.sleep(0.1)

    async def _held_blocks(self) -> int:
        async with grpc.aio.insecure_channel(self.address("registry-0")) as channel:
            registry = registry_pb2_grpc.RegistryServiceStub(channel)
            listed = await registry.ListEngines(registry_pb2.ListEnginesRequest(), timeout=BOUND_S)
        held = 0
        for engine in listed.engines:
            async with grpc.aio.insecure_channel(engine.sidecar_address) as channel:
                sidecar = sidecar_pb2_grpc.SidecarServiceStub(channel)
                question = sidecar_pb2.ReadGaugesRequest(engine_id=engine.holder.engine_id)
                held += (await sidecar.ReadGauges(question, timeout=BOUND_S)).gauges.held_blocks
        return held

    async def until_serving(self) -> None:
        """Returns when both routers know both engines."""
        for router in (0, 1):
            await until(lambda router=router: self._serves(router))

    async def _serves(self, router: int) -> bool:
        try:
            return (await self.ask(router, [{"role": "user", "content": "hello"}])).status == 200
        except aiohttp.ClientConnectionError:
            return False

    def _command(self, name: str) -> tuple[str, ...]:
        part, _, one = name.partition("-")
        etcd = ("--etcd-endpoints", self.etcd.endpoint, "--etcd-accept-old", "--log-level", "warning")
        sockets = ("--socket-dir", str(self._directory / f"s{one}"))
        if part == "registry":
            return (
                "kvlease.cli",
                part,
                "--listen",
                self.address(name),
                "--admin-listen",
                "127.0.0.1:0",
                *etcd,
            )
        if part == "sidecar":
            role = "prefill" if one == "p" else "decode"
            listen = ("--listen", self.address(name), "--allow-loopback", "--engine-ttl-s", "6")
            url = ("--role", role, "--engine-url", f"http://{self.address(f'engine-{one}')}")
            return ("kvlease.cli", part, *listen, *url, *sockets, "--admin-listen", "127.0.0.1:0", *etcd)
        if part == "engine":
            ports = ("--port", str(self._ports[name]), "--side-channel-port", str(self._ports[f"{name}-2"]))
            return ("kvlease.sim", *ports, *sockets, "--model", MODEL, "--log-level", "warning")
        # Each router asks another registry first.
        first, second = (f"registry-{int(one)}", f"registry-{1 - int(one)}")
        registries = ("--registry", f"{self.address(first)},{self.address(second)}")
        listen = ("--listen", self.address(name), "--grpc-listen", self.address(f"{name}-2"))
        beats = ("--heartbeat-interval-s", "1", "--admin-listen", "127.0.0.1:0", "--log-level", "warning")
        # So that the blocks of those who never come back are free again before a test gives up.
        gaps = ("--gap-cap-s", "30")
        return ("kvlease.cli", part, *listen, *registries, *beats, *gaps)


_NAMES = (
    "registry-0",
    "registry-1",
    "sidecar-p",
    "sidecar-d",
    "engine-p",
    "engine-d",
    "router-0",
    "router-1",
)


@asynccontextmanager
async def process_fleet(directory: Path, *etcd_arguments: str) -> AsyncIterator[ProcessFleet]:
    """A fleet whose processes all serve."""
    async with AsyncExitStack() as stack:
        etcd = EmbeddedEtcd(etcd_arguments)
        etcd.endpoint = f"127.0.0.1:{free_ports(1)[0]}"
        stack.push_async_callback(etcd.stop)
        await etcd.start()
        fleet = ProcessFleet(directory, stack, etcd)
        await fleet.start(*_NAMES)
        await fleet.until_serving()
        yield fleet


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits until something of other processes holds."""
    async with asyncio.timeout(BOUND_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def _killed(process: Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
