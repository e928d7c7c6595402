"""OpenAI's Responses API.

An engine keeps responses in its own memory, if at all, and two turns of a conversation may meet two engines. So the
router resolves `previous_response_id` itself, and no engine is asked to store anything.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from kvlease.core.conversation import Reply, Transcript, message_transcript
from kvlease.core.errors import InvalidArgument
from kvlease.router.dialect import (
    ReplyReader,
    TextPlace,
    Usage,
    cached_at_most,
    count_of,
    encode,
    mapping,
    objects,
    text_of,
    without,
    without_orders,
)
from kvlease.router.responses import ResponseStore, UnknownResponse

OURS = (
    "previous_response_id",
    "request_id",  # would be one id for both legs and for a retry; an engine mints its own
    "background",
)
PREFILL_DROPPED = ("stop", "include", "top_logprobs", "include_stop_str_in_output", "stream_options")
CALLS = ("function_call", "custom_tool_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


class ResponsesDialect:
    """One request of the Responses API, with its history in place of `previous_response_id`.

    Raises:
        InvalidArgument: it asks for what needs a store at the engine.
        UnknownResponse: the previous response is not known here.
    """

    choices = 1

    def __init__(self, body: Mapping[str, Any], tenant: str, store: ResponseStore | None) -> None:
        for name in ("background", "conversation"):
            if body.get(name):
                raise InvalidArgument(f"{name} is not supported: it needs a store at the engine")
        self._previous_id = text_of(body.get("previous_response_id"))
        self._tenant = tenant
        self._reused: int | None = None
        self._store = store if body.get("store") is not False else None
        self._items = _items(body.get("input"))
        self._body: dict[str, Any] = {**without(body, OURS), "store": False}
        if self._previous_id:
            history = store.history(tenant, self._previous_id) if store is not None else None
            if history is None:
                raise UnknownResponse(self._previous_id)
            self._body["input"] = [*history, *self._items]

    def transcript(self, tenant: str, model: str) -> Transcript | None:
        """The chain over instructions and items, as chat messages."""
        items = _items(self._body.get("input"))
        if not items:
            return None
        instructions = text_of(self._body.get("instructions"))
        head = [{"role": "system", "content": instructions}] if instructions else []
        return message_transcript(tenant, model, [*head, *_chat(items)], self._body.get("tools") or None)

    def prefill_fields(self) -> dict[str, Any]:
        """One token, no stream."""
        body = without(self._body, PREFILL_DROPPED)
        body["stream"] = False
        body["max_output_tokens"] = 1
        if body.get("tool_choice") == "required" or isinstance(body.get("tool_choice"), dict):
            # One token is no whole call: an engine that has to parse one answers 400 or 500.
            body["tool_choice"] = "none"
        return body

    def decode_fields(self) -> dict[str, Any]:
        """The client's body with the whole history: streams of this API always count usage."""
        return dict(self._body)

    def reader(self) -> "ResponseReader":
        """A reader of one engine's answer."""
        return ResponseReader()

    def reused(self, tokens: int | None) -> None:
        """From here on `clean` and `remember` count so many tokens of the prompt as cached at most."""
        self._reused = tokens

    def clean(self, chunk: dict[str, Any], *, streamed: bool) -> dict[str, Any] | None:
        """Without the router's parameters, and with the previous id that the client named."""
        if not streamed:
            return self._answered(chunk)
        kept = without_orders(chunk)
        response = mapping(kept.get("response"))
        answered = self._answered(response) if response else response
        return kept if answered is response else {**kept, "response": answered}

    def remember(self, reader: ReplyReader) -> None:
        """Keeps the response for a request that names it."""
        if self._store is None or not isinstance(reader, ResponseReader):
            return
        response = self._answered(reader.response)
        response_id = text_of(response.get("id"))
        if response_id:
            self._store.put(self._tenant, response_id, self._previous_id, self._items, response)

    def _answered(self, response: dict[str, Any]) -> dict[str, Any]:
        kept = without_orders(response)
        usage = cached_at_most(kept.get("usage"), self._reused)
        if usage is not kept.get("usage"):
            kept = {**kept, "usage": usage}
        return {**kept, "previous_response_id": self._previous_id} if self._previous_id else kept


