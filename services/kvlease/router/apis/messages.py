"""Anthropic's Messages API.

An engine turns such a request into a chat request and renders that (vLLM 0.32: `entrypoints/anthropic/serving.py`);
the transcript follows it: tool results are messages of their own, thinking is not sent back, and Claude Code's
attribution block, which vLLM leaves out of the prompt, is no part of the history.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlease.core.conversation import Reply, Transcript, message_transcript
from kvlease.router.dialect import (
    ReplyReader,
    TextPlace,
    Usage,
    cached_at_most,
    count_of,
    encode,
    encode_answer,
    mapping,
    objects,
    text_of,
    without,
    without_orders,
)
from kvlease.router.nonces import is_attribution

PREFILL_DROPPED = ("stop_sequences",)
GOOD_ENDS = frozenset({"end_turn", "max_tokens", "stop_sequence", "tool_use"})


class MessagesDialect:
    """One request of the Messages API."""

    choices = 1

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body
        self._reused: int | None = None

    def transcript(self, tenant: str, model: str) -> Transcript | None:
        """The chain over system prompt and messages, as the engine makes chat messages of them."""
        messages = self._body.get("messages")
        said = objects(messages)
        if not isinstance(messages, list) or not said:
            return None
        tools = [without(tool, ("cache_control",)) for tool in objects(self._body.get("tools"))]
        return message_transcript(tenant, model, [*_system(self._body.get("system")), *_chat(said)], tools)

    def prefill_fields(self) -> dict[str, Any]:
        """One token, no stream. A budget for thinking changes no prompt, and would exceed the one token."""
        body = without(self._body, PREFILL_DROPPED)
        body["stream"] = False
        body["max_tokens"] = 1
        if mapping(body.get("thinking")).get("type") == "enabled":
            del body["thinking"]
        if mapping(body.get("tool_choice")).get("type") in ("any", "tool"):
            # One token is no whole call: an engine that has to parse one answers 400 or 500.
            body["tool_choice"] = {"type": "none"}
        return body

    def decode_fields(self) -> dict[str, Any]:
        """The client's body: streams of this API always count usage."""
        return dict(self._body)

    def reader(self) -> "MessageReader":
        """A reader of one engine's answer."""
        return MessageReader()

    def reused(self, tokens: int | None) -> None:
        """From here on `clean` counts so many tokens of the prompt as cached at most."""
        self._reused = tokens

    def clean(self, chunk: dict[str, Any], *, streamed: bool) -> dict[str, Any] | None:
        """Without the router's parameters."""
        kept = self._cleaned(chunk)
        message = mapping(kept.get("message"))
        cleaned = self._cleaned(message)
        return kept if cleaned is message else {**kept, "message": cleaned}

    def _cleaned(self, part: dict[str, Any]) -> dict[str, Any]:
        kept = without_orders(part)
        usage = cached_at_most(kept.get("usage"), self._reused)
        return kept if usage is kept.get("usage") else {**kept, "usage": usage}

    def remember(self, reader: ReplyReader) -> None:
        """Nothing: requests of this API carry their whole history."""


@dataclass(slots=True)
class _Block:
    kind: str
    call_id: str = ""
    name: str = ""
    parts: list[str] = field(default_factory=list[str])


