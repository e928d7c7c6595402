"""Server-sent events on their way from an engine to a client: split, understood, cleaned of what is ours."""

import json
from dataclasses import dataclass
from typing import Any, cast

from kvlease.router.dialect import Dialect, ReplyReader, encode
from kvlease.router.ports import LegError

EVENT_BYTES_MAX = 8 << 20
DONE = b"[DONE]"


class EventSplitter:
    """Cuts bytes, split anywhere, into whole events with their blank lines. Bounded by `EVENT_BYTES_MAX`."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes.

        Raises:
            LegError: an event is too long to be one.
        """
        start = max(0, len(self._rest) - 3)
        buffer = self._rest + data
        events: list[bytes] = []
        begin = 0
        while (end := _event_end(buffer, max(begin, start))) is not None:
            events.append(buffer[begin:end])
            begin = end
        self._rest = buffer[begin:]
        if len(self._rest) > EVENT_BYTES_MAX:
            raise LegError("an event of the stream is too long", sent=True)
        return events

    @property
    def rest(self) -> bytes:
        """The beginning of an event that is not complete."""
        return self._rest


def _event_end(buffer: bytes, start: int) -> int | None:
    ends = [
        place + len(blank)
        for blank in (b"\n\n", b"\r\n\r\n", b"\r\r")
        if (place := buffer.find(blank, start)) >= 0
    ]
    return min(ends, default=None)


@dataclass(frozen=True, slots=True)
class Passed:
    """What the client gets of one event.

    Its bytes (none when it was ours), and whether it ends the stream.
    """

    data: bytes
    done: bool = False


class StreamCleaner:
    """Passes an engine's events to a client, as they are unless something in them is the router's."""

    def __init__(self, reader: ReplyReader, dialect: Dialect) -> None:
        self._reader = reader
        self._dialect = dialect

    def take(self, event: bytes) -> Passed:
        """Reads one event and says what the client gets of it."""
        payload = _payload(event)
        if payload is None:
            return Passed(event)
        if payload == DONE:
            return Passed(event, done=True)
        try:
            chunk = json.loads(payload)
        except (ValueError, RecursionError):
            return Passed(event)
        if not isinstance(chunk, dict):
            return Passed(event)
        fields = cast("dict[str, Any]", chunk)
        self._reader.read(fields)
        return Passed(self._clean(event, fields), done=self._reader.ended)

    def _clean(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        kept = self._dialect.clean(chunk, streamed=True)
        if kept is None:
            return b""
        if kept is chunk:
            return event
        lines = [line for line in event.splitlines() if line and not line.startswith(b"data")]
        return b"".join(line + b"\n" for line in lines) + b"data: " + encode(kept) + b"\n\n"


def _payload(event: bytes) -> bytes | None:
    """The data of an event, None when it has none."""
    parts = [
        line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith((b"data:", b"data "))
    ]
    return b"\n".join(parts).strip() if parts else None
