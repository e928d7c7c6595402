"""The whole system over mutual TLS: who is served, who is refused, and certificates replaced while it serves."""

import asyncio
import logging
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
from aiohttp import web
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvlease.core.errors import HolderUnreachable, InvalidArgument, NotAllowed
from kvlease.core.records import EngineRole
from kvlease.dev.engine_process import free_ports
from kvlease.registry.config import RegistryConfig
from kvlease.registry.server import RegistryServer
from kvlease.router.config import RouterConfig
from kvlease.router.engine_client import HttpEngines
from kvlease.router.ports import LegError
from kvlease.router.server import RouterServer
from kvlease.runtime.clock import LoopClock
from kvlease.runtime.grpc_client import Channels
from kvlease.runtime.grpc_server import GrpcServer, is_local
from kvlease.runtime.identity import Identity
from kvlease.runtime.tls import CERTIFICATE_FILE, Tls, make_tls
from kvlease.sidecar.config import SidecarConfig
from kvlease.sidecar.server import SidecarServer
from kvlease.sim.config import SimConfig
from kvlease.sim.main import serve
from kvlease.store.memory import MemoryStore
from kvlease.v1 import registry_pb2, registry_pb2_grpc, sidecar_pb2, sidecar_pb2_grpc
from kvlease.wire.errors import error_from_rpc
from stubs.certificates import Authority

DEADLINE_S = 20.0


@dataclass
class SecureFleet:
    """A registry, a router, and a prefill and a decode engine with their sidecars, each with its identity."""

    directory: Path
    stack: AsyncExitStack
    authority: Authority = field(default_factory=Authority)
    store: MemoryStore = field(default_factory=MemoryStore)
    sidecars: list[SidecarServer] = field(default_factory=list)
    registry_address: str = ""
    router_url: str = ""

    def certificates(self, identity: Identity, authority: Authority | None = None) -> str:
        """A directory for a process; its certificate is made when it is first asked for."""
        directory = self.directory / (identity.value if authority is None else f"stranger-{identity.value}")
        if not directory.exists():
            (authority or self.authority).issue(directory, identity.value)
        return str(directory)

    async def start(self) -> None:
        registry = RegistryServer(
            RegistryConfig(
                listen="127.0.0.1:0", sidecar_call_s=15.0, tls_dir=self.certificates(Identity.REGISTRY)
            ),
            self.store,
            LoopClock(),
        )
        await registry.start()
        self.stack.push_async_callback(registry.stop)
        self.registry_address = registry.address
        for role in (EngineRole.PREFILL, EngineRole.DECODE):
            await self._start_engine(role)
        config = RouterConfig(
            listen="127.0.0.1:0",
            grpc_listen="127.0.0.1:0",
            registry=self.registry_address,
            registry_call_s=20.0,
            tls_dir=self.certificates(Identity.ROUTER),
        )
        router = RouterServer.connected(config, LoopClock())
        await router.start()
        self.stack.push_async_callback(router.stop)
        self.router_url = router.url

    async def _start_engine(self, role: EngineRole) -> None:
        (port,) = free_ports(1)
        socket_dir = str(self.directory / role.value)
        sidecar = SidecarServer(
            SidecarConfig(
                listen="127.0.0.1:0",
                allow_loopback=True,
                socket_dir=socket_dir,
                role=role,
                engine_url=f"https://127.0.0.1:{port}",
                pin_call_s=10.0,
                peer_call_s=12.0,
                holder_call_s=10.0,
                tls_dir=self.certificates(Identity.SIDECAR),
            ),
            self.store,
            LoopClock(),
        )
        await sidecar.start()
        self.stack.push_async_callback(sidecar.stop)
        self.sidecars.append(sidecar)
        certificates = self.authority.issue(self.directory / f"engine-{role.value}")
        await self.run_engine(role, port, socket_dir, certificates)

    async def run_engine(self, role: EngineRole, port: int, socket_dir: str, certificates: Path) -> None:
        """Starts an engine that lives as long as the fleet."""
        stop = asyncio.Event()
        engine = asyncio.create_task(
            serve(
                SimConfig(port=port, socket_dir=socket_dir, tls_dir=str(certificates), pin_wait_s=9.0), stop
            )
        )

        async def end() -> None:
            stop.set()
            await engine

        self.stack.push_async_callback(end)

    async def channel(
        self, identity: Identity, peer: Identity, address: str, authority: Authority | None = None
    ) -> grpc.aio.Channel:
        channels = Channels(peer, tls=Tls(self.certificates(identity, authority)))
        self.stack.push_async_callback(channels.close)
        return await channels.get(address)


@pytest.fixture
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureFleet]:
    async with AsyncExitStack() as stack:
        fleet = SecureFleet(tmp_path_factory.mktemp("t"), stack)
        await fleet.start()
        yield fleet


