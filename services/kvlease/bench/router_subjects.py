"""The routers that are measured: ours, and peers from environments of their own, each over the same two engines."""

import asyncio
import os
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvlease.bench.router_fakes import FakeFleet
from kvlease.core.errors import InvalidArgument

PEERS = Path.home() / ".cache" / "kvlease" / "peers"
OURS = "kvlease"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

INSTALL = {
    "vllm-router": "vllm-router==0.1.17",
    "smg": "smg==1.13.0",
    "example": "fastapi httpx uvicorn",
}
"""Peer -> what its environment holds; `--against` names them."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A router that runs.

    Attributes:
        pid: its first process; those that it started count as well.
    """

    name: str
    url: str
    pid: int

    def cpu_s(self) -> float:
        """Seconds of CPU that its processes took so far."""
        return sum(_cpu_s(pid) for pid in _tree(self.pid))

    def rss_mib(self) -> float:
        """Memory of its processes."""
        return sum(_rss_mib(pid) for pid in _tree(self.pid))


def require_installed(name: str) -> None:
    """Raises `InvalidArgument` when a peer is nobody that can be started here."""
    if name not in INSTALL:
        raise InvalidArgument(f"no router {name!r}; known are {', '.join(INSTALL)}")
    directory = PEERS / name
    if not (directory / "bin" / "python").exists():
        raise InvalidArgument(
            f"{name} is not installed: python -m venv {directory} && "
            f"{directory}/bin/pip install {INSTALL[name]}"
        )


def command(name: str, port: int, fleet: FakeFleet) -> list[str]:
    """How a router is started that is ours, or is installed."""
    if name == OURS:
        return [
            *(sys.executable, "-m", "kvlease.cli", "router", "--registry", fleet.registry),
            *("--listen", f"127.0.0.1:{port}", "--grpc-listen", "127.0.0.1:0"),
            *("--admin-listen", "127.0.0.1:0", "--log-level", "warning"),
        ]
    binaries = PEERS / name / "bin"
    engines = ["--prefill", fleet.prefill, "--decode", fleet.decode]
    here = ["--host", "127.0.0.1", "--port", str(port)]
    if name == "example":
        script = Path(__file__).with_name("router_example.py")
        return [str(binaries / "python"), str(script), str(port), fleet.prefill, fleet.decode]
    if name == "smg":
        flags = ["--pd-disaggregation", "--backend", "vllm", "--policy", "round_robin"]
        return [
            *(str(binaries / "smg"), "launch", *here, *flags, *engines),
            *("--prometheus-port", str(free_port()), "--log-level", "error", "--disable-tokenizer-autoload"),
        ]
    flags = ["--vllm-pd-disaggregation", "--policy", "round_robin", "--log-level", "error"]
    return [
        str(binaries / "vllm-router"),
        *here,
        *flags,
        *engines,
        "--prometheus-port",
        str(free_port()),
    ]


@asynccontextmanager
async def started(name: str, fleet: FakeFleet, log: Path) -> AsyncGenerator[Subject]:
    """A router that answers requests; ended with the context.

    Raises:
        InvalidArgument: it cannot be started, or does not answer in time.
    """
    port = free_port()
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command(name, port, fleet), stdout=output, stderr=output, start_new_session=True
        )
    try:
        subject = Subject(name, f"http://127.0.0.1:{port}", process.pid)
        await _ready(subject, process, log)
        yield subject
    finally:
        await stop(process)


async def stop(process: asyncio.subprocess.Process) -> None:
    """Ends a process that this one started."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def _ready(subject: Subject, process: asyncio.subprocess.Process, log: Path) -> None:
    body = {"model": "bench", "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}
    try:
        async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
            while process.returncode is None:
                try:
                    async with session.post(subject.url + "/v1/chat/completions", json=body) as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
    except TimeoutError:
        pass
    raise InvalidArgument(f"{subject.name} does not answer: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-500:]


def _tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    try:
        below = [int(child) for child in children.read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(one for child in below for one in _tree(child))]


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _rss_mib(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)
