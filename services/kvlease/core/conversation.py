"""Who a request belongs to: tenants, conversations, and the chain of keys over what was said.

A chain has one 8 byte key per message (per 256 bytes of a plain prompt), each covering all before it. Its
keys are hints that choose a path and find a conversation: what is reused is decided by the digests of the
blocks.
"""

import json
import marshal
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from typing import Any, cast

from kvlease.core.recent import Recent
from kvlease.core.turn import CHAIN_KEYS_MAX
from kvlease.core.values import value

SEGMENT_BYTES = 256
ROLE_CACHED_MAX = 16
ROOTS_MAX = 1024
LINKS_MAX = 50_000
"""Roots of chains and links of messages that are recognised, at least: some 300 bytes each."""

OPAQUE_PART_BYTES = 4096
"""What an image or a sound counts for in an estimate: about a thousand tokens, however long its encoding."""


def tenant_digest(credential: str) -> str:
    """The 32 hex digits that stand for whoever holds a credential."""
    return blake2b(
        credential.encode(errors="surrogateescape"), digest_size=16, person=b"kvlease-tenant"
    ).hexdigest()


def cache_salt(tenant: str, client_salt: str) -> str:
    """The salt of the engines' own prefix caches, so that tenants do not meet in them."""
    return _salt(tenant, client_salt) if client_salt else _plain_salt(tenant)


@lru_cache(maxsize=1024)
def _plain_salt(tenant: str) -> str:
    """The salt of clients that bring none, as most do."""
    return _salt(tenant, "")


def _salt(tenant: str, client_salt: str) -> str:
    return _digest(b"kvlease-salt", 16, tenant.encode(), client_salt.encode()).hex()


def media_name(tenant: str, name: str) -> str:
    """What engines call an image to which a client gave a name, so that tenants do not mean one by the same."""
    return _digest(b"kvlease-media", 16, tenant.encode(), name.encode()).hex()


def conversation_key(tenant: str, conversation_id: str) -> bytes:
    """16 bytes that identify a conversation of a tenant."""
    return _digest(b"kvlease-conv", 16, tenant.encode(), conversation_id.encode())


@value
class Leaf:
    """Where a chain ended.

    Attributes:
        keys: the newest keys, the last one covers everything.
        end_bytes: text covered, 0 when it is not known.
        anchor: a key of the same chain that a request extending this leaf has for certain.
    """

    keys: tuple[int, ...]
    end_bytes: int = 0
    anchor: int = 0

    @property
    def key(self) -> int:
        """The key that covers everything, 0 of an empty chain."""
        return self.keys[-1] if self.keys else 0


@value
class Reply:
    """What an engine answered, as a client would send it back.

    Attributes:
        text: the content of the message, or the text of a completion.
        tool_calls: in the shape of the OpenAI API.
    """

    text: str = ""
    tool_calls: tuple[Mapping[str, Any], ...] = ()


@value
class Transcript:
    """The chain over a request. `ends[i]` are the bytes of text that `keys[i]` covers.

    Attributes:
        root: 32 bytes that key the chain.
        prompt: the bytes of a plain prompt, None for messages.
        closed: a reply cannot continue the chain (a prompt of token ids).
        replies: messages of the assistant in it; 0 begins something.
    """

    root: bytes
    keys: tuple[int, ...]
    ends: tuple[int, ...]
    prompt: bytes | None = None
    closed: bool = False
    replies: int = 0

    @property
    def text_bytes(self) -> int:
        """Bytes of text of the whole request."""
        return self.ends[-1] if self.ends else 0

    @property
    def key(self) -> int:
        """The key that covers the whole request, 0 of an empty chain."""
        return self.keys[-1] if self.keys else 0

    def suffix_bytes(self, leaf: Leaf) -> int | None:
        """Bytes of text after a leaf that this request extends, None when it does not extend it."""
        if self.prompt is None:
            if leaf.key not in self.keys:
                return None
            return self.text_bytes - self.ends[self.keys.index(leaf.key)]
        if not 0 < leaf.end_bytes <= len(self.prompt):
            return None
        keys, _ = _segment_chain(self.root, self.prompt[: leaf.end_bytes])
        return len(self.prompt) - leaf.end_bytes if keys[-1] == leaf.key else None

    def leaf(self, reply: Reply) -> Leaf:
        """The leaf of this request and its reply."""
        if self.prompt is not None:
            text = self.prompt if self.closed else self.prompt + _utf8(reply.text)
            segments, ends = _segment_chain(self.root, text)
            whole = [key for key, end in zip(segments, ends, strict=True) if end % SEGMENT_BYTES == 0]
            return Leaf(tuple(segments[-CHAIN_KEYS_MAX:]), len(text), whole[-1] if whole else 0)
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.tool_calls:
            message["tool_calls"] = list(reply.tool_calls)
        payload, size = _said(message)
        previous = self.keys[-1] if self.keys else 0
        keys = (*self.keys, _link(self.root, previous, payload))[-CHAIN_KEYS_MAX:]
        return Leaf(keys, self.text_bytes + size, previous)