async def chat(session: aiohttp.ClientSession, url: str, turn: int) -> aiohttp.ClientResponse:
    words = [{"role": "user", "content": f"word {number} " * 40} for number in range(turn)]
    body = {"model": "sim", "messages": words, "conversation_id": "one", "max_tokens": 8}
    response = await session.post(f"{url}/v1/chat/completions", json=body)
    await response.read()
    return response


async def both_engines_are_known(session: aiohttp.ClientSession, url: str) -> None:
    known = 0
    async with asyncio.timeout(DEADLINE_S):
        while known < 2:
            async with session.get(f"{url}/health") as response:
                known = sum((await response.json())["engines"].values())
            await asyncio.sleep(0.01)


async def test_a_conversation_is_served_and_its_kv_reused_with_tls_on_every_hop(fleet: SecureFleet) -> None:
    context = Tls(fleet.certificates(Identity.OPERATOR)).client_context()
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(connector=connector) as session:
        await both_engines_are_known(session, fleet.router_url)
        assert fleet.router_url.startswith("https://")
        routes = []
        for turn in (1, 2):
            response = await chat(session, fleet.router_url, turn)
            assert response.status == 200
            routes.append(response.headers["X-Kvlease-Route"].partition(";")[0].split()[0])
        assert routes[0].startswith("recompute")
        assert not routes[1].startswith("recompute")


async def test_a_peer_without_a_certificate_of_the_authority_reaches_nothing(fleet: SecureFleet) -> None:
    stranger = Authority()
    channels = [
        await fleet.channel(Identity.ROUTER, Identity.REGISTRY, fleet.registry_address, stranger),
        await fleet.stack.enter_async_context(grpc.aio.insecure_channel(fleet.registry_address)),
    ]
    for channel in channels:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_client_of_a_registry_talks_to_nobody_else(fleet: SecureFleet) -> None:
    sidecar = fleet.sidecars[0].address
    channel = await fleet.channel(Identity.ROUTER, Identity.REGISTRY, sidecar)
    stub: Any = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call]
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("identity", [Identity.ROUTER, Identity.SIDECAR, Identity.OPERATOR])
async def test_only_a_registry_renews_at_a_sidecar(fleet: SecureFleet, identity: Identity) -> None:
    channel = await fleet.channel(identity, Identity.SIDECAR, fleet.sidecars[0].address)
    stub = sidecar_pb2_grpc.SidecarServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.Renew(sidecar_pb2.RenewRequest(engine_id="x"), timeout=DEADLINE_S)
    assert refusal.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert isinstance(error := error_from_rpc(refusal.value), NotAllowed)
    assert str(error) == f"{identity.value} may not call kvlease.v1.SidecarService/Renew"


async def test_a_watch_is_refused_as_a_call_is(fleet: SecureFleet) -> None:
    channel = await fleet.channel(Identity.SIDECAR, Identity.REGISTRY, fleet.registry_address)
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    watch: Any = stub.WatchLeases(registry_pb2.WatchLeasesRequest(), timeout=DEADLINE_S)
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await watch.read()
    assert isinstance(error_from_rpc(refusal.value), NotAllowed)


async def test_an_operators_release_leaves_a_line_with_who_asked_for_what(
    fleet: SecureFleet, caplog: pytest.LogCaptureFixture
) -> None:
    channel = await fleet.channel(Identity.OPERATOR, Identity.REGISTRY, fleet.registry_address)
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    with caplog.at_level(logging.INFO, logger="kvlease.audit"):
        await stub.ReleaseLease(registry_pb2.ReleaseLeaseRequest(lease_id=0xAB), timeout=DEADLINE_S)
    (line,) = [record.__dict__ for record in caplog.records if record.name == "kvlease.audit"]
    assert line["caller"] == "kvlease-operator"
    assert line["method"] == "kvlease.v1.RegistryService/ReleaseLease"
    assert (line["lease_id"], line["outcome"]) == ("00000000000000ab", "done")


