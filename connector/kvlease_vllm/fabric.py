"""Which RDMA devices the processes of this engine have really open.

NIXL's LIBFABRIC backend takes whichever provider libfabric finds, and without a device that is one over sockets:
it works, at a fraction of the speed. A provider over RDMA (`efa` among them) opens `/dev/infiniband/uverbs*`.
"""

import os
from pathlib import Path

DEVICE_PREFIX = "/dev/infiniband/uverbs"


def fabric_handles(proc: Path = Path("/proc"), process: int | None = None) -> int:
    """RDMA devices that a process (default: this one) and its descendants have open, in handles.

    The agents live in the worker processes, which are descendants of the EngineCore, or are the EngineCore.
    """
    family = [os.getpid() if process is None else process]
    for parent in family:
        family.extend(_children(proc, parent))
    return sum(_handles(proc, member) for member in family)


def _children(proc: Path, process: int) -> list[int]:
    found: list[int] = []
    for path in proc.glob(f"{process}/task/*/children"):
        try:
            found.extend(map(int, path.read_text().split()))
        except OSError:
            continue  # the thread has ended
    return found


def _handles(proc: Path, process: int) -> int:
    count = 0
    try:
        entries = list((proc / str(process) / "fd").iterdir())
    except OSError:
        return 0
    for entry in entries:
        try:
            count += os.readlink(entry).startswith(DEVICE_PREFIX)
        except OSError:
            continue  # closed in the meantime
    return count
