"""Where and from which code a figure comes."""

import os
import platform
import subprocess
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")


def machine() -> dict[str, str | int]:
    """The machine and the commit, for the head of a report."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str:
    """The commit of the code that runs, with `+` when its tree was changed; empty outside of a clone."""
    git = ("git", "-C", str(Path(__file__).parent))
    try:
        head = subprocess.run((*git, "rev-parse", "--short=12", "HEAD"), capture_output=True, check=True)
        state = subprocess.run((*git, "status", "--porcelain"), capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.decode().strip() + ("+" if state.stdout.strip() else "")


def _cpu_model() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor())
