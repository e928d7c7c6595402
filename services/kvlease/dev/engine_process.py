"""One real vLLM engine (CPU build) as a child process.

The engine runs in the engine environment (`kvlease.dev.engine_env`) and imports kvlease from this clone
through PYTHONPATH. It ends when its parent does, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvlease.runtime.child_process import tied_to_this_process

HOST = "127.0.0.1"
BLOCK_TOKENS = 32  # the CPU backend wants a multiple of 32
MODEL_TOKENS_MAX = 8192
READY_TIMEOUT_S = 240.0
STOP_TIMEOUT_S = 8.0
LOG_LINES_SHOWN = 30
PROGRESS_THREAD_NICE = 10

PATIENT_CONNECTOR: Mapping[str, Any] = {"pin_wait_s": 10.0, "read_part_s": 30.0}
"""Settings of connectors for engines of the CPU build, which spin on every core: an answer that takes a millisecond
elsewhere may take long, and is young enough to be used whenever it was waited for."""

_LISTENING_PORTS = range(10_240, 32_768)
"""Below the ports that Linux gives to outgoing connections by default."""

# Without its bytecode cache vLLM takes three times as long to import.
_NOT_INHERITED = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")

_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_REPOSITORY_ROOT = _SOURCE_ROOT.parent

_CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Scheduler and worker share a process, as on a GPU without tensor parallelism: one import of vLLM less to
    # wait for and 1 GB less memory. "1" puts the worker in a process of its own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",  # more threads than cores only spin
}


class EngineRole(StrEnum):
    """What an engine does in the fleet."""

    PREFILL = "prefill"
    DECODE = "decode"


class ConnectorChoice(StrEnum):
    """Which KV connector an engine loads: kvlease's, or vLLM's own NIXL connector for comparison."""

    KVLEASE = "kvlease"
    STOCK = "stock"


class Device(StrEnum):
    """What an engine computes on."""

    CPU = "cpu"
    CUDA = "cuda"


class EngineProcessError(RuntimeError):
    """The engine ended or did not become ready; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class EngineSpec:
    """Everything that one engine is started with."""

    role: EngineRole
    python: Path
    """Interpreter of the engine environment."""
    model: Path
    log_file: Path
    port: int
    """HTTP port of the OpenAI API, on 127.0.0.1."""
    side_channel_port: int
    """Port on which NIXL metadata is handed to peers."""
    connector: ConnectorChoice = ConnectorChoice.KVLEASE
    socket_dir: Path | None = None
    """Folder of the unix socket between connector and sidecar; required with the kvlease connector.
    Keep it short: the path of a unix socket has at most 107 bytes."""
    device: Device = Device.CPU
    gpu: int = 0
    """Index of the GPU, for `Device.CUDA`."""
    served_model_name: str = "tiny-qwen3"
    kvlease_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More entries of `kv_connector_extra_config.kvlease`."""
    stock_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More entries of the stock connector's `kv_connector_extra_config`."""
    connector_module: str = "kvlease_vllm.connector"
    """Module that holds `KvleaseConnector`; tests name a module with faults planted."""
    connector_path: Path | None = None
    """Folder to import that module from, when it is not kvlease's own."""
    otlp_endpoint: str = ""
    """http://host:port of the OTLP/gRPC collector that gets the engine's traces; empty: none."""
    extra_arguments: tuple[str, ...] = ()
    """Appended to the command line, so that they override what is set here."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    """Overrides of the environment variables set here."""

    def __post_init__(self) -> None:
        if self.connector is ConnectorChoice.KVLEASE and self.socket_dir is None:
            raise ValueError("the kvlease connector needs socket_dir")

    @property
    def base_url(self) -> str:
        """The engine's HTTP address, without a trailing slash."""
        return f"http://{HOST}:{self.port}"

    def kv_transfer_config(self) -> dict[str, Any]:
        """Returns vLLM's `--kv-transfer-config`. It never sets engine_id: vLLM draws one per start."""
        if self.connector is ConnectorChoice.KVLEASE:
            return {
                "kv_connector": "KvleaseConnector",
                "kv_connector_module_path": self.connector_module,
                "kv_role": "kv_both",
                "kv_buffer_device": self.device.value,
                "kv_connector_extra_config": {
                    "backends": ["UCX"],
                    "kvlease": {"socket_dir": str(self.socket_dir), **self.kvlease_config},
                },
            }
        return {
            "kv_connector": "NixlConnector",
            "kv_buffer_device": self.device.value,
            "kv_role": "kv_producer" if self.role is EngineRole.PREFILL else "kv_consumer",
            "kv_connector_extra_config": {
                "backends": ["UCX"],
                "bidirectional_kv_xfer": True,
                "kv_recompute_threshold": 64,
                **self.stock_config,
            },
        }

    def command(self) -> list[str]:
        """Returns the command line of `vllm serve`."""
        options = {
            "--served-model-name": self.served_model_name,
            "--host": HOST,
            "--port": str(self.port),
            "--dtype": "float32",
            "--block-size": str(BLOCK_TOKENS),
            "--max-model-len": str(MODEL_TOKENS_MAX),
            "--max-num-seqs": "16",
            "--max-num-batched-tokens": "2048",
            "--uvicorn-log-level": "warning",
            "--kv-transfer-config": json.dumps(self.kv_transfer_config(), separators=(",", ":")),
        }
        if self.otlp_endpoint:
            options["--otlp-traces-endpoint"] = self.otlp_endpoint
        flags = ("--enforce-eager", "--enable-prefix-caching")
        values = [part for option in options.items() for part in option]
        module = ("-m", "vllm.entrypoints.cli.main", "serve")
        return [str(self.python), *module, str(self.model), *values, *flags, *self.extra_arguments]

    def process_environment(self, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Returns the environment variables of the process."""
        roots = [str(_SOURCE_ROOT), str(_REPOSITORY_ROOT / "connector")]
        if self.device is Device.CUDA:
            # vLLM is where this environment has it; the CPU build has an environment of its own.
            roots += [path for path in (inherited.get("PYTHONPATH"),) if path]
        roots += [str(self.connector_path)] if self.connector_path is not None else []
        kept = {name: value for name, value in inherited.items() if name not in _NOT_INHERITED}
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join(roots),
            "PYTHONUNBUFFERED": "1",
            **(_CPU_ENVIRONMENT if self.device is Device.CPU else {"CUDA_VISIBLE_DEVICES": str(self.gpu)}),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "UCX_LOG_LEVEL": "warn",
            **self.environment,
        }


class EngineProcess:
    """Starts, awaits and stops one engine. Not for use from several tasks at once."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        self._process: asyncio.subprocess.Process | None = None

    @property
    def base_url(self) -> str:
        """The engine's HTTP address, without a trailing slash."""
        return self.spec.base_url

    @property
    def pid(self) -> int:
        """Process id of the API server, which also leads the process group of the engine's children."""
        return self._started().pid

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Starts the process and returns at once. Raises OSError when it cannot be executed.

        Cancelled, it has started a process that `stop` ends, with the children that it has by then.
        """
        if self.running:
            raise RuntimeError("the engine is already running")
        self.spec.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log_file.open("wb") as log:
            created = asyncio.ensure_future(
                asyncio.create_subprocess_exec(
                    *tied_to_this_process(self.spec.command()),
                    env=self.spec.process_environment(),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            try:
                self._process = await asyncio.shield(created)
            except asyncio.CancelledError:
                self._process = await created
                raise

    async def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Waits until the API answers /health and returns the seconds waited.

        Raises EngineProcessError when the process ends first or `timeout_s` passes.
        """
        process = self._started()
        began_s = time.monotonic()
        while time.monotonic() - began_s < timeout_s:
            if process.returncode is not None:
                raise EngineProcessError(self._with_log(f"ended with status {process.returncode}"))
            if await _answers_health(self.spec.port):
                return time.monotonic() - began_s
            lower_progress_threads(process.pid)
            await asyncio.sleep(0.2)
        raise EngineProcessError(self._with_log(f"was not ready within {timeout_s:.0f} s"))

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the engine and all its children; idempotent. Kills what is left after `timeout_s`."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            # A stopped process acts on the signal only when continued.
            self.signal_group(signal.SIGCONT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), timeout_s)
        self.signal_group(signal.SIGKILL)
        await process.wait()

    async def kill(self) -> None:
        """Kills the engine and all its children at once, as a crash would."""
        self.signal_group(signal.SIGKILL)
        await self._started().wait()

    def signal_group(self, number: signal.Signals) -> None:
        """Sends a signal to the API server and the engine core alike (SIGSTOP, SIGCONT, SIGKILL)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._started().pid, number)

    def log_tail(self, lines: int = LOG_LINES_SHOWN) -> str:
        """Returns the last lines of the engine's log."""
        if not self.spec.log_file.exists():
            return ""
        with self.spec.log_file.open(errors="replace") as log:
            return "".join(deque(log, maxlen=lines))

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError("the engine was not started")
        return self._process

    def _with_log(self, what: str) -> str:
        where = self.spec.log_file
        return f"the {self.spec.role} engine {what}; its log {where} ends with:\n{self.log_tail()}"