async def test_a_refused_call_leaves_a_line_as_well(
    fleet: SecureFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvlease.audit")
    channel = await fleet.channel(Identity.ROUTER, Identity.REGISTRY, fleet.registry_address)
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.DrainEngine(registry_pb2.DrainEngineRequest(engine_id="sim-1"), timeout=DEADLINE_S)
    (line,) = [record.__dict__ for record in caplog.records if record.name == "kvlease.audit"]
    assert (line["caller"], line["engine_id"], line["outcome"]) == ("kvlease-router", "sim-1", "NotAllowed")


async def kvlease(*arguments: str) -> tuple[int, str]:
    """Exit status and output of a command of the operator's."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kvlease.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, (output + errors).decode()


async def test_an_operators_command_shows_its_certificate_and_is_unheard_without_one(
    fleet: SecureFleet,
) -> None:
    asked = ("health", "--registry", fleet.registry_address, "--sidecar", fleet.sidecars[0].address)
    operator = fleet.certificates(Identity.OPERATOR)
    assert (await kvlease(*asked, "--tls-dir", operator))[0] == 0
    assert (await kvlease(*asked))[0] == 3
    status, said = await kvlease(
        "engines", "--registry", fleet.registry_address, "--tls-dir", fleet.certificates(Identity.SIDECAR)
    )
    assert status == 1
    assert "kvlease-sidecar may not call kvlease.v1.RegistryService/ListEngines" in said


async def test_processes_take_up_the_certificates_of_another_authority_without_a_restart(
    fleet: SecureFleet,
) -> None:
    tls = Tls(fleet.certificates(Identity.OPERATOR))
    channels = Channels(Identity.REGISTRY, tls=tls)
    fleet.stack.push_async_callback(channels.close)

    async def listed() -> int:
        stub = registry_pb2_grpc.RegistryServiceStub(await channels.get(fleet.registry_address))
        answer = await stub.ListEngines(registry_pb2.ListEnginesRequest(), timeout=DEADLINE_S)
        return len(answer.engines)

    async with asyncio.timeout(DEADLINE_S):
        while await listed() < 2:
            await asyncio.sleep(0.01)
    replaced = Authority()
    for identity in (Identity.REGISTRY, Identity.ROUTER):
        replaced.issue(Path(fleet.certificates(identity)), identity.value)
    old = Channels(Identity.REGISTRY, tls=tls)
    fleet.stack.push_async_callback(old.close)
    stub = registry_pb2_grpc.RegistryServiceStub(await old.get(fleet.registry_address))
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        await stub.ListEngines(registry_pb2.ListEnginesRequest(), timeout=DEADLINE_S)
    assert isinstance(error_from_rpc(refusal.value), HolderUnreachable)

    replaced.issue(Path(fleet.certificates(Identity.OPERATOR)), Identity.OPERATOR.value)
    assert await listed() == 2
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{fleet.router_url}/health", ssl=tls.client_context()) as response,
    ):
        assert response.status in (200, 503)


async def test_an_engine_that_asks_for_certificates_answers_nobody_without(fleet: SecureFleet) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not (engines := await fleet.store.list_engines()):
            await asyncio.sleep(0.01)
    url = f"{engines[0].url}/v1/models"
    context = ssl.create_default_context(cafile=f"{fleet.certificates(Identity.ROUTER)}/ca.crt")
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(url, ssl=context)
        known = Tls(fleet.certificates(Identity.ROUTER)).client_context()
        async with session.get(url, ssl=known) as response:
            assert response.status == 200


async def test_a_router_sends_no_request_to_an_engine_that_another_authority_signed(
    fleet: SecureFleet,
) -> None:
    stranger = Tls(str(Authority().issue(fleet.directory / "stranger")))
    received: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        received.append(request.path)
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    fleet.stack.push_async_callback(runner.cleanup)
    context = stranger.server_context(clients_have_certificates=False)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}/health"
    async with HttpEngines(Tls(fleet.certificates(Identity.ROUTER))) as engines:
        with pytest.raises(LegError) as refusal:
            async with engines.call("GET", url, {}, None, DEADLINE_S):
                pass
    assert not refusal.value.sent
    async with HttpEngines(stranger) as engines, engines.call("GET", url, {}, None, DEADLINE_S) as reply:
        assert reply.status == 200
    assert received == ["/health"]


def test_files_that_do_not_fit_together_are_left_aside_and_the_ones_before_stay(tmp_path: Path) -> None:
    authority = Authority()
    directory = authority.issue(tmp_path / "own", "kvlease-router")
    tls = Tls(str(directory))
    before = tls.certificates()
    other = authority.issue(tmp_path / "other", "kvlease-router")
    (other / CERTIFICATE_FILE).rename(directory / CERTIFICATE_FILE)
    assert tls.certificates() is before
    authority.issue(directory, "kvlease-router")
    assert tls.certificates().certificate != before.certificate


def test_certificates_that_cannot_be_used_are_refused_by_the_setting_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="tls_dir: cannot use"):
        make_tls(RouterConfig(tls_dir=str(tmp_path)))
    assert make_tls(RouterConfig()) is None


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:7700", True),
        ("[::1]:7700", True),
        ("localhost:0", True),
        ("unix:/run/kvlease/sidecar.sock", True),
        ("0.0.0.0:7700", False),
        ("[::]:7700", False),
        ("sidecar-0.pods:7720", False),
    ],
)
def test_a_port_that_other_machines_reach_is_told_from_a_local_one(address: str, local: bool) -> None:
    assert is_local(address) is local


async def test_a_server_for_other_machines_without_tls_warns(caplog: pytest.LogCaptureFixture) -> None:
    for listen in ("127.0.0.1:0", "0.0.0.0:0"):
        server = GrpcServer(listen, [])
        server.bind()
        await server.start()
        await server.stop(0.0)
    warned = [record.__dict__["address"] for record in caplog.records if "without TLS" in record.message]
    assert warned == ["0.0.0.0:0"]
