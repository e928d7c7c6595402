"""`kvlease health`, and what every operator's command says of wrong uses and of processes that do not answer."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvlease.core.ids import lease_id_to_hex
from kvlease.core.records import Engine
from kvlease.dev.engine_process import free_ports
from kvlease.operator.flags import base_url, host_port
from kvlease.registry.config import RegistryConfig
from kvlease.registry.server import RegistryServer
from kvlease.runtime.clock import LoopClock
from kvlease.store.memory import MemoryStore
from kvlease.store.port import Batch
from kvlease.testing.store import BreakableStore

from .conftest import Fleet, Pair, Run, address, until

# --- health ---------------------------------------------------------------------------------------------------


async def test_health_is_zero_while_registry_and_sidecars_serve(fleet: Fleet, pair: Pair, run: Run) -> None:
    sidecar = fleet.sidecars[0].address
    said = await run("health", "--registry", address(fleet), "--sidecar", sidecar, "--output", "json")
    assert (said.status, [row["status"] for row in said.json]) == (0, ["ok", "ok"])


async def test_health_of_a_sidecar_is_a_problem_until_its_store_has_answered_once(
    fleet: Fleet, run: Run
) -> None:
    fleet.store.broken = True
    sidecar = await fleet.sidecar()

    async def health() -> tuple[int, str]:
        said = await run("health", "--sidecar", sidecar.address, "--output", "json")
        return said.status, said.json[0]["status"]

    async def serves() -> bool:
        return await health() == (0, "ok")

    assert await health() == (1, "not serving")
    fleet.store.broken = False
    await until(serves)
    fleet.store.broken = True
    assert await health() == (0, "ok")


class SilentStore(BreakableStore):
    """A store whose watch of engines waits until `answers` is set, as that of an etcd that is away."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.answers = asyncio.Event()

    @asynccontextmanager
    async def watch_engines(self) -> AsyncGenerator[AsyncIterator[Batch[Engine]], None]:
        await self.answers.wait()
        async with super().watch_engines() as batches:
            yield batches


async def test_health_of_a_registry_is_a_problem_until_its_store_has_answered_once(run: Run) -> None:
    store = SilentStore()
    registry = RegistryServer(RegistryConfig(listen="127.0.0.1:0"), store, LoopClock())
    await registry.start()

    async def health() -> tuple[int, str]:
        said = await run("health", "--registry", registry.address, "--output", "json")
        return said.status, said.json[0]["status"]

    try:
        assert await health() == (1, "not serving")
        store.answers.set()

        async def serves() -> bool:
            return await health() == (0, "ok")

        await until(serves)
        store.broken = True
        assert await health() == (0, "ok")
    finally:
        await registry.stop()


async def test_health_of_what_nobody_serves_is_unreachable_in_one_line(run: Run) -> None:
    port = free_ports(1)[0]
    where = f"127.0.0.1:{port}"
    said = await run("health", "--registry", where, "--router", f"http://{where}", "--timeout-s", "2")
    assert said.status == 3
    assert said.out.count("unreachable") == 2
    assert "Traceback" not in said.out + said.err


async def test_health_of_nothing_is_a_wrong_use(run: Run) -> None:
    said = await run("health")
    assert (said.status, said.out) == (2, "")
    assert "--registry" in said.err


