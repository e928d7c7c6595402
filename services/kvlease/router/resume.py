"""Streams that go on at another engine when theirs breaks off, if the operator wants that.

The engine is asked for its token ids beside the text. When the stream breaks, another engine gets the prompt and
what was generated, as token ids, and generates the rest; the client sees one stream. Only requests whose rest does
not depend on where generation began are resumed: a penalty, a seed, a grammar or a stop string would count from
anew, and text that an engine took apart (tool calls, reasoning) can not be taken apart from its middle.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from kvlease.core.conversation import Transcript
from kvlease.router.dialect import Api, Dialect, ReplyReader, count_of, mapping, objects, without

RESUMED_PATH = Api.COMPLETIONS.value
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "ignore_eos",
    "user",
    "priority",
    "cache_salt",
    "model",
)
"""Fields of a request that mean the same in the middle of an answer as at its beginning."""

LIMIT_FIELDS = ("max_completion_tokens", "max_tokens")
NEUTRAL_FIELDS = frozenset(
    {*SAMPLING_FIELDS, *LIMIT_FIELDS, "messages", "prompt", "stream", "stream_options"}
)
TOKEN_FIELDS = ("token_ids", "prompt_token_ids")
DELTA_FIELDS = frozenset({"role", "content"})


@dataclass(slots=True)
class StreamMemory:
    """What is needed to go on with one stream.

    Attributes:
        limit: tokens that the answer may have.
        head: what all chunks of the client's stream have in common.
        whole: everything that the client got is known as tokens.
    """

    chat: bool
    limit: int
    head: dict[str, Any] = field(default_factory=dict[str, Any])
    prompt_token_ids: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    whole: bool = True

    @property
    def can_resume(self) -> bool:
        """Whether another engine can go on here."""
        return self.whole and bool(self.prompt_token_ids) and 0 < len(self.token_ids) < self.limit

    def note(self, chunk: Mapping[str, Any]) -> None:
        """Takes a chunk that the client gets."""
        if not self.head:
            self.head = {
                name: chunk[name]
                for name in ("id", "created", "model", "system_fingerprint")
                if name in chunk
            }
        self.prompt_token_ids += _token_ids(chunk.get("prompt_token_ids"))
        for choice in objects(chunk.get("choices")):
            self.prompt_token_ids += _token_ids(choice.get("prompt_token_ids"))
            told = _token_ids(choice.get("token_ids"))
            delta = mapping(choice.get("delta"))
            said = delta.get("content") or choice.get("text")
            odd = any(value is not None for name, value in delta.items() if name not in DELTA_FIELDS)
            self.whole = self.whole and not odd and (bool(told) or not said)
            self.token_ids += told


class RememberingDialect:
    """A request's dialect that asks the engine for token ids, remembers them, and tells nobody."""

    def __init__(self, inner: Dialect, memory: StreamMemory) -> None:
        self._inner = inner
        self._memory = memory
        self.choices = inner.choices

    def transcript(self, tenant: str, model: str) -> Transcript | None:
        """The request's."""
        return self._inner.transcript(tenant, model)

    def prefill_fields(self) -> dict[str, Any]:
        """The request's."""
        return self._inner.prefill_fields()

    def decode_fields(self) -> dict[str, Any]:
        """The request's, and token ids."""
        return {**self._inner.decode_fields(), "return_token_ids": True}

    def reader(self) -> ReplyReader:
        """The request's."""
        return self._inner.reader()

    def reused(self, tokens: int | None) -> None:
        """As the request's."""
        self._inner.reused(tokens)

    def clean(self, chunk: dict[str, Any], *, streamed: bool) -> dict[str, Any] | None:
        """As the request's; without the token ids, that only the router asked for."""
        self._memory.note(chunk)
        kept = self._inner.clean(chunk, streamed=streamed)
        return None if kept is None else _without_tokens(kept)

    def remember(self, reader: ReplyReader) -> None:
        """As the request's."""
        self._inner.remember(reader)


class ContinuedDialect(RememberingDialect):
    """The rest of an answer, from the completions API, as the rest of the client's stream.

    Args:
        reader: has read the beginning.
    """

    def __init__(
        self, inner: Dialect, memory: StreamMemory, body: Mapping[str, Any], reader: ReplyReader
    ) -> None:
        super().__init__(inner, memory)
        self._body = body
        self._read_before = reader
        self._known = len(memory.token_ids)

    def decode_fields(self) -> dict[str, Any]:
        """A completion of the prompt and of what was generated."""
        memory = self._memory
        return {
            **{name: self._body[name] for name in SAMPLING_FIELDS if name in self._body},
            "prompt": [*memory.prompt_token_ids, *memory.token_ids],
            "max_tokens": memory.limit - self._known,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    def reader(self) -> ReplyReader:
        """The one that has read the beginning."""
        return self._read_before

    def clean(self, chunk: dict[str, Any], *, streamed: bool) -> dict[str, Any] | None:
        """A chunk as the first engine would have written it."""
        changed = {**chunk, **self._memory.head}
        if usage := mapping(chunk.get("usage")):
            changed["usage"] = self._whole_usage(usage)
        if self._memory.chat and "error" not in chunk:
            changed["object"] = "chat.completion.chunk"
            changed["choices"] = [_as_delta(choice) for choice in objects(chunk.get("choices"))]
        kept = self._inner.clean(changed, streamed=streamed)
        return None if kept is None else _without_tokens(kept)

    def _whole_usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Counts as if one engine had generated everything, for the client and for the reader alike."""
        counted = self._read_before.usage
        counted.prompt_tokens = count_of(usage.get("prompt_tokens")) - self._known
        counted.completion_tokens = count_of(usage.get("completion_tokens")) + self._known
        whole = {
            **usage,
            "prompt_tokens": counted.prompt_tokens,
            "completion_tokens": counted.completion_tokens,
        }
        if details := mapping(usage.get("prompt_tokens_details")):
            cached = min(count_of(details.get("cached_tokens")), counted.prompt_tokens)
            whole["prompt_tokens_details"] = {**details, "cached_tokens": cached}
        return whole


def memory_of(api: Api, body: Mapping[str, Any]) -> StreamMemory | None:
    """A memory for the stream of a request, None when its rest could not be told from its beginning."""
    if api not in (Api.CHAT, Api.COMPLETIONS) or body.get("stream") is not True:
        return None
    given = {name for name, value in body.items() if value is not None}
    limit = next((body[name] for name in LIMIT_FIELDS if body.get(name) is not None), None)
    single = api is Api.CHAT or isinstance(body.get("prompt"), str)
    if not given <= NEUTRAL_FIELDS or not single or type(limit) is not int:
        return None
    return StreamMemory(chat=api is Api.CHAT, limit=limit)


def _as_delta(choice: dict[str, Any]) -> dict[str, Any]:
    rest = without(choice, ("text", "stop_reason", "prompt_logprobs"))
    return {**rest, "delta": {"content": choice.get("text") or ""}}


def _without_tokens(chunk: dict[str, Any]) -> dict[str, Any]:
    kept = without(chunk, TOKEN_FIELDS)
    if "choices" in kept:
        kept["choices"] = [without(choice, TOKEN_FIELDS) for choice in objects(kept["choices"])]
    return kept


def _token_ids(value: object) -> list[int]:
    listed = cast("list[object]", value) if isinstance(value, list) else []
    return [one for one in listed if isinstance(one, int)]
