"""Fields of a body that steer an engine's KV cache: they are the router's, and no client's reach an engine.

vLLM reads `kv_transfer_params` and `ec_transfer_params` of a request, and whatever `vllm_xargs` holds becomes
an extra argument beside them. They are removed wherever an engine, or a front between, might read parameters.
What is left alone is what the client says: there they are its own words.
"""

import json
from typing import Any, cast

from kvlease.core.errors import InvalidArgument
from kvlease.core.turn import PARAMS_KEY

KV_FIELD = "kv_transfer_params"
RESERVED_FIELDS = (KV_FIELD, "ec_transfer_params", "vllm_xargs", PARAMS_KEY)

CONTENT_FIELDS = frozenset(
    {
        "messages",
        "prompt",
        "input",
        "system",
        "instructions",
        "tools",
        "functions",
        "response_format",
        "text",
        "metadata",
    }
)
"""Fields of a body whose insides are the client's own words or schemas: nothing is removed in them."""

_NAMES = tuple(name.encode() for name in RESERVED_FIELDS)
_ESCAPE = b"\\u"
_NUL = b"\0"


def strip_reserved(body: dict[str, Any]) -> None:
    """Removes the reserved fields from a body and from all in it that an engine reads parameters from."""
    for name in RESERVED_FIELDS:
        body.pop(name, None)
    for name, value in body.items():
        if name not in CONTENT_FIELDS:
            _strip(value)


def is_plain(raw: bytes) -> bool:
    """Whether a body has none of the reserved fields, by its bytes alone.

    True is certain, for every way to read JSON: the names do not occur, no letter of a key can be escaped,
    and the text is UTF-8 and not a wider encoding, which has NUL bytes between its letters. False says only
    that the body has to be parsed.
    """
    if _ESCAPE in raw or _NUL in raw or any(name in raw for name in _NAMES):
        return False
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def without_reserved(raw: bytes) -> bytes:
    """A JSON body that may be passed on: its own bytes when they are plain.

    Raises:
        InvalidArgument: it is no JSON in UTF-8; nothing can be said of what an engine would read in it.
    """
    if is_plain(raw):
        return raw
    try:
        body: object = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("the body is not valid JSON in UTF-8") from error
    if isinstance(body, dict):
        strip_reserved(cast("dict[str, Any]", body))
    else:
        _strip(body)
    return json.dumps(body, separators=(",", ":")).encode()


def _strip(value: object) -> None:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        for name in RESERVED_FIELDS:
            fields.pop(name, None)
        for inner in fields.values():
            _strip(inner)
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            _strip(inner)
