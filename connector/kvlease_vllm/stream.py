"""A thread that holds a stream to the sidecar, and comes back when it breaks."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import grpc

from kvlease.v1 import connector_pb2_grpc

logger = logging.getLogger("vllm.kvlease.stream")

SOCKET_NAME = "sidecar.sock"
PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 2.0
MESSAGE_BYTES_MAX = 64 << 20

Stub = connector_pb2_grpc.ConnectorServiceStub


class Cancellable(Protocol):
    """A call that can be ended from another thread."""

    def cancel(self) -> bool: ...


class StreamThread:
    """Connects to the sidecar's unix socket again and again, with a pause in between.

    Args:
        hold: opens a stream with the stub, tells `opened`, and returns when the stream has ended.
    """

    def __init__(self, name: str, socket_dir: str, hold: Callable[[Stub], None]) -> None:
        self.address = f"unix:{Path(socket_dir) / SOCKET_NAME}"
        self._hold = hold
        self._stop = threading.Event()
        self._stream: Cancellable | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread; call in the process that serves, never before a fork."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the stream and the thread, within a second. Idempotent."""
        self._stop.set()
        self.restart()
        if self._thread.ident is not None:
            self._thread.join(1.0)

    def restart(self) -> None:
        """Breaks the stream; the next one begins."""
        if (stream := self._stream) is not None:
            stream.cancel()

    def opened(self, stream: Cancellable) -> None:
        """Remembers the stream, so that it can be broken."""
        self._stream = stream
        if self._stop.is_set():
            stream.cancel()

    def _run(self) -> None:
        pause_s = PAUSE_MIN_S
        while not self._stop.is_set():
            begun_s = time.monotonic()
            try:
                self._connect()
            except grpc.RpcError as error:
                logger.debug("%s: the sidecar is not there: %s", self._thread.name, error)
            except Exception:
                logger.exception("%s: the stream to the sidecar broke", self._thread.name)
            # One that ends at once (no sidecar, or one that refuses the engine) is tried ever less often.
            lasted = time.monotonic() - begun_s > PAUSE_MAX_S
            pause_s = PAUSE_MIN_S if lasted else min(2 * pause_s, PAUSE_MAX_S)
            self._stop.wait(pause_s)

    def _connect(self) -> None:
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        with grpc.insecure_channel(self.address, options=options) as channel:
            try:
                self._hold(connector_pb2_grpc.ConnectorServiceStub(channel))
            finally:
                self._stream = None
