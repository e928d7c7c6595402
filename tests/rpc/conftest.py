"""One registry and two sidecars on loopback, over one memory store; connectors use unix sockets."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvlease.cli import COMMANDS, parser_of
from kvlease.core.attachment import EngineFacts
from kvlease.core.digests import ChainRoot, chain
from kvlease.core.holding import Grant, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind
from kvlease.core.records import EngineRole, KvLayout, KvLocation
from kvlease.dev.engine_process import free_ports
from kvlease.operator import command as operator_command
from kvlease.operator.command import parser_kind
from kvlease.registry.config import RegistryConfig
from kvlease.registry.server import RegistryServer
from kvlease.runtime.clock import LoopClock
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.server import SidecarServer
from kvlease.store.memory import MemoryStore
from kvlease.testing.clock import ManualClock
from kvlease.testing.connector import FakeConnector
from kvlease.testing.store import BreakableStore
from kvlease.v1 import registry_pb2_grpc, sidecar_pb2_grpc

BLOCK_SIZE = 32
TENANT = "tenant-digest"


def make_facts(engine_id: str = "decode-1", boot_id: str = "boot-1") -> EngineFacts:
    return EngineFacts(
        holder=Holder(engine_id, boot_id, 1),
        model="tiny",
        layout=KvLayout(BLOCK_SIZE, "float32", 1, 1, 4096, "layout"),
        location=KvLocation("127.0.0.1", 5600, extra={"opaque": "verbatim"}),
        vllm_version="0.32.0",
        total_blocks=90,
    )


def make_grant(
    lease_id: int, *, supersedes: int = 0, conversation: bytes = b"c", tenant: str = TENANT
) -> Grant:
    digests = chain(ChainRoot(tenant, "tiny"), list(range(2 * BLOCK_SIZE)), BLOCK_SIZE).digests
    return Grant(
        lease_id=lease_id,
        kind=LeaseKind.CONVERSATION,
        block_ids=(3, 5),
        digests=digests,
        tokens=2 * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        tenant=tenant,
        conversation_key=conversation,
        chain_keys=(1, 2),
        supersedes=supersedes,
        model="tiny",
    )


def make_ask(lease_id: int, pin_id: str = "pin-1", engine_id: str = "decode-1", **parts: float) -> PinAsk:
    return PinAsk(
        lease_id, pin_id, Holder(engine_id, "boot-1", 1), TENANT, **(parts or {"read_part_s": 10.0})
    )


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits until a condition of another task holds; the test's timeout bounds it."""
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.005)


@dataclass
class Fleet:
    """What a test talks to. `clock` is the connectors'; services count with the loop's."""

    tmp_path: Path
    stack: AsyncExitStack
    store: BreakableStore = field(default_factory=lambda: BreakableStore(MemoryStore()))
    clock: ManualClock = field(default_factory=ManualClock)
    sidecars: list[SidecarServer] = field(default_factory=list)
    registry_server: RegistryServer | None = None

    async def start(self) -> None:
        # What a busy machine answers late is no miss here: only silence ends these calls.
        config = RegistryConfig(
            listen="127.0.0.1:0",
            stop_grace_s=0.0,
            renewal_spacing_s=0.0,
            sidecar_call_s=5.0,
            renew_call_s=4.5,
        )
        self.registry_server = RegistryServer(config, self.store, LoopClock())
        await self.registry_server.start()
        self.stack.push_async_callback(self.registry_server.stop)

    async def sidecar(
        self,
        role: EngineRole = EngineRole.DECODE,
        *,
        pin_call_s: float = 3.0,
        holder_call_s: float = 3.0,
        socket_dir: Path | None = None,
    ) -> SidecarServer:
        config = SidecarConfig(
            listen="127.0.0.1:0",
            allow_loopback=True,
            socket_dir=str(socket_dir or self.tmp_path / f"s{len(self.sidecars)}"),
            role=role,
            engine_url=f"http://127.0.0.1:{free_ports(1)[0]}",
            stop_grace_s=5.0,
            pin_call_s=pin_call_s,
            peer_call_s=4.0,
            holder_call_s=holder_call_s,
        )
        server = SidecarServer(config, self.store, LoopClock())
        self.stack.push_async_callback(server.stop)
        await server.start()
        self.sidecars.append(server)
        return server

    async def connector(self, sidecar: SidecarServer, facts: EngineFacts | None = None) -> FakeConnector:
        connector = FakeConnector(facts or make_facts(), self.clock)
        await connector.attach(sidecar.socket_path)
        self.stack.push_async_callback(connector.detach)
        return connector

    async def channel(self, address: str) -> grpc.aio.Channel:
        return await self.stack.enter_async_context(grpc.aio.insecure_channel(address))

    async def registry(self) -> registry_pb2_grpc.RegistryServiceStub:
        assert self.registry_server is not None
        return registry_pb2_grpc.RegistryServiceStub(await self.channel(self.registry_server.address))

    async def peer(self, sidecar: SidecarServer) -> sidecar_pb2_grpc.SidecarServiceStub:
        return sidecar_pb2_grpc.SidecarServiceStub(await self.channel(sidecar.address))


@pytest.fixture
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(tmp_path_factory.mktemp("f"), stack)
        await fleet.start()
        yield fleet


@dataclass(frozen=True, slots=True)
class Said:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Awaitable[Said]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this loop, where the servers are."""
    for variable in ("KVLEASE_REGISTRY", "KVLEASE_ROUTER", "KVLEASE_SIDECAR", "KVLEASE_ROUTING"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(operator_command.asyncio, "run", lambda work: work)

    async def run_command(name: str, *arguments: str) -> Said:
        module = import_module(COMMANDS[name][0])
        status = await module.run(parser_of(name, parser_kind(arguments)).parse_args(arguments))
        printed = capsys.readouterr()
        return Said(status, printed.out, printed.err)

    return run_command


def facts(engine_id: str, **changes: Any) -> EngineFacts:
    settings: dict[str, Any] = {
        "holder": Holder(engine_id, "boot-" + engine_id, 1),
        "model": "tiny",
        "layout": KvLayout(32, "float32", 1, 1, 4096, "layout"),
        "location": KvLocation("127.0.0.1", 1),
        "vllm_version": "0.32.0",
        "total_blocks": 90,
    }
    return EngineFacts(**{**settings, **changes})


def address(fleet: Fleet) -> str:
    assert fleet.registry_server is not None
    return fleet.registry_server.address


@dataclass
class Pair:
    prefill: FakeConnector
    decode: FakeConnector


@pytest.fixture
async def pair(fleet: Fleet) -> Pair:
    prefill = await fleet.connector(await fleet.sidecar(EngineRole.PREFILL), facts("prefill-1"))
    decode = await fleet.connector(await fleet.sidecar(EngineRole.DECODE), facts("decode-1"))
    return Pair(prefill, decode)