class ResponseReader:
    """Learns how a response ends and which items it holds."""

    def __init__(self) -> None:
        self.usage = Usage()
        self.failed = False
        self.failed_silently = False
        self.ended = False
        self.response: dict[str, Any] = {}
        self._done: list[dict[str, Any]] = []

    @property
    def finished_well(self) -> bool:
        """The response is complete, or as long as it was allowed to be."""
        return not self.failed and self.response.get("status") in ("completed", "incomplete")

    @property
    def awaits_tools(self) -> bool:
        """The response calls tools that the client runs."""
        return any(item.get("type") in CALLS for item in self._output())

    def reply(self) -> Reply:
        """The response as one chat message."""
        said = [message for message in _chat(self._output()) if message.get("role") == "assistant"]
        if not said:
            return Reply()
        return Reply(text_of(said[-1]["content"]), tuple(objects(said[-1].get("tool_calls"))))

    def text_place(self, chunk: dict[str, Any]) -> TextPlace | None:
        """None: the events of this API are read one by one."""
        return None

    def read(self, answer: dict[str, Any]) -> None:
        """Takes an event of a stream, or a whole response."""
        kind = text_of(answer.get("type"))
        if kind == "error" or answer.get("error"):
            self.failed = True
        elif kind == "response.output_item.done":
            self._done.append(mapping(answer.get("item")))
        elif kind in TERMINAL:
            self.ended = True
            self._take(mapping(answer.get("response")))
        elif answer.get("object") == "response":
            self._take(answer)

    def _take(self, response: dict[str, Any]) -> None:
        self.response = response
        self.failed = self.failed or response.get("status") in ("failed", "cancelled")
        usage = mapping(response.get("usage"))
        details = mapping(usage.get("input_tokens_details"))
        self.usage = Usage(
            count_of(usage.get("input_tokens")),
            count_of(usage.get("output_tokens")),
            count_of(details.get("cached_tokens")),
        )

    def _output(self) -> list[dict[str, Any]]:
        return objects(self.response.get("output")) or self._done


def _items(value: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": value}] if isinstance(value, str) else objects(value)


def _chat(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages of items. What one reply holds, messages and calls, is one message; reasoning is none."""
    chat: list[dict[str, Any]] = []
    reply: dict[str, Any] | None = None
    for item in items:
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind in CALLS or (kind == "message" and item.get("role") == "assistant"):
            if reply is None:
                reply = {"role": "assistant", "content": "", "tool_calls": []}
                chat.append(reply)
            _add_to_reply(reply, item)
            continue
        reply = None
        chat.append(_message(item))
    return chat


def _add_to_reply(reply: dict[str, Any], item: dict[str, Any]) -> None:
    if item.get("type") in CALLS:
        arguments = text_of(item.get("arguments")) or text_of(item.get("input"))
        function = {"name": item.get("name"), "arguments": arguments}
        reply["tool_calls"].append({"id": item.get("call_id"), "type": "function", "function": function})
        return
    content = item.get("content")
    texts = (
        [content] if isinstance(content, str) else [text_of(part.get("text")) for part in objects(content)]
    )
    reply["content"] += "".join(texts)


def _message(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("type") in RESULTS:
        output = item.get("output")
        told = output if isinstance(output, str) else encode({"output": output}).decode()
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": told}
    if item.get("type", "message") != "message":
        return without(item, ("id", "status"))
    content: object = item.get("content")
    parts = [
        {"type": "text", "text": part.get("text")} if part.get("type") == "input_text" else part
        for part in objects(content)
    ]
    return {"role": item.get("role"), "content": parts if isinstance(content, list) else content}
