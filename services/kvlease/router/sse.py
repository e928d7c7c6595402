"""Server-sent events on their way from an engine to a client: split, understood, cleaned of what is ours."""

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, cast

from orjson import JSONDecodeError, loads

from kvlease.router.dialect import (
    Dialect,
    ReplyReader,
    count_of,
    encode_answer,
    mapping,
    parse_engine_json,
)
from kvlease.router.ports import LegError

EVENT_BYTES_MAX = 8 << 20
DONE = b"[DONE]"
DATA = b"data: "
BLANK_LINE = re.compile(rb"\n\n|\r\n\r\n|\r\r")
BLANK_LINE_BYTES_MAX = 4

TEXT_LITERAL = re.compile(rb'"(?:content|text)"\s*:\s*("(?:[^"\\]|\\.)*")')
"""A text under its name in JSON, in quotes."""

OTHER_TEXT = "another text"
SHAPES_MAX = 4
"""Shapes that are learnt in a stream: the first event often differs from the others."""

SHAPE_BYTES_MAX = 1 << 14
"""Of a longer event none is learnt: it is no usual one, and finding its text takes 130 times its length of memory."""


class EventSplitter:
    """Cuts bytes, split anywhere, into whole events with their blank lines. Bounded by `EVENT_BYTES_MAX`."""

    def __init__(self) -> None:
        self._rest: bytes = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes.

        Raises:
            LegError: an event is too long to be one.
        """
        buffer = self._rest + data if self._rest else data
        seen = max(0, len(self._rest) - BLANK_LINE_BYTES_MAX + 1)
        events: list[bytes] = []
        if b"\r" in buffer:
            ends = [0, *(blank.end() for blank in BLANK_LINE.finditer(buffer, seen))]
            events = [buffer[begin:end] for begin, end in pairwise(ends)]
            self._rest = buffer[ends[-1] :]
        elif self._rest and buffer.find(b"\n\n", seen) < 0:
            self._rest = buffer  # what is long comes in many pieces, and is not searched again for each
        else:
            *whole, self._rest = buffer.split(b"\n\n")
            events = [event + b"\n\n" for event in whole]
        if len(self._rest) > EVENT_BYTES_MAX:
            raise LegError("an event of the stream is too long", sent=True)
        return events

    @property
    def rest(self) -> bytes:
        """The beginning of an event that is not complete."""
        return self._rest


class _Shape(NamedTuple):
    """What events have in common that differ in a text only: all before its first character, and all after its last.

    Attributes:
        add: takes the text of another one.
    """

    head: bytes
    tail: bytes
    add: Callable[[str], None]


class StreamCleaner:
    """Passes an engine's events to a client, as they are unless something in them is the router's.

    Most events of a stream differ in their text only. Once one of them was read in full, of its likes no more is
    read than the text.

    Attributes:
        done: set by the event that ends the stream.
        error_status: HTTP status that the engine's error object names; 0 without one.
    """

    def __init__(self, reader: ReplyReader, dialect: Dialect) -> None:
        self._reader = reader
        self._dialect = dialect
        self._shape: _Shape | None = None
        self._shapes_left = SHAPES_MAX
        self.done = False
        self.error_status = 0

    def take(self, event: bytes) -> bytes:
        """Reads one event and says what the client gets of it: nothing when it was ours."""
        shape = self._shape
        if shape is not None and event.startswith(shape.head) and event.endswith(shape.tail):
            try:
                text = loads(event[len(shape.head) - 1 : len(event) - len(shape.tail) + 1])
            except JSONDecodeError:
                return self._take(event)  # a quote or the end of a line in it, or bytes that are no UTF-8
            shape.add(text)
            return event
        return self._take(event)

    def _take(self, event: bytes) -> bytes:
        payload = _payload(event)
        if payload is None:
            return event
        if payload == DONE:
            self.done = True
            return event
        try:
            chunk = parse_engine_json(payload)
        except (ValueError, RecursionError):
            return event
        if not isinstance(chunk, dict):
            return event
        fields = cast("dict[str, Any]", chunk)
        reader = self._reader
        reader.read(fields)
        self.done = self.done or reader.ended
        if reader.failed:
            self.error_status = count_of(mapping(fields.get("error")).get("code")) or self.error_status
        kept = self._dialect.clean(fields, streamed=True)
        if kept is fields:
            if self._shapes_left and len(event) <= SHAPE_BYTES_MAX:
                self._learn(event, fields)
            return event
        return b"" if kept is None else _with_payload(event, encode_answer(kept))

    def _learn(self, event: bytes, chunk: dict[str, Any]) -> None:
        """Takes the shape of an event that was passed on as it is, if it has one."""
        place = self._reader.text_place(chunk)
        if place is None or place.fields[place.name] in ("", OTHER_TEXT):
            return
        self._shapes_left -= 1
        for literal in TEXT_LITERAL.finditer(event):
            shape = _Shape(event[: literal.start(1) + 1], event[literal.end(1) - 1 :], place.add)
            if self._fits(shape):
                self._shape = shape
                return

    def _fits(self, shape: _Shape) -> bool:
        """Whether it is the text that differs: one that was not there is found where the chunk's own text was.

        Then any other text, in quotes of its own, differs as this one does.
        """
        payload = _payload(shape.head + OTHER_TEXT.encode() + shape.tail)
        try:
            other: object = None if payload is None else parse_engine_json(payload)
        except (ValueError, RecursionError):
            return False
        if not isinstance(other, dict):
            return False
        found = self._reader.text_place(cast("dict[str, Any]", other))
        return found is not None and found.fields[found.name] == OTHER_TEXT


def _payload(event: bytes) -> bytes | None:
    """The data of an event, None when it has none."""
    if event.startswith(DATA) and event.find(b"\n") == len(event) - 2 and b"\r" not in event:  # as most are
        return event[len(DATA) : -2].strip()
    parts = [
        line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith((b"data:", b"data "))
    ]
    return b"\n".join(parts).strip() if parts else None


def _with_payload(event: bytes, payload: bytes) -> bytes:
    """An event with other data; its other lines stay."""
    lines = [line for line in event.splitlines() if line and not line.startswith(b"data")]
    return b"".join(line + b"\n" for line in lines) + DATA + payload + b"\n\n"
