"""The id that a client gives its conversation.

It comes in the body (`conversation_id`), in a header, or in `metadata`, in this order. An id says only where to look
first: the chain over the messages decides what a request goes on with, so a wrong or shared id costs no more than a
miss. What is no id in the body's own field is an error; headers and `metadata` have other uses, too: what is no id
there names nothing. `prompt_cache_key` is no such id: clients share one among all that have a prefix in common.

What agents send:

| agent | where |
|---|---|
| Claude Code | `X-Claude-Code-Session-Id`, of a sub-agent with `X-Claude-Code-Agent-Id` beside it |
| Claude Code, older | `metadata.user_id`, which ends in `_session_<id>` or is JSON with a `session_id` |
| Codex | `session_id` or `Session-Id`, `conversation_id`, `Thread-Id` |
| OpenCode | `X-Session-Affinity`, `X-Session-Id`, `X-Opencode-Session`; sub-agents have sessions of their own |
"""

import json
from collections.abc import Mapping
from typing import Any

from kvlease.core.errors import InvalidArgument
from kvlease.router.dialect import mapping

CONVERSATION_FIELD = "conversation_id"
CONVERSATION_ID_BYTES_MAX = 512
METADATA_FIELDS = (CONVERSATION_FIELD, "session_id", "thread_id")
USER_SESSION = "_session_"

SESSION_HEADERS = (
    "X-Conversation-Id",
    "X-Claude-Code-Session-Id",
    "X-Opencode-Session",
    "X-Session-Affinity",
    "X-Session-Id",
    "Thread-Id",
    "Session-Id",
    "session_id",
    "conversation_id",
)
AGENT_HEADERS = {"x-claude-code-session-id": "X-Claude-Code-Agent-Id"}
"""A header that tells the agents of one session apart, by the header that names the session."""


def header_id(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    """The id in the first of the named headers that holds one; empty without one."""
    for name in names:
        value = headers.get(name)
        if value:
            agent = headers.get(AGENT_HEADERS.get(name.lower(), ""), "")
            usable = _usable(f"{value}/{agent}" if agent else value)
            if usable:
                return usable
    return ""


def conversation_id_of(body: Mapping[str, Any], from_header: str = "") -> str:
    """The id that a request gives its conversation; empty without one.

    Raises:
        InvalidArgument: the body's own is none; says so to the client.
    """
    return _checked(body.get(CONVERSATION_FIELD)) or from_header or _from_metadata(body.get("metadata"))


def _checked(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidArgument(f"{CONVERSATION_FIELD} must be a string")
    text = str(value)
    if len(text.encode()) > CONVERSATION_ID_BYTES_MAX:
        raise InvalidArgument(f"{CONVERSATION_FIELD} is longer than {CONVERSATION_ID_BYTES_MAX} bytes")
    return text


def _from_metadata(value: object) -> str:
    """An id in `metadata`."""
    metadata = mapping(value)
    for name in METADATA_FIELDS:
        if usable := _usable(metadata.get(name)):
            return usable
    user_id = metadata.get("user_id")
    if not isinstance(user_id, str):
        return ""
    if user_id.startswith("{"):
        try:
            return _usable(mapping(json.loads(user_id)).get("session_id"))
        except (ValueError, RecursionError):
            return ""
    return _usable(user_id.rpartition(USER_SESSION)[2]) if USER_SESSION in user_id else ""


def _usable(value: object) -> str:
    if not isinstance(value, str):
        return ""
    try:
        return value if len(value.encode()) <= CONVERSATION_ID_BYTES_MAX else ""
    except UnicodeEncodeError:
        return ""
