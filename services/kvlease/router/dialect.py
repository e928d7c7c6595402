"""What the APIs that take turns have in common, and the seams at which they differ.

Every API reaches the engines under its own path on both legs: vLLM's front takes `kv_transfer_params` and
`cache_salt` in each of their requests and answers with `kv_transfer_params` in each (0.32: the `protocol.py`
of `entrypoints/openai/chat_completion`, `completion` and `responses`, and of `entrypoints/anthropic`), and only
the engine that renders a request itself gives both legs the same prompt.
"""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, cast

import orjson

from kvlease.core.conversation import Reply, Transcript
from kvlease.core.turn import PARAMS_KEY
from kvlease.router.reserved import KV_FIELD

OURS = frozenset({KV_FIELD, "ec_transfer_params", PARAMS_KEY})
"""Fields of an engine's answer that are the router's."""

_ZEROS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 19
"""Digits of the shortest integer of more than 64 bits, in bytes whose digits are all zeros."""


class Api(Enum):
    """The APIs that take turns; the value is the path at the engine."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


@dataclass(slots=True)
class Usage:
    """Counts of tokens, as the decode engine gave them; 0 when it gave none."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class TextPlace(NamedTuple):
    """Where a chunk holds its text, which is all that a reader learns of it.

    Attributes:
        fields: the object in the chunk that holds it, under `name`.
        add: takes such a text as reading the chunk does.
    """

    fields: dict[str, Any]
    name: str
    add: Callable[[str], None]


class ReplyReader(Protocol):
    """Learns from an engine's answer how the turn ends, what was said, and the usage."""

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        ...

    @property
    def failed(self) -> bool:
        """The engine says that it failed."""
        ...

    @property
    def failed_silently(self) -> bool:
        """It failed, and no error object tells the client about it."""
        ...

    @property
    def finished_well(self) -> bool:
        """Everything asked for has ended, and nothing of it badly."""
        ...

    @property
    def ended(self) -> bool:
        """The event that ends a stream of this API was read."""
        ...

    @property
    def awaits_tools(self) -> bool:
        """The conversation goes on when the client has run tools."""
        ...

    def reply(self) -> Reply:
        """What was said, as a chat message."""
        ...

    def read(self, answer: dict[str, Any]) -> None:
        """Takes a chunk of a stream, or a whole answer."""
        ...

    def text_place(self, chunk: dict[str, Any]) -> TextPlace | None:
        """Where a chunk holds its text when reading it learns nothing else, whatever that text is; else None."""
        ...


class Dialect(Protocol):
    """One request in the terms of its API."""

    @property
    def choices(self) -> int:
        """Answers asked for."""
        ...

    def transcript(self, tenant: str, model: str) -> Transcript | None:
        """The chain over what was said; None when the request has no single prompt."""
        ...

    def prefill_fields(self) -> dict[str, Any]:
        """The body of the prefill leg: the same prompt, one token, no stream. The router's orders come on top."""
        ...

    def decode_fields(self) -> dict[str, Any]:
        """The body of the decode leg. The router's orders come on top."""
        ...

    def reader(self) -> ReplyReader:
        """A reader of one engine's answer."""
        ...

    def reused(self, tokens: int | None) -> None:
        """From here on `clean` counts so many tokens of the prompt as cached at most; None: as the engine counts.

        A decode engine counts all that it READ as cached, also what the prefill engine has just computed for it.
        """
        ...

    def clean(self, chunk: dict[str, Any], *, streamed: bool) -> dict[str, Any] | None:
        """A chunk, or a whole answer, as the client gets it.

        The same object when nothing in it is the router's, whatever its text is; None when the client gets nothing.
        """
        ...

    def remember(self, reader: ReplyReader) -> None:
        """The turn ended well: keeps what a later request of this API may name."""
        ...


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON in UTF-8 without spaces."""
    try:
        return orjson.dumps(body)
    except TypeError:
        # Integers of more than 64 bits, and 254 levels: valid JSON all the same.
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def encode_answer(answer: Mapping[str, Any]) -> bytes:
    """What an engine said, as JSON: halves of surrogate pairs, which UTF-8 lacks, stay escaped as they came."""
    try:
        return encode(answer)
    except UnicodeEncodeError:
        return json.dumps(answer, separators=(",", ":")).encode()


def parse_engine_json(raw: bytes) -> object:
    """An engine's JSON, read fast and exactly: what is the router's is cut out, and the rest written again.

    Raises:
        ValueError: it is none; RecursionError: nested too deeply.
    """
    if _LONG_NUMBER in raw.translate(_ZEROS):
        return json.loads(raw)  # the fast one takes integers of more than 64 bits for floats
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw)  # halves of surrogate pairs, NaN, and 1024 levels


def without(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The fields but those named."""
    return {name: value for name, value in fields.items() if name not in names}


def without_orders(fields: dict[str, Any]) -> dict[str, Any]:
    """An object of an engine's answer without what is the router's; itself when nothing is."""
    if OURS.isdisjoint(fields):
        return fields
    return {name: value for name, value in fields.items() if name not in OURS}


def cached_at_most(usage: object, tokens: int | None) -> object:
    """An answer's usage, of any API, that counts no more tokens of the prompt as cached; itself when it does not."""
    counts = mapping(usage)
    if tokens is None or not counts:
        return usage
    for name in ("prompt_tokens_details", "input_tokens_details"):
        details = mapping(counts.get(name))
        if count_of(details.get("cached_tokens")) > tokens:
            return {**counts, name: {**details, "cached_tokens": tokens}}
    excess = count_of(counts.get("cache_read_input_tokens")) - tokens
    if excess <= 0:
        return usage
    # This API counts what was cached apart from the rest of the prompt.
    input_tokens = count_of(counts.get("input_tokens")) + excess
    return {**counts, "cache_read_input_tokens": tokens, "input_tokens": input_tokens}


def objects(value: object) -> list[dict[str, Any]]:
    """The objects of a list; none of what is no list."""
    listed = cast("list[object]", value) if isinstance(value, list) else []
    return [cast("dict[str, Any]", item) for item in listed if isinstance(item, dict)]


def mapping(value: object) -> dict[str, Any]:
    """An object, an empty one for anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def text_of(value: object) -> str:
    """A string, the empty one for anything else."""
    return value if isinstance(value, str) else ""


def count_of(value: object) -> int:
    """A count of tokens, 0 for anything else."""
    return value if type(value) is int and value >= 0 else 0
