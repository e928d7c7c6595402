"""Chat completions and completions: the APIs whose answers are choices."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kvlease.core.conversation import Reply, Transcript, message_transcript, prompt_transcript
from kvlease.router.dialect import (
    Api,
    ReplyReader,
    TextPlace,
    Usage,
    cached_at_most,
    count_of,
    mapping,
    objects,
    text_of,
    without,
    without_orders,
)

PREFILL_DROPPED = frozenset(
    {
        "stream_options",
        "stop",  # ends the one token's request as an abort, which hands nothing over
        "include_stop_str_in_output",
        "best_of",
        "use_beam_search",
        "logprobs",
        "top_logprobs",
        "logprob_token_ids",
        "prompt_logprobs",
        "echo",
        "return_token_ids",
        "return_tokens_as_token_ids",
    }
)
"""Fields that cost on the prefill leg, or that would not be valid beside one token without a stream."""

NO_TOP_LOGPROBS = 0
"""vLLM's default in chat completions, which counts as asked for where the prompt is echoed."""

GOOD_ENDS = frozenset({"stop", "length", "tool_calls", "function_call"})


def wants_prompt_logprobs(api: Api, body: Mapping[str, Any]) -> bool:
    """Whether the log probabilities of the prompt's tokens are asked for, which no held KV can give.

    An engine then reads none (vLLM's `SamplingParams.skip_reading_prefix_cache`). `echo` asks for as many as are
    asked for of the answer (`to_sampling_params` in vLLM's `protocol.py` of both APIs).
    """
    if api not in (Api.CHAT, Api.COMPLETIONS):
        return False
    if body.get("prompt_logprobs") is not None:
        return True
    if body.get("echo") is not True:
        return False
    if api is Api.CHAT:
        return body.get("top_logprobs", NO_TOP_LOGPROBS) is not None
    return body.get("logprobs") is not None


class ChoicesDialect:
    """One request of either API."""

    def __init__(self, api: Api, body: Mapping[str, Any]) -> None:
        self._api = api
        self._body = body
        prompts = _prompts(body.get("prompt")) if api is Api.COMPLETIONS else 1
        self.choices = prompts * max(1, count_of(body.get("n")))
        self._stream = body.get("stream") is True
        self._wants_usage = mapping(body.get("stream_options")).get("include_usage") is True
        self._reused: int | None = None

    def transcript(self, tenant: str, model: str) -> Transcript | None:
        """The chain over the messages, or over a single prompt."""
        if self._api is Api.CHAT:
            return _of_messages(self._body, tenant, model)
        return _of_prompt(self._body.get("prompt"), tenant, model)

    def prefill_fields(self) -> dict[str, Any]:
        """One token, one choice, no stream."""
        body = without(self._body, PREFILL_DROPPED)
        body["stream"] = False
        body["max_tokens"] = 1
        if "max_completion_tokens" in body:
            body["max_completion_tokens"] = 1
        if "min_tokens" in body and body["min_tokens"] != 0:
            body["min_tokens"] = 1
        if "n" in body:
            body["n"] = 1
        if body.get("tool_choice") == "required" or isinstance(body.get("tool_choice"), dict):
            # One token is no whole call: an engine that has to parse one answers 400 or 500.
            body["tool_choice"] = "none"
        return body

    def decode_fields(self) -> dict[str, Any]:
        """The client's body, with usage counted in a stream."""
        body = dict(self._body)
        if self._stream and not self._wants_usage:
            given = mapping(body.get("stream_options"))
            if body.get("stream_options") in (None, given):  # what is no object is the engine's to refuse
                body["stream_options"] = {**given, "include_usage": True}
        return body

    def reader(self) -> "ChoicesReader":
        """A reader of one engine's answer."""
        return ChoicesReader(self.choices)

    def reused(self, tokens: int | None) -> None:
        """From here on `clean` counts so many tokens of the prompt as cached at most."""
        self._reused = tokens

    def clean(self, chunk: dict[str, Any], *, streamed: bool) -> dict[str, Any] | None:
        """Without the router's parameters, and without usage in a stream that nobody asked for."""
        kept = without_orders(chunk)
        if "usage" not in kept:
            return kept
        if not (streamed and self._stream and not self._wants_usage):
            usage = cached_at_most(kept["usage"], self._reused)
            return kept if usage is kept["usage"] else {**kept, "usage": usage}
        if kept["usage"] is not None and kept.get("choices") == []:
            return None
        return without(kept, ("usage",))

    def remember(self, reader: ReplyReader) -> None:
        """Nothing: requests of these APIs carry their whole history."""


