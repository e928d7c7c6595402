"""Names that clients give to images, videos and sounds: the `uuid` of a part of a message.

vLLM takes such a name for the identity of a medium. It keeps what it made of one under its name, for all requests
of an engine and beside every salt: whoever names another tenant's image would get it, or have given it another one.
"""

from collections.abc import Iterator
from typing import Any, cast

from kvlease.core.conversation import media_name

NAME = "uuid"

FIELDS = (
    "messages",
    "input",
    "query",
    "queries",
    "documents",
    "data_1",
    "data_2",
    "text_1",
    "text_2",
    "items",
)
"""Fields of a body with messages, or what is like one: something with a list of parts as its `content`."""


def keep_media_apart(body: dict[str, Any], tenant: str) -> None:
    """Replaces every name of a medium by one that only this tenant's requests can have."""
    for field in FIELDS:
        for part in _parts(body.get(field)):
            # vLLM takes any value for its text, and null for no name.
            if (name := part.get(NAME)) is not None:
                part[NAME] = media_name(tenant, str(name))


def _parts(value: object) -> Iterator[dict[str, Any]]:
    messages = cast("list[object]", value) if isinstance(value, list) else (value,)
    for message in messages:
        content = cast("dict[str, Any]", message).get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            for part in cast("list[object]", content):
                if isinstance(part, dict):
                    yield cast("dict[str, Any]", part)