def message_transcript(
    tenant: str, model: str, messages: Sequence[object], tools: object = None
) -> Transcript:
    """The chain over the messages of a chat request, rooted in tenant, model and tools.

    Most of a request was in the one before it: that is recognised, and not digested again.
    """
    root = _chat_root(tenant, model, tools)
    keys: list[int] = []
    ends: list[int] = []
    key = end = replies = 0
    for message in messages:
        replies += _fields(message).get("role") == "assistant"
        key, size = _message_link(root, key, message)
        end += size
        keys.append(key)
        ends.append(end)
    return Transcript(root, tuple(keys), tuple(ends), replies=replies)


def prompt_transcript(tenant: str, model: str, prompt: str | Sequence[int]) -> Transcript:
    """The chain over a plain prompt, text or token ids, rooted in tenant and model."""
    is_text = isinstance(prompt, str)
    data = _utf8(prompt) if isinstance(prompt, str) else struct.pack(f"<{len(prompt)}q", *prompt)
    root = _root("text" if is_text else "token ids", tenant, model, b"")
    keys, ends = _segment_chain(root, data)
    return Transcript(root, tuple(keys), tuple(ends), data, closed=not is_text)


@value
class Found:
    """A conversation whose chain a request shares: wholly when it extends `leaf`, else in part."""

    owner: bytes
    leaf: Leaf
    extends: bool


class ConversationIndex:
    """Finds the conversation that a request without an id goes on with.

    Bounded, the oldest leaf leaves first.
    """

    def __init__(self, leaves_max: int = 200_000) -> None:
        self._leaves_max = leaves_max
        self._leaves: OrderedDict[int, tuple[bytes, Leaf]] = OrderedDict()
        self._anchors: OrderedDict[int, tuple[bytes, Leaf]] = OrderedDict()

    def put(self, owner: bytes, leaf: Leaf) -> None:
        """Remembers where a turn of a conversation ended."""
        self._insert(self._leaves, leaf.key, (owner, leaf))
        if leaf.anchor:
            self._insert(self._anchors, leaf.anchor, (owner, leaf))

    def find(self, transcript: Transcript) -> Found | None:
        """The newest leaf on the request's chain.

        An anchor counts only when something follows it: requests that merely begin alike are different
        conversations.
        """
        last = len(transcript.keys) - 1
        for place in range(last, -1, -1):
            key = transcript.keys[place]
            entry = self._leaves.get(key)
            if entry is None and (place < last or transcript.prompt is not None):
                entry = self._anchors.get(key)
            if entry is not None:
                owner, leaf = entry
                extends = transcript.suffix_bytes(leaf) is not None
                if extends or transcript.prompt is None:
                    return Found(owner, leaf, extends)
        return None

    def _insert(
        self, table: OrderedDict[int, tuple[bytes, Leaf]], key: int, entry: tuple[bytes, Leaf]
    ) -> None:
        table[key] = entry
        table.move_to_end(key)
        if len(table) > self._leaves_max:
            table.popitem(last=False)


_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def _digest(person: bytes, size: int, *fields: bytes) -> bytes:
    digest = blake2b(digest_size=size, person=person)
    for field in fields:
        digest.update(struct.pack("<Q", len(field)) + field)
    return digest.digest()


def _root(kind: str, tenant: str, model: str, tools: bytes) -> bytes:
    return _digest(b"kvlease-chain", 32, kind.encode(), tenant.encode(), _utf8(model), tools)


_roots = Recent[tuple[str, int, int], bytes](ROOTS_MAX)
_links = Recent[tuple[bytes | int, int], tuple[int, int]](LINKS_MAX)


def _chat_root(tenant: str, model: str, tools: object) -> bytes:
    place = tenant, hash(model), _identity(tools)
    root = _roots.get(place)
    if root is None:
        root = _root("chat", tenant, model, _canonical(tools))
        _roots.put(place, root)
    return root


def _message_link(root: bytes, previous: int, message: object) -> tuple[int, int]:
    """The key of a message behind the one with the key `previous` (0: the first), and how many bytes it counts for."""
    place = previous or root, _identity(message)
    known = _links.get(place)
    if known is None:
        payload, size = _said(message)
        known = _link(root, previous, payload), size
        _links.put(place, known)
    return known


