"""Engine processes: their command line, and how their end is seen and told."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlease.dev.engine_process import (
    ConnectorChoice,
    EngineProcess,
    EngineProcessError,
    EngineRole,
    EngineSpec,
    free_ports,
)
from stubs.waiting import eventually, is_alive

SERVER = """#!{python}
import http.server, os, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *arguments): pass
child = subprocess.Popen(["sleep", "600"])
print("child", child.pid, flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def spec_of(tmp_path: Path, script: str, **changes: object) -> EngineSpec:
    program = tmp_path / "python"
    program.write_text(script.format(python=sys.executable))
    program.chmod(0o755)
    port, side_channel_port = free_ports(2)
    values: dict[str, object] = {
        "role": EngineRole.DECODE,
        "python": program,
        "model": tmp_path / "model",
        "log_file": tmp_path / "logs" / "decode.log",
        "port": port,
        "side_channel_port": side_channel_port,
        "connector": ConnectorChoice.STOCK,
    }
    return EngineSpec(**{**values, **changes})  # type: ignore[arg-type]


def test_the_kvlease_connector_is_configured_without_an_engine_id(tmp_path: Path) -> None:
    spec = spec_of(
        tmp_path,
        "",
        connector=ConnectorChoice.KVLEASE,
        socket_dir=Path("/run/d0"),
        kvlease_config={"retention_budget": 0.25},
    )
    config = spec.kv_transfer_config()
    assert "engine_id" not in config
    assert config["kv_role"] == "kv_both"
    assert config["kv_connector_extra_config"]["kvlease"] == {
        "socket_dir": "/run/d0",
        "retention_budget": 0.25,
    }
    command = spec.command()
    assert json.loads(command[command.index("--kv-transfer-config") + 1]) == config


def test_the_kvlease_connector_needs_a_folder_for_its_socket(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="socket_dir"):
        spec_of(tmp_path, "", connector=ConnectorChoice.KVLEASE)


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_the_stock_connector_takes_its_role_from_the_engine(tmp_path: Path, role: str, kv_role: str) -> None:
    assert spec_of(tmp_path, "", role=EngineRole(role)).kv_transfer_config()["kv_role"] == kv_role


def test_the_stock_connector_can_be_tuned(tmp_path: Path) -> None:
    tuned = {"enable_cross_layers_blocks": "True"}
    extra = spec_of(tmp_path, "", stock_config=tuned).kv_transfer_config()["kv_connector_extra_config"]
    assert extra.items() >= {**tuned, "bidirectional_kv_xfer": True}.items()


def test_what_a_test_asks_for_overrides_the_defaults(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "", extra_arguments=("--block-size", "64"), environment={"UCX_TLS": "tcp"})
    assert spec.command()[-2:] == ["--block-size", "64"]
    environment = spec.process_environment({"PATH": "/bin", "PYTHONHOME": "/x"})
    assert (environment["UCX_TLS"], environment["PATH"]) == ("tcp", "/bin")
    assert "PYTHONHOME" not in environment


async def test_an_engine_is_ready_when_it_answers_and_its_children_end_with_it(tmp_path: Path) -> None:
    engine = EngineProcess(spec_of(tmp_path, SERVER))
    await engine.start()
    try:
        assert await engine.wait_ready(timeout_s=30) < 30
        child = int(engine.log_tail().split()[1])
        assert engine.running
        assert is_alive(child)
    finally:
        await engine.stop()
    assert not engine.running
    await eventually(lambda: not is_alive(child))
    await engine.stop()


async def test_an_engine_that_ends_early_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    engine = EngineProcess(spec_of(tmp_path, "#!/bin/sh\necho no such model\nexit 3\n"))
    await engine.start()
    with pytest.raises(EngineProcessError, match=r"decode engine ended with status 3(?s:.*)no such model"):
        await engine.wait_ready(timeout_s=30)


async def test_an_engine_that_never_answers_is_given_up(tmp_path: Path) -> None:
    engine = EngineProcess(spec_of(tmp_path, "#!/bin/sh\nexec sleep 600\n"))
    await engine.start()
    try:
        with pytest.raises(EngineProcessError, match="not ready within"):
            await engine.wait_ready(timeout_s=0.3)
    finally:
        await engine.kill()


async def test_an_engine_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho $$ > " + str(tmp_path / "pid") + "\nexec sleep 600\n")
    program.chmod(0o755)
    parent_code = (
        "import asyncio, sys; from pathlib import Path\n"
        "from kvlease.dev.engine_process import *\n"
        "async def main():\n"
        "    root = Path(sys.argv[1])\n"
        "    spec = EngineSpec(EngineRole.DECODE, root / 'python', root, root / 'log', 1, 2, 'stock')\n"
        "    await EngineProcess(spec).start(); await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", parent_code, str(tmp_path))
    async with asyncio.timeout(30):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            await asyncio.sleep(0.02)
    engine = int((tmp_path / "pid").read_text())
    assert os.getpgid(engine) == engine
    parent.kill()
    await parent.wait()
    await eventually(lambda: not is_alive(engine))


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(20))) == 20


async def test_a_start_that_is_cancelled_leaves_no_process_that_cannot_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, created, may_go_on = asyncio.create_subprocess_exec, asyncio.Event(), asyncio.Event()

    async def create_slowly(*arguments: str, **options: Any) -> asyncio.subprocess.Process:
        process = await create(*arguments, **options)
        created.set()
        await may_go_on.wait()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", create_slowly)
    engine = EngineProcess(spec_of(tmp_path, SERVER))
    starting = asyncio.create_task(engine.start())
    await created.wait()
    starting.cancel()
    asyncio.get_running_loop().call_soon(may_go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.running
    await engine.stop()
    assert not engine.running
