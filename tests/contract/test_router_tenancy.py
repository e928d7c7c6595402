"""Who is served by a router, as whom, and what of a caller reaches an engine; through its real server."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from kvlease.core.records import EngineRole
from kvlease.core.turn import TurnParams
from kvlease.router.config import RouterConfig
from kvlease.router.server import RouterServer
from kvlease.runtime.clock import LoopClock
from kvlease.store.port import Batch, Change
from kvlease.v1 import routing_pb2, routing_pb2_grpc
from stubs.engines import MODEL, StubEngine
from stubs.records import lease
from stubs.registry import StubRegistry
from stubs.router import FIRST, Stack
from stubs.waiting import eventually

MESSAGES = [{"role": "user", "content": "hello there " * 30}]


def entry(tenant: str, key: str, more: str = "") -> str:
    return f'[tenants.{tenant}]\nkey_hashes = ["sha256:{sha256(key.encode()).hexdigest()}"]\n{more}\n'


def write(path: Path, *entries: str) -> None:
    path.write_text("".join(entries))


class Site:
    """A router over one decode engine."""

    def __init__(self, router: RouterServer, registry: StubRegistry, engine: StubEngine) -> None:
        self.router = router
        self.registry = registry
        self.engine = engine

    async def send(self, method: str, path: str, key: str = "", **options: Any) -> tuple[int, Any]:
        headers = {**({"Authorization": f"Bearer {key}"} if key else {}), **options.pop("headers", {})}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.router.url + path, headers=headers, **options) as response,
        ):
            return response.status, await response.json()

    async def chat(self, key: str = "", **options: Any) -> tuple[int, Any]:
        body = {"model": MODEL, "messages": MESSAGES, "conversation_id": "c", **options.pop("fields", {})}
        return await self.send("POST", "/v1/chat/completions", key, json=body, **options)


@asynccontextmanager
async def site(**settings: Any) -> AsyncIterator[Site]:
    registry, engine = StubRegistry(), StubEngine("decode-1", EngineRole.DECODE)
    config = RouterConfig(listen="127.0.0.1:0", grpc_listen="127.0.0.1:0", stop_grace_s=0.1, **settings)
    router = RouterServer(config, LoopClock(), registry)
    await engine.start()
    await router.start()
    try:
        registry.register(engine.engine)
        built = Site(router, registry, engine)
        async with asyncio.timeout(30):
            while (await built.send("GET", "/health"))[1]["engines"]["decode"] == 0:
                pass
        yield built
    finally:
        await engine.stop()
        await router.stop()


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    write(path, entry("acme", "sk-acme"), entry("other", "sk-other"), entry("ops", "sk-ops", "admin = true"))
    return path


@pytest.mark.parametrize("key", ["", "sk-unknown"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/models"])
async def test_an_unknown_key_is_a_401_in_openais_shape_and_reaches_no_engine(
    keys: Path, key: str, path: str
) -> None:
    async with site(keys_file=str(keys)) as one:
        method = "GET" if path == "/v1/models" else "POST"
        status, body = await one.send(method, path, key, data=b"{not looked at")
        assert status == 401
        assert body["error"]["code"] == "invalid_api_key"
        assert "sk-" not in json.dumps(body)
        assert not one.engine.received


async def test_tenants_of_the_file_meet_neither_in_conversations_nor_in_caches(keys: Path) -> None:
    async with site(keys_file=str(keys)) as one:
        for key in ("sk-acme", "sk-other"):
            assert (await one.chat(key))[0] == 200
        salts = [received.body["cache_salt"] for received in one.engine.received]
        assert len(set(salts)) == 2
        for key in ("sk-acme", "sk-other"):
            status, body = await one.send("GET", "/v1/kvlease/conversations/c", key)
            assert (status, len(body["turns"])) == (200, 1)


async def test_a_key_that_the_router_checked_goes_no_further(keys: Path) -> None:
    async with site(keys_file=str(keys), engine_api_key="sk-engine") as one:
        assert (await one.chat("sk-acme", headers={"x-api-key": "sk-acme"}))[0] == 200
        headers = one.engine.received[0].headers
        assert headers["Authorization"] == "Bearer sk-engine"
        assert "x-api-key" not in headers


async def test_without_keys_of_its_own_the_router_passes_the_clients_on() -> None:
    async with site() as one:
        assert (await one.chat("sk-of-the-engine"))[0] == 200
        assert one.engine.received[0].headers["Authorization"] == "Bearer sk-of-the-engine"


@pytest.mark.parametrize("broken", ["sk-acme is no TOML", "x = " + "[" * 5000], ids=["no TOML", "deep"])
async def test_a_changed_file_counts_without_a_restart_and_a_broken_one_changes_nothing(
    keys: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    async with site(keys_file=str(keys), keys_poll_s=0.01) as one:
        write(keys, broken)
        await eventually(lambda: "stays as it was read" in caplog.text)
        assert (await one.chat("sk-acme"))[0] == 200
        write(keys, entry("acme", "sk-rotated"))
        async with asyncio.timeout(30):
            while (await one.chat("sk-rotated"))[0] != 200:
                pass
        assert (await one.chat("sk-acme"))[0] == 401
        assert "sk-" not in caplog.text


async def test_a_reload_takes_limits_and_keys_and_says_what_needs_a_restart(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with site(keys_file=str(keys), keys_poll_s=600.0) as one:
        assert (await one.chat("sk-acme"))[0] == 200
        write(keys, entry("acme", "sk-rotated"))
        with caplog.at_level("INFO"):
            one.router.reload(
                RouterConfig(
                    keys_file=str(keys), append_tokens_max=7, listen="127.0.0.1:1", keys_poll_s=600.0
                )
            )
        assert (await one.chat("sk-acme"))[0] == 401
        assert (await one.chat("sk-rotated"))[0] == 200
        told = next(record for record in caplog.records if record.message == "reloaded")
        assert "append_tokens_max" in told.__dict__["changed"]
        assert "append_tokens_max" not in told.__dict__["after_restart"]
        assert "listen" in told.__dict__["after_restart"]


async def test_a_gateway_names_the_tenant_and_nobody_else_does() -> None:
    async with site(tenant_header="X-Tenant", tenant_header_networks="127.0.0.0/8") as one:
        assert (await one.chat("sk-gateway", headers={"X-Tenant": "acme"}))[0] == 200
        assert (await one.chat("sk-gateway"))[0] == 401
        sent = one.engine.received[0].headers
        assert "X-Tenant" not in sent
        assert "Authorization" not in sent
    async with site(tenant_header="X-Tenant", tenant_header_networks="10.0.0.0/8") as one:
        assert (await one.chat("sk-gateway", headers={"X-Tenant": "acme"}))[0] == 401


async def converse(one: Site, key: str, *conversation_ids: str) -> list[int]:
    for conversation_id in conversation_ids:
        assert (await one.chat(key, fields={"conversation_id": conversation_id}))[0] == 200
    granted = [TurnParams.from_json(received.orders).keep for received in one.engine.received]
    return [keep.lease_id for keep in granted[-len(conversation_ids) :] if keep is not None]


async def test_a_tenant_releases_all_that_it_keeps_and_nothing_of_another(keys: Path) -> None:
    async with site(keys_file=str(keys)) as one:
        mine = await converse(one, "sk-acme", "c", "d")
        await converse(one, "sk-other", "c")
        status, body = await one.send("DELETE", "/v1/kvlease/tenants/self/leases", "sk-acme")
        assert (status, body) == (200, {"tenant": "acme", "leases_released": 2})
        assert sorted(one.registry.released) == sorted(mine)
        assert (await one.send("DELETE", "/v1/kvlease/tenants/acme/leases", "sk-acme"))[1][
            "leases_released"
        ] == 0


async def test_leases_that_another_router_granted_are_released_too(keys: Path) -> None:
    async with site(keys_file=str(keys)) as one:
        records = [lease(1, tenant="acme"), lease(2, b"d", tenant="other"), lease(3, b"e", tenant="acme")]
        one.registry.leases.put_nowait(Batch(tuple(Change(record) for record in records), snapshot=True))
        async with asyncio.timeout(30):
            while (await one.send("GET", "/health"))[1]["recorded_leases"] != 3:
                pass
        status, _ = await one.send("DELETE", "/v1/kvlease/tenants/acme/leases", "sk-acme")
        assert status == 200
        assert sorted(one.registry.released) == [1, 3]


async def test_only_an_admin_releases_the_leases_of_another_tenant_and_it_is_written_down(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvlease.audit")
    async with site(keys_file=str(keys)) as one:
        theirs = await converse(one, "sk-other", "c")
        assert (await one.send("DELETE", "/v1/kvlease/tenants/other/leases", "sk-acme"))[0] == 403
        assert not one.registry.released
        assert (await one.send("DELETE", "/v1/kvlease/tenants/other/leases", "sk-ops"))[0] == 200
        assert one.registry.released == theirs
    lines = [record.__dict__ for record in caplog.records if record.name == "kvlease.audit"]
    told = [(line["caller"], line["tenant"], line["outcome"]) for line in lines]
    assert told == [("acme", "other", "refused"), ("ops", "other", "done")]


async def test_operators_release_a_tenants_leases_over_grpc(keys: Path) -> None:
    async with (
        site(keys_file=str(keys)) as one,
        grpc.aio.insecure_channel(one.router.grpc_address) as channel,
    ):
        theirs = await converse(one, "sk-acme", "c")
        stub = routing_pb2_grpc.RoutingServiceStub(channel)
        response = await stub.ReleaseTenant(routing_pb2.ReleaseTenantRequest(tenant="acme"), timeout=10)
        assert (response.leases_released, one.registry.released) == (1, theirs)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ReleaseTenant(routing_pb2.ReleaseTenantRequest(), timeout=10)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("router_settings", [{}, {"pass_priority": True}], ids=["removed", "passed"])
async def test_a_priority_reaches_engines_only_where_the_router_lets_it_pass(
    stack: Stack, prefill: StubEngine, decode: StubEngine, router_settings: dict[str, Any]
) -> None:
    assert (await stack.chat(FIRST, priority=-1)).status == 200
    told = {one.body.get("priority") for one in (*prefill.received, *decode.received)}
    assert told == ({-1} if router_settings else {None})
    body = {"model": MODEL, "input": "x", "priority": -1}
    assert (await stack.send("POST", "/v1/embeddings", json=body)).status == 200
    embedded = [one for one in (*prefill.received, *decode.received) if one.path == "/v1/embeddings"]
    assert ["priority" in one.body for one in embedded] == [False]
