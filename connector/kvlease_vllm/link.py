"""The connector's end of the stream to its sidecar.

One daemon thread owns the stream: it attaches to the sidecar's unix socket, says Hello with all holds, hands
messages to the handler, and comes back after a pause when the stream breaks. Messages to the sidecar wait in a
bounded outbox; they are lost with the stream, since the next Hello says everything again. Nothing here ever
blocks the scheduler.
"""

import logging
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, cast

import grpc

from kvlease.v1 import connector_pb2, connector_pb2_grpc

logger = logging.getLogger("vllm.kvlease.link")

SOCKET_NAME = "sidecar.sock"
PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 2.0
TICK_S = 0.25
MESSAGE_BYTES_MAX = 64 << 20


Outbox = queue.Queue[connector_pb2.AttachRequest | None]
"""Messages to the sidecar; None ends the stream."""


class Stream(Protocol):
    """A call in both directions: yields the sidecar's messages until it ends."""

    def __iter__(self) -> Iterator[connector_pb2.AttachResponse]: ...
    def cancel(self) -> bool: ...


class LinkHandler(Protocol):
    """Who answers the sidecar; called on the link's thread."""

    def hello(self) -> connector_pb2.AttachRequest:
        """The first message of a stream: who the engine is and all that it holds."""
        ...

    def receive(self, message: connector_pb2.AttachResponse) -> None:
        """Handles one message of the sidecar."""
        ...

    def tick(self) -> None:
        """Called every `TICK_S` seconds, attached or not."""
        ...


class SidecarLink:
    """Sends to the sidecar without waiting, and brings its messages to the handler."""

    def __init__(self, socket_dir: str, handler: LinkHandler, outbox_max: int) -> None:
        self._address = f"unix:{Path(socket_dir) / SOCKET_NAME}"
        self._handler = handler
        self._outbox_max = outbox_max
        self._outbox: Outbox | None = None
        self._answered = False
        self._stop = threading.Event()
        self._stream: Stream | None = None
        self._attach_thread = threading.Thread(target=self._run, name="kvlease-link", daemon=True)
        self._tick_thread = threading.Thread(target=self._tick, name="kvlease-tick", daemon=True)
        self.dropped = 0

    def start(self) -> None:
        """Starts the threads; call in the process that serves, never before a fork."""
        self._attach_thread.start()
        self._tick_thread.start()

    def stop(self) -> None:
        """Ends the stream and the threads, within a second."""
        self._stop.set()
        self.restart()
        self._attach_thread.join(1.0)
        self._tick_thread.join(1.0)

    def restart(self) -> None:
        """Breaks the stream; the next one begins with a Hello that says everything."""
        if (stream := self._stream) is not None:
            stream.cancel()

    @property
    def is_attached(self) -> bool:
        """Whether a stream stands on which the sidecar has spoken."""
        return self._answered

    def send(self, message: connector_pb2.AttachRequest) -> bool:
        """Puts a message into the outbox; False when it is full.

        Without a stream the message is dropped and True returned: the next Hello says everything again.
        """
        outbox = self._outbox
        if outbox is None:
            return True
        try:
            outbox.put_nowait(message)
        except queue.Full:
            self.dropped += 1
            return False
        return True

    def _run(self) -> None:
        pause_s = PAUSE_MIN_S
        while not self._stop.is_set():
            begun_s = time.monotonic()
            try:
                self._attach()
            except grpc.RpcError as error:
                logger.debug("sidecar not attached: %s", error)
            except Exception:
                logger.exception("the stream to the sidecar broke")
            # One that ends at once (no sidecar, or one that refuses the engine) is tried ever less often.
            lasted = time.monotonic() - begun_s > PAUSE_MAX_S
            pause_s = PAUSE_MIN_S if lasted else min(2 * pause_s, PAUSE_MAX_S)
            self._stop.wait(pause_s)

    def _attach(self) -> None:
        """Holds one stream until it ends."""
        options = [
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        outbox: Outbox = queue.Queue(self._outbox_max)
        with grpc.insecure_channel(self._address, options=options) as channel:
            stub = connector_pb2_grpc.ConnectorServiceStub(channel)
            # The outbox opens before the snapshot is taken: what happens in between is said twice, not never.
            self._outbox = outbox
            try:
                self._stream = stream = cast(Stream, stub.Attach(_messages(self._handler.hello(), outbox)))
                if self._stop.is_set():
                    stream.cancel()
                self._receive(stream)
            finally:
                self._outbox = self._stream = None
                self._answered = False
                _end(outbox)

    def _receive(self, stream: Stream) -> None:
        for message in stream:
            if not self._answered:
                self._answered = True
                logger.info("attached to the sidecar at %s", self._address)
            self._handler.receive(message)

    def _tick(self) -> None:
        while not self._stop.wait(TICK_S):
            try:
                self._handler.tick()
            except Exception:
                logger.exception("tick failed")


def _messages(hello: connector_pb2.AttachRequest, outbox: Outbox) -> Iterator[connector_pb2.AttachRequest]:
    yield hello
    while (message := outbox.get()) is not None:
        yield message


def _end(outbox: Outbox) -> None:
    """Ends the iterator that feeds the stream, also when the outbox is full."""
    while True:
        try:
            outbox.put_nowait(None)
            return
        except queue.Full:
            try:
                outbox.get_nowait()
            except queue.Empty:
                continue
