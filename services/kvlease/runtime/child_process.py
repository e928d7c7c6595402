"""Command lines of processes that end when their parent does, however that ends."""

import os
import sys
from collections.abc import Sequence

# Asks the kernel for SIGTERM when the parent ends, then becomes the process. A fork hook of the parent would
# do the same, but is unsafe in a process that has threads (gRPC's).
_LAUNCHER = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def tied_to_this_process(command: Sequence[str]) -> tuple[str, ...]:
    """The command line that runs `command`, whose first part is a path, for as long as this process lives."""
    return (sys.executable, "-S", "-E", "-c", _LAUNCHER, str(os.getpid()), *command)