async def test_health_looks_into_the_environment_when_no_flag_names_anything(
    fleet: Fleet, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLEASE_REGISTRY", address(fleet))
    said = await run("health", "--output", "json")
    assert (said.status, said.json[0]["process"]) == (0, "registry")


async def test_health_of_a_process_of_another_kind_is_a_problem(fleet: Fleet, pair: Pair, run: Run) -> None:
    registry, sidecar = address(fleet), fleet.sidecars[0].address
    said = await run("health", "--registry", sidecar, "--sidecar", registry, "--output", "json")
    assert (said.status, [row["detail"] for row in said.json]) == (
        1,
        ["answers, but is no registry", "answers, but is no sidecar"],
    )


@pytest.mark.parametrize("raw", [b"", b"{}", b"[]", b"ok"])
async def test_health_of_an_engine_that_is_named_as_a_router_is_a_problem(run: Run, raw: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=raw)

    app = web.Application()
    app.router.add_get("/health", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        for more in ((), ("--live",)):
            said = await run("health", "--router", url, "--output", "json", *more)
            assert (said.status, said.json[0]["detail"]) == (1, "answers, but is no router")
    finally:
        await runner.cleanup()


async def test_health_refuses_an_address_of_the_environment_that_is_of_the_wrong_kind(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLEASE_ROUTER", "127.0.0.1:8000")
    said = await run("health")
    assert said.status == 2
    assert "KVLEASE_ROUTER" in said.err
    assert "http://127.0.0.1:8000" in said.err


# --- what makes no sense --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("health", "--registry", "http://127.0.0.1:7700"), "host:port, as 127.0.0.1:7700 is"),
        (("health", "--router", "127.0.0.1:8000"), "as http://127.0.0.1:8000 is"),
        (("health", "--router", "ftp://host:1"), "as http://127.0.0.1:8000 is"),
        (("health", "--router", "http://host:port"), "as http://127.0.0.1:8000 is"),
        (("engines", "--registry", "https://registry:7700"), "host:port, as 127.0.0.1:7700 is"),
        (("engines", "--registry", "registry"), "host:port, as 127.0.0.1:7700 is"),
        (("engines", "--registry", "registry:70000"), "host:port, as 127.0.0.1:7700 is"),
        (("engines", "--registry", "::1:7700"), "host:port, as 127.0.0.1:7700 is"),
        (("conversation", "c", "--routing", "http://127.0.0.1:8000"), "host:port, as 127.0.0.1:7700 is"),
        (("explain", "--router", "127.0.0.1:8000", "--turn", "t"), "as http://127.0.0.1:8000 is"),
        (("top", "--count", "0"), "a whole number from 1 on"),
        (("top", "--count", "-1"), "a whole number from 1 on"),
        (("leases", "watch", "--count", "0"), "a whole number from 1 on"),
    ],
)
async def test_a_wrong_use_is_refused_with_what_is_wanted(
    run: Run, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], wanted: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        await run(*arguments)
    assert refused.value.code == 2
    assert wanted in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        await run(*arguments, "--output", "json")
    printed = capsys.readouterr()
    assert (refused.value.code, printed.out) == (2, "")
    error = json.loads(printed.err)["error"]
    assert (error["reason"], error["exit_status"]) == ("usage", 2)
    assert wanted in error["message"]


@pytest.mark.parametrize("text", ["127.0.0.1:7700", "[::1]:7700", "registry-0.registry:1"])
def test_what_is_host_and_port_is_taken(text: str) -> None:
    assert host_port(text) == text


@pytest.mark.parametrize(
    "text", ["http://127.0.0.1:8000/", "https://router", "http://[::1]:8000", "http://h/a"]
)
def test_what_is_a_base_url_is_taken_without_the_slash_at_its_end(text: str) -> None:
    assert base_url(text) == text.rstrip("/")


@pytest.mark.parametrize(
    ("arguments", "reason", "status"),
    [
        (("leases", "get", lease_id_to_hex(7)), "not_found", 1),
        (("drain", "nobody"), "not_found", 1),
        (("health",), "usage", 2),
        (("explain",), "usage", 2),
    ],
)
async def test_what_stops_a_command_is_json_on_standard_error_where_json_is_wanted(
    fleet: Fleet, run: Run, arguments: tuple[str, ...], reason: str, status: int
) -> None:
    registry = ("--registry", address(fleet)) if arguments[0] in ("leases", "drain") else ()
    said = await run(*arguments, *registry, "--output", "json")
    error = json.loads(said.err)["error"]
    assert (said.status, said.out) == (status, "")
    assert (error["reason"], error["exit_status"]) == (reason, status)


async def test_a_silent_registry_is_json_on_standard_error_too(run: Run) -> None:
    where = f"127.0.0.1:{free_ports(1)[0]}"
    said = await run("engines", "--registry", where, "--timeout-s", "2", "--output", "json")
    assert (said.status, said.out) == (3, "")
    assert json.loads(said.err)["error"] == {
        "command": "engines",
        "message": f"the registry at {where} does not answer",
        "reason": "unreachable",
        "exit_status": 3,
    }


async def test_a_sidecar_that_is_asked_as_a_registry_is_a_problem(fleet: Fleet, pair: Pair, run: Run) -> None:
    said = await run("engines", "--registry", fleet.sidecars[0].address)
    assert said.status == 1
    assert "another kind of process" in said.err