def _identity(value: object) -> int:
    """What no other value has, as long as the process runs: a keyed hash, of 64 bits as the keys of a chain are."""
    fields = _fields(value)
    if len(fields) == 2:
        role, content = fields.get("role"), fields.get("content")
        if isinstance(role, str) and isinstance(content, str):  # as most are: the same, sooner
            return hash((role, content))
    return hash(marshal.dumps(cast("Any", value)))


def _link(root: bytes, previous: int, payload: bytes) -> int:
    digest = blake2b(previous.to_bytes(8, "big") + payload, digest_size=8, key=root).digest()
    return int.from_bytes(digest, "big") or 1


def _segment_chain(root: bytes, data: bytes) -> tuple[list[int], list[int]]:
    keys: list[int] = []
    ends: list[int] = []
    for start in range(0, len(data), SEGMENT_BYTES):
        segment = data[start : start + SEGMENT_BYTES]
        keys.append(_link(root, keys[-1] if keys else 0, segment))
        ends.append(start + len(segment))
    return keys or [_link(root, 0, b"")], ends or [0]


def _utf8(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(_utf8(text))


def _fields(message: object) -> dict[str, Any]:
    return cast("dict[str, Any]", message) if isinstance(message, dict) else {}


def _said(message: object) -> tuple[bytes, int]:
    """A message as bytes that no other message has, and how many bytes of text it counts for."""
    fields = _fields(message)
    role, content = fields.get("role"), fields.get("content")
    plain = len(fields) == 2 and isinstance(role, str) and len(role) <= ROLE_CACHED_MAX
    if plain and isinstance(role, str) and isinstance(content, str):  # as most are: the same, sooner
        text = _utf8(content.strip() if role == "assistant" else content)
        return _plain_head(role) + text, len(text)
    normalised = _normalised(message)
    return _payload(normalised), _text_bytes(normalised)


def _payload(message: object) -> bytes:
    """A message as bytes that no other message has. Text, which may be long, is not escaped on its way."""
    fields = _fields(message)
    content = fields.get("content")
    if not isinstance(content, str):
        return bytes(4) + _canonical(message)
    return _sized(_canonical({**fields, "content": None})) + _utf8(content)


@lru_cache(maxsize=64)
def _plain_head(role: str) -> bytes:
    """The head of messages that have a role and text only, as most have."""
    return _sized(_canonical({"content": None, "role": role}))


def _sized(head: bytes) -> bytes:
    return len(head).to_bytes(4, "big") + head


def _canonical(value: object) -> bytes:
    return _CANONICAL.encode(value).encode()


def _normalised(message: object) -> object:
    """A message without what clients change when they send a reply back: reasoning, nulls, white space."""
    if not isinstance(message, dict):
        return message
    fields = cast("dict[str, Any]", message)
    content = _content(fields.get("content"))
    if fields.get("role") != "assistant":
        return {**{name: value for name, value in fields.items() if value is not None}, "content": content}
    kept: dict[str, Any] = {
        "role": "assistant",
        "content": content.strip() if isinstance(content, str) else content,
    }
    calls = fields.get("tool_calls")
    if isinstance(calls, list) and calls:
        kept["tool_calls"] = [_tool_call(call) for call in cast("list[object]", calls)]
    return kept


def _content(content: object) -> object:
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    parts = cast("list[object]", content)
    texts = [_part_text(part) for part in parts]
    return "\n".join(text for text in texts if text is not None) if None not in texts else parts


def _part_text(part: object) -> str | None:
    if not isinstance(part, dict):
        return None
    fields = cast("dict[str, Any]", part)
    text = fields.get("text")
    return text if fields.get("type") == "text" and isinstance(text, str) else None


def _tool_call(call: object) -> object:
    if not isinstance(call, dict):
        return call
    fields = cast("dict[str, Any]", call)
    function = fields.get("function")
    if not isinstance(function, dict):
        return fields
    named = cast("dict[str, Any]", function)
    arguments: object = named.get("arguments")
    # A model may write anything: what does not parse, or is nested too deeply, counts as it stands.
    with suppress(ValueError, RecursionError):
        parsed: object = json.loads(arguments) if isinstance(arguments, str) else arguments
        arguments = _canonical(parsed).decode()
    return {"id": fields.get("id"), "name": named.get("name"), "arguments": arguments}


def _text_bytes(message: object) -> int:
    if not isinstance(message, dict):
        return len(_canonical(message))
    fields = cast("dict[str, Any]", message)
    content = fields.get("content")
    if isinstance(content, str):
        size = _utf8_bytes(content)
    elif isinstance(content, list):
        parts = cast("list[object]", content)
        sizes = [OPAQUE_PART_BYTES if text is None else _utf8_bytes(text) for text in map(_part_text, parts)]
        size = sum(sizes)
    else:
        size = 0
    calls = fields.get("tool_calls")
    return size + (len(_canonical(calls)) if calls else 0)
