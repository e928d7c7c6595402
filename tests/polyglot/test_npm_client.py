"""OpenAI's official client for Node, unmodified, against a router."""

import asyncio
import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

import pytest

from kvlease.core.records import EngineRole
from kvlease.runtime.child_process import tied_to_this_process
from stubs.engines import StubEngine
from stubs.router import LONG, running_stack

SOURCE = Path(__file__).parent / "npm"
INSTALL_S = 300.0
RUN_S = 120.0

pytestmark = [pytest.mark.polyglot, pytest.mark.timeout(INSTALL_S + 2 * RUN_S)]


@pytest.fixture
def node() -> str:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        message = "OpenAI's client for Node is left out: node or npm is not installed"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return node


async def _run(*command: str, directory: Path, timeout_s: float) -> str:
    process = await asyncio.create_subprocess_exec(
        *tied_to_this_process(command),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), timeout_s)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{output.decode()}\n{errors.decode()}"
    return output.decode()


async def _installed() -> Path:
    """A directory of the user's cache with the client in it, for as long as its lock file does not change."""
    lock = (SOURCE / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlease"
    directory = cache / f"npm-client-{sha256(lock).hexdigest()[:12]}"
    if not (directory / "node_modules" / ".package-lock.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(SOURCE / name, directory)
        await _run(
            str(shutil.which("npm")), "ci", "--silent", "--no-audit", "--no-fund",
            directory=directory, timeout_s=INSTALL_S,
        )  # fmt: skip
    shutil.copy(SOURCE / "client.mjs", directory)
    return directory


async def test_openais_client_for_node_is_served_like_any(node: str) -> None:
    directory = await _installed()
    text = "tell me something about lighthouses " * 8
    async with running_stack() as stack:
        await stack.add(StubEngine("prefill-1", EngineRole.PREFILL))
        await stack.add(StubEngine("decode-1", EngineRole.DECODE))
        printed = await _run(
            node, "client.mjs", stack.router.url + "/v1", text, LONG, directory=directory, timeout_s=RUN_S
        )
    assert json.loads(printed) == {
        "firstRoute": "recompute; first_turn",
        "streamed": "hello",
        "outputText": "hello",
        "previous": True,
        "nextRoute": "readback; long_suffix",
        "lastEvent": "response.completed",
        "models": ["tiny"],
        "error": {"status": 404, "code": "previous_response_not_found", "isClients": True},
    }
