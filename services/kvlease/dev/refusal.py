"""What `kvlease dev` cannot do as it was asked, told before anything starts: engines take minutes to say so."""

import errno
import socket
import subprocess
from argparse import Namespace
from pathlib import Path

from kvlease.dev.engine_process import HOST, Device

ASKED_FOR_S = 60.0
"""Bound of asking an interpreter; on a busy machine its start takes seconds."""

_HAS_VLLM = "import importlib.util, sys; sys.exit(0 if importlib.util.find_spec('vllm') else 3)"


def why_refused(arguments: Namespace, port: int) -> str:
    """What is wrong with a command line as this machine is; empty when nothing is."""
    taken = why_taken(port)
    if taken:
        return f"port {port} of the OpenAI API {taken}; name another with --port"
    if arguments.engine == "sim":
        return ""
    if arguments.model is not None and not arguments.model.is_dir():
        return f"--model {arguments.model} is no directory; it must be one with a model's files"
    if arguments.device is Device.CUDA:
        return _why_no_engine(arguments.engine_python)
    return ""


def why_taken(port: int) -> str:
    """What keeps a port of this machine from being served; empty when nothing does, as with 0 (any)."""
    with socket.socket() as probe:
        # As servers do: connections of one that has ended may linger.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return "is taken" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror})"
    return ""


def _why_no_engine(python: Path) -> str:
    """Why an interpreter cannot run engines; empty when nothing is known against it."""
    try:
        asked = subprocess.run(
            (str(python), "-c", _HAS_VLLM),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASKED_FOR_S,
            check=False,
        )
    except OSError as error:
        return f"--engine-python {python} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"--engine-python {python} did not answer within {ASKED_FOR_S:.0f} s"
    if asked.returncode == 0:
        return ""
    return (
        f"{python} has no vLLM, which --device cuda needs; name an interpreter that has with --engine-python"
    )
