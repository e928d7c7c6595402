"""The connector's end of the stream to its sidecar.

One daemon thread owns the stream: it attaches to the sidecar's unix socket, says Hello with all holds, hands
messages to the handler, and comes back after a pause when the stream breaks. Messages to the sidecar wait in a
bounded outbox; they are lost with the stream, since the next Hello says everything again. Nothing here ever
blocks the scheduler.
"""

import logging
import queue
import threading
from collections.abc import Iterator
from typing import Protocol, cast

from kvlease.v1 import connector_pb2
from kvlease_vllm.stream import StreamThread, Stub

logger = logging.getLogger("vllm.kvlease.link")

TICK_S = 0.25


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
        self._handler = handler
        self._outbox_max = outbox_max
        self._outbox: Outbox | None = None
        self._answered = False
        self._stop = threading.Event()
        self._attach_thread = StreamThread("kvlease-link", socket_dir, self._attach)
        self._tick_thread = threading.Thread(target=self._tick, name="kvlease-tick", daemon=True)
        self.dropped = 0

    def start(self) -> None:
        """Starts the threads; call in the process that serves, never before a fork."""
        self._attach_thread.start()
        self._tick_thread.start()

    def stop(self) -> None:
        """Ends the stream and the threads, within a second."""
        self._stop.set()
        self._attach_thread.stop()
        self._tick_thread.join(1.0)

    def restart(self) -> None:
        """Breaks the stream; the next one begins with a Hello that says everything."""
        self._attach_thread.restart()

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

    def _attach(self, stub: Stub) -> None:
        """Holds one stream until it ends."""
        outbox: Outbox = queue.Queue(self._outbox_max)
        # The outbox opens before the snapshot is taken: what happens in between is said twice, not never.
        self._outbox = outbox
        try:
            stream = cast(Stream, stub.Attach(_messages(self._handler.hello(), outbox)))
            self._attach_thread.opened(stream)
            self._receive(stream)
        finally:
            self._outbox = None
            self._answered = False
            _end(outbox)

    def _receive(self, stream: Stream) -> None:
        for message in stream:
            if not self._answered:
                self._answered = True
                logger.info("attached to the sidecar at %s", self._attach_thread.address)
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