class MessageReader:
    """Learns how a message ends and what its blocks say."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.failed = False
        self.failed_silently = False
        self.ended = False
        self._stop_reason = ""
        self._blocks: dict[int, _Block] = {}

    @property
    def finished_well(self) -> bool:
        """The message has a reason why it stopped, and it is a good one."""
        return self._stop_reason in GOOD_ENDS and not self.failed

    @property
    def awaits_tools(self) -> bool:
        """The message calls tools."""
        return self._stop_reason == "tool_use"

    def reply(self) -> Reply:
        """The message as the engine would render it again."""
        texts: list[str] = []
        calls: list[Mapping[str, Any]] = []
        for _, block in sorted(self._blocks.items()):
            if block.kind == "text":
                texts.extend(block.parts)
            elif block.kind == "tool_use":
                calls.append(_call(block.call_id, block.name, "".join(block.parts) or "{}"))
        return Reply("".join(texts), tuple(calls))

    def text_place(self, chunk: dict[str, Any]) -> TextPlace | None:
        """None: the events of this API are read one by one."""
        return None

    def read(self, answer: dict[str, Any]) -> None:
        """Takes an event of a stream, or a whole message."""
        kind = answer.get("type")
        if kind == "error" or answer.get("error"):
            self.failed = True
        elif kind == "message":
            self._read_usage(answer.get("usage"))
            for place, block in enumerate(objects(answer.get("content"))):
                self._start(place, block)
            self._stop_reason = text_of(answer.get("stop_reason"))
        elif kind == "message_start":
            self._read_usage(mapping(answer.get("message")).get("usage"))
        elif kind == "content_block_start":
            self._start(count_of(answer.get("index")), mapping(answer.get("content_block")))
        elif kind == "content_block_delta":
            self._add(count_of(answer.get("index")), mapping(answer.get("delta")))
        elif kind == "message_delta":
            self._read_usage(answer.get("usage"))
            self._stop_reason = text_of(mapping(answer.get("delta")).get("stop_reason")) or self._stop_reason
        elif kind == "message_stop":
            self.ended = True

    def _start(self, index: int, block: dict[str, Any]) -> None:
        started = _Block(text_of(block.get("type")), text_of(block.get("id")), text_of(block.get("name")))
        if started.kind == "text":
            started.parts.append(text_of(block.get("text")))
        elif started.kind == "tool_use" and block.get("input"):
            started.parts.append(encode_answer(mapping(block["input"])).decode())
        self._blocks[index] = started

    def _add(self, index: int, delta: dict[str, Any]) -> None:
        block = self._blocks.get(index)
        if block is not None:
            block.parts.append(text_of(delta.get("text")) or text_of(delta.get("partial_json")))

    def _read_usage(self, value: object) -> None:
        """What was read from a cache, or written to one, is part of the prompt; the API counts it apart."""
        usage = mapping(value)
        if "input_tokens" in usage:
            cached = count_of(usage.get("cache_read_input_tokens"))
            written = count_of(usage.get("cache_creation_input_tokens"))
            self.usage.prompt_tokens = count_of(usage["input_tokens"]) + cached + written
            self.usage.cached_tokens = cached
        if "output_tokens" in usage:
            self.usage.completion_tokens = count_of(usage["output_tokens"])


def _system(system: object) -> list[dict[str, Any]]:
    texts = [system] if isinstance(system, str) else [text_of(block.get("text")) for block in objects(system)]
    kept = "".join(text for text in texts if not is_attribution(text))
    return [{"role": "system", "content": kept}] if kept else []


def _chat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages of this API's: one for each tool result, then one for the rest of a message."""
    chat: list[dict[str, Any]] = []
    for message in messages:
        role = message.get("role")
        content: object = message.get("content")
        blocks = objects(content)
        if role == "system":
            chat.extend(_system(content))
        elif not isinstance(content, list):
            chat.append({"role": role, "content": content})
        elif role == "assistant":
            chat.append(_assistant(blocks))
        else:
            chat.extend(_user(role, blocks))
    return chat


def _assistant(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [text_of(block.get("text")) for block in blocks if block.get("type") == "text"]
    calls = [
        _call(
            text_of(block.get("id")), text_of(block.get("name")), encode(mapping(block.get("input"))).decode()
        )
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    return {"role": "assistant", "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def _user(role: object, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block in blocks:
        bare = without(block, ("cache_control",))
        if block.get("type") == "tool_result":
            content = block.get("content")
            said = [without(part, ("cache_control",)) for part in objects(content)]
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": block.get("tool_use_id"),
                    "content": said if isinstance(content, list) else content,
                }
            )
        else:
            parts.append(bare)
    return [*results, *([{"role": role, "content": parts}] if parts else [])]


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