def free_ports(count: int) -> list[int]:
    """Returns `count` distinct TCP ports that are free on 127.0.0.1 right now.

    No outgoing connection takes one of them meanwhile: an engine binds its ports half a minute after its start.
    """
    free: list[int] = []
    for port in random.sample(_LISTENING_PORTS, len(_LISTENING_PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            free.append(port)
        if len(free) == count:
            return free
    raise OSError(f"fewer than {count} ports are free on {HOST}")


def lower_progress_threads(group: int) -> None:
    """Lowers the priority of the NIXL progress threads of one process group; best effort.

    NIXL's Python binding leaves its progress thread without a delay, so it spins: with two engines on
    two cores, half of the machine. At a lower priority it spins on what nobody else wants. NIXL starts
    it right after UCX's own thread, which is called "async"; it has no name itself.
    """
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != group:
                continue
            threads = sorted(int(entry.name) for entry in (process / "task").iterdir())
            named = [tid for tid in threads if (process / f"task/{tid}/comm").read_text() == "async\n"]
            later = [tid for tid in threads if named and tid > named[0]]
            if later and os.getpriority(os.PRIO_PROCESS, later[0]) < PROGRESS_THREAD_NICE:
                os.setpriority(os.PRIO_PROCESS, later[0], PROGRESS_THREAD_NICE)
        except OSError:
            continue  # ended meanwhile


async def _answers_health(port: int) -> bool:
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(HOST, port)
            try:
                writer.write(f"GET /health HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode())
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return b" 200 " in status_line
