"""Server-sent events on their way from an engine to a client: split, understood, cleaned of what is ours."""

import json
from dataclasses import dataclass, field
from typing import Any, cast

from kvlease.core.conversation import Reply
from kvlease.core.turn import PARAMS_KEY
from kvlease.router.bodies import KV_FIELD, encode
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


@dataclass(slots=True)
class _ToolCall:
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Usage:
    """Counts of tokens, as the decode engine gave them; 0 when it gave none."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def read(self, value: object) -> None:
        """Takes the counts of a `usage` object."""
        if not isinstance(value, dict):
            return
        usage = cast("dict[str, Any]", value)
        self.prompt_tokens = _count(usage.get("prompt_tokens"))
        self.completion_tokens = _count(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.cached_tokens = _count(cast("dict[str, Any]", details).get("cached_tokens"))


class ReplyReader:
    """Learns from an engine's answer how the turn ends, what was said by the first choice, and the usage."""

    def __init__(self, choices: int) -> None:
        self._choices = choices
        self._texts: list[str] = []
        self._calls: dict[int, _ToolCall] = {}
        self._finished: dict[int, str] = {}
        self.usage = Usage()
        self.failed = False
        self._told = False

    @property
    def finished_well(self) -> bool:
        """Every choice has ended, and none of them badly."""
        ended = len(self._finished) >= self._choices
        return ended and not self.failed and all(map(_is_good_end, self._finished.values()))

    @property
    def awaits_tools(self) -> bool:
        """A choice ended in calls of tools: the conversation goes on when the client has run them."""
        return bool(self._calls) or any(
            finish in ("tool_calls", "function_call") for finish in self._finished.values()
        )

    @property
    def failed_silently(self) -> bool:
        """A choice ended with an error that no error object tells the client about."""
        return self.failed and not self._told

    def reply(self) -> Reply:
        """What the first choice said."""
        calls = tuple(
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": "".join(call.arguments)},
            }
            for _, call in sorted(self._calls.items())
        )
        return Reply("".join(self._texts), calls)

    def read(self, answer: dict[str, Any]) -> None:
        """Takes a chunk of a stream, or a whole answer."""
        if answer.get("error"):
            self.failed = self._told = True
        self.usage.read(answer.get("usage"))
        choices = answer.get("choices")
        for choice in cast("list[object]", choices) if isinstance(choices, list) else []:
            if isinstance(choice, dict):
                self._read_choice(cast("dict[str, Any]", choice))

    def _read_choice(self, choice: dict[str, Any]) -> None:
        index = _count(choice.get("index"))
        finish = choice.get("finish_reason")
        if isinstance(finish, str) and finish:
            self._finished[index] = finish
            self.failed = self.failed or finish == "error"
        if index != 0:
            return
        said = choice.get("delta") or choice.get("message")
        fields = cast("dict[str, Any]", said) if isinstance(said, dict) else {"content": choice.get("text")}
        content = fields.get("content")
        if isinstance(content, str):
            self._texts.append(content)
        calls = fields.get("tool_calls")
        for place, call in enumerate(cast("list[object]", calls) if isinstance(calls, list) else []):
            if isinstance(call, dict):
                self._read_call(place, cast("dict[str, Any]", call))

    def _read_call(self, place: int, call: dict[str, Any]) -> None:
        index = call.get("index")
        known = self._calls.setdefault(index if type(index) is int else place, _ToolCall())
        call_id = call.get("id")
        if isinstance(call_id, str):
            known.call_id = call_id
        function = call.get("function")
        if isinstance(function, dict):
            named = cast("dict[str, Any]", function)
            name, arguments = named.get("name"), named.get("arguments")
            known.name = name if isinstance(name, str) and name else known.name
            if isinstance(arguments, str):
                known.arguments.append(arguments)


@dataclass(frozen=True, slots=True)
class Passed:
    """What the client gets of one event.

    Its bytes (none when it was ours), and whether it ends the stream.
    """

    data: bytes
    done: bool = False


class StreamCleaner:
    """Passes an engine's events to a client, as they are unless something in them is the router's.

    Args:
        hide_usage: the client did not ask for usage: the chunk that carries it alone is kept back.
    """

    def __init__(self, reader: ReplyReader, *, hide_usage: bool) -> None:
        self._reader = reader
        self._hide_usage = hide_usage

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
        return Passed(self._clean(event, fields))

    def _clean(self, event: bytes, chunk: dict[str, Any]) -> bytes:
        ours = [name for name in (KV_FIELD, PARAMS_KEY) if name in chunk]
        if self._hide_usage and "usage" in chunk:
            if chunk["usage"] is not None and chunk.get("choices") == []:
                return b""
            ours.append("usage")
        if not ours:
            return event
        kept = {name: value for name, value in chunk.items() if name not in ours}
        lines = [line for line in event.splitlines() if line and not line.startswith(b"data")]
        return b"".join(line + b"\n" for line in lines) + b"data: " + encode(kept) + b"\n\n"


def _payload(event: bytes) -> bytes | None:
    """The data of an event, None when it has none."""
    parts = [
        line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith((b"data:", b"data "))
    ]
    return b"\n".join(parts).strip() if parts else None


def _is_good_end(finish: str) -> bool:
    return finish in ("stop", "length", "tool_calls", "function_call")


def _count(value: object) -> int:
    return value if type(value) is int and value >= 0 else 0
