"""Real engines that serve and ask for certificates: mutual TLS on every hop but NIXL's own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from tests.engine.pair import MODEL, request_body
from tests.rpc.test_tls import SecureFleet

from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SYSTEM, THIRD
from kvlease.dev.completion import complete
from kvlease.dev.engine_env import ensure_engine_environment
from kvlease.dev.engine_process import EngineProcess, EngineSpec, free_ports
from kvlease.dev.engine_process import EngineRole as ProcessRole
from kvlease.dev.tiny_model import ensure_tiny_model
from kvlease.runtime.identity import Identity
from kvlease.runtime.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, Tls

pytestmark = pytest.mark.asyncio(loop_scope="module")

READY_S = 600.0


class SecureEngines(SecureFleet):
    """The fleet with real engines, started with the flags that deploy/kubernetes has."""

    async def run_engine(self, role: EngineRole, port: int, socket_dir: str, certificates: Path) -> None:
        (side_channel_port,) = free_ports(1)
        engine = EngineProcess(
            EngineSpec(
                role=ProcessRole(role.value),
                python=ensure_engine_environment(),
                model=ensure_tiny_model(),
                log_file=self.directory / f"{role.value}.log",
                port=port,
                side_channel_port=side_channel_port,
                socket_dir=Path(socket_dir),
                served_model_name=MODEL,
                kvlease_config={"pin_wait_s": 20.0},
                extra_arguments=(
                    *("--ssl-certfile", str(certificates / CERTIFICATE_FILE)),
                    *("--ssl-keyfile", str(certificates / KEY_FILE)),
                    *("--ssl-ca-certs", str(certificates / CA_FILE)),
                    *("--ssl-cert-reqs", "2"),
                    "--enable-ssl-refresh",
                ),
            )
        )
        await engine.start()
        self.stack.push_async_callback(engine.stop)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(engines_lock: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureEngines]:
    async with AsyncExitStack() as stack:
        fleet = SecureEngines(tmp_path_factory.mktemp("t"), stack)
        await fleet.start()
        yield fleet


async def both_engines_are_ready(session: aiohttp.ClientSession, fleet: SecureEngines) -> None:
    """The router knows both, and both answer: an engine registers before it listens."""
    ready = 0
    async with asyncio.timeout(READY_S):
        while ready < 2:
            await asyncio.sleep(0.2)
            async with session.get(f"{fleet.router_url}/health") as response:
                known = sum((await response.json())["engines"].values())
            engines = await fleet.store.list_engines() if known == 2 else ()
            ready = sum([await answers(session, engine.url) for engine in engines])


async def answers(session: aiohttp.ClientSession, engine_url: str) -> bool:
    try:
        async with session.get(f"{engine_url}/health") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_turns_are_served_and_read_back_with_certificates_on_every_hop(fleet: SecureEngines) -> None:
    context = Tls(fleet.certificates(Identity.OPERATOR)).client_context()
    timeout = aiohttp.ClientTimeout(total=300)
    connector = aiohttp.TCPConnector(ssl=context)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await both_engines_are_ready(session, fleet)
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": FIRST}]
        routes = []
        for question in (THIRD, ""):
            body = {**request_body(messages), "conversation_id": "secure"}
            reply, headers = await complete(session, fleet.router_url, body)
            routes.append(headers["X-Kvlease-Route"].partition(";")[0])
            assert len(reply.token_ids) == body["max_tokens"]
            messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": question}]
        assert routes == ["recompute", "readback"], headers["X-Kvlease-Route"]
        engines = await fleet.store.list_engines()
        assert all(engine.url.startswith("https://") for engine in engines)
    async with aiohttp.ClientSession(timeout=timeout) as stranger:
        for engine in engines:
            with pytest.raises(aiohttp.ClientError):
                await stranger.get(f"{engine.url}/health", ssl=False)