@dataclass(slots=True)
class _ToolCall:
    call_id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list[str])


class ChoicesReader:
    """Learns how every choice ends, and what the first one said."""

    ended = False
    """A stream of these APIs ends in `[DONE]`, which is no chunk."""

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
        return ended and not self.failed and all(finish in GOOD_ENDS for finish in self._finished.values())

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
        usage = answer.get("usage")
        if usage is not None:
            self._read_usage(usage)
        choices = answer.get("choices")
        for choice in cast("list[object]", choices) if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._read_choice(cast("dict[str, Any]", choice))

    def text_place(self, chunk: dict[str, Any]) -> TextPlace | None:
        """That of a chunk in which the first choice goes on, and nothing else happens."""
        choices = objects(chunk.get("choices"))
        if len(choices) != 1 or chunk.get("error") or chunk.get("usage") is not None:
            return None
        choice = choices[0]
        if type(choice.get("index")) is not int or choice["index"] != 0 or choice.get("finish_reason"):
            return None
        said = choice.get("delta") or choice.get("message")
        fields, name = (
            (cast("dict[str, Any]", said), "content") if isinstance(said, dict) else (choice, "text")
        )
        if not isinstance(fields.get(name), str) or fields.get("tool_calls") is not None:
            return None
        return TextPlace(fields, name, self._texts.append)

    def _read_usage(self, value: object) -> None:
        if not isinstance(value, dict):
            return
        usage = cast("dict[str, Any]", value)
        self.usage.prompt_tokens = count_of(usage.get("prompt_tokens"))
        self.usage.completion_tokens = count_of(usage.get("completion_tokens"))
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict):
            self.usage.cached_tokens = count_of(cast("dict[str, Any]", details).get("cached_tokens"))

    def _read_choice(self, choice: dict[str, Any]) -> None:
        index = choice.get("index")
        if type(index) is not int or index < 0:
            index = 0
        finish = choice.get("finish_reason")
        if finish and isinstance(finish, str):
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
        if not isinstance(calls, list):
            return
        for place, call in enumerate(cast("list[object]", calls)):
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
            known.name = text_of(named.get("name")) or known.name
            known.arguments.append(text_of(named.get("arguments")))


def _prompts(prompt: object) -> int:
    """How many prompts a request of completions holds: each of them is answered with `n` choices."""
    listed = cast("list[object]", prompt) if isinstance(prompt, list) else []
    return max(1, sum(isinstance(one, str | list) for one in listed))


def _of_messages(body: Mapping[str, Any], tenant: str, model: str) -> Transcript | None:
    messages = body.get("messages")
    said = objects(messages)
    if not isinstance(messages, list) or not said or len(said) != len(cast("list[object]", messages)):
        return None
    return message_transcript(tenant, model, said, body.get("tools"))


def _of_prompt(prompt: object, tenant: str, model: str) -> Transcript | None:
    if isinstance(prompt, list) and len(cast("list[object]", prompt)) == 1:
        only = cast("list[object]", prompt)[0]
        prompt = cast("object", only) if isinstance(only, str | list) else cast("object", prompt)
    if isinstance(prompt, str):
        return prompt_transcript(tenant, model, prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in cast("list[object]", prompt)):
        tokens = cast("list[int]", prompt)
        return prompt_transcript(tenant, model, tokens) if all(0 <= t < 1 << 32 for t in tokens) else None
    return None
