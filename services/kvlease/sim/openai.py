"""The shapes of the OpenAI API: what a request asks for, and how a reply is told."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import orjson

from kvlease.core.errors import InvalidArgument
from kvlease.core.turn import PARAMS_KEY, TurnParams, TurnReport
from kvlease.sim.engine import SimRequest
from kvlease.sim.model import Sample, tokens_of_messages, tokens_of_text

MAX_TOKENS_DEFAULT = 16


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of the API.

    Attributes:
        chat: of the chat API, else of the completions API.
        token_ids: whether the reply tells its token ids.
    """

    request: SimRequest
    chat: bool
    model: str
    stream: bool
    choices: int
    logprobs: bool
    token_ids: bool
    usage: bool


def read_ask(body: object, *, chat: bool, default_model: str) -> Ask:
    """Reads a body.

    Raises:
        InvalidArgument: it is no request that can be served; the message says why.
    """
    if not isinstance(body, dict):
        raise InvalidArgument("the body must be a JSON object")
    fields = cast("dict[str, Any]", body)
    options = fields.get("stream_options")
    limit = fields.get("max_completion_tokens", fields.get("max_tokens"))
    return Ask(
        request=SimRequest(
            token_ids=tuple(_prompt(fields, chat=chat)),
            max_tokens=_whole(limit if limit is not None else MAX_TOKENS_DEFAULT, "max_tokens"),
            cache_salt=str(fields.get("cache_salt") or ""),
            stop=_stop(fields.get("stop")),
            params=_params(fields.get("kv_transfer_params")),
        ),
        chat=chat,
        model=str(fields.get("model") or default_model),
        stream=fields.get("stream") is True,
        choices=_whole(fields.get("n") or 1, "n"),
        logprobs=fields.get("logprobs") not in (None, False),
        token_ids=fields.get("return_token_ids") is True,
        usage=isinstance(options, Mapping)
        and cast("Mapping[str, Any]", options).get("include_usage") is True,
    )


def read_tokens(body: object) -> list[int]:
    """The tokens of a body of messages or of a prompt.

    Raises:
        InvalidArgument: it has neither.
    """
    if not isinstance(body, dict):
        raise InvalidArgument("the body must be a JSON object")
    fields = cast("dict[str, Any]", body)
    return _prompt(fields, chat="messages" in fields)


class ReplyWriter:
    """Tells one request's replies, whole or as chunks of a stream."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        prefix = "chatcmpl" if ask.chat else "cmpl"
        self._head: dict[str, Any] = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": ask.model,
        }

    def whole(self, choices: Sequence[tuple[Sequence[Sample], str]], report: TurnReport) -> dict[str, Any]:
        """The whole answer. Choices are samples and the reason why they end."""
        body = self._body("chat.completion" if self._ask.chat else "text_completion")
        body["choices"] = [
            self._choice(index, samples, reason) for index, (samples, reason) in enumerate(choices)
        ]
        body["usage"] = self.usage(sum(len(samples) for samples, _ in choices), report)
        if self._ask.request.params is not None:
            body["kv_transfer_params"] = {PARAMS_KEY: report.to_json()}
        return body

    def chunk(self, index: int, sample: Sample, reason: str, *, first: bool) -> bytes:
        """One token as an event of a stream."""
        body = self._body("chat.completion.chunk" if self._ask.chat else "text_completion")
        choice: dict[str, Any] = {"index": index, "finish_reason": reason or None}
        if self._ask.chat:
            choice["delta"] = {**({"role": "assistant"} if first else {}), "content": sample.text}
        else:
            choice["text"] = sample.text
        body["choices"] = [choice | self._details([sample])]
        if first and self._ask.token_ids:
            # Where vLLM tells them: beside the choices of the chat API, in each choice of the other one.
            (body if self._ask.chat else body["choices"][0])["prompt_token_ids"] = list(
                self._ask.request.token_ids
            )
        return _event(body)

    def last_chunk(self, completion_tokens: int, report: TurnReport) -> bytes:
        """The end of a stream, with the usage when it was asked for."""
        done = b"data: [DONE]\n\n"
        if not self._ask.usage:
            return done
        body = self._body("chat.completion.chunk" if self._ask.chat else "text_completion")
        return _event(body | {"choices": [], "usage": self.usage(completion_tokens, report)}) + done

    def usage(self, completion_tokens: int, report: TurnReport) -> dict[str, Any]:
        """The counts of tokens."""
        return {
            "prompt_tokens": report.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": report.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": report.local_tokens + report.read_tokens},
        }

    def _body(self, kind: str) -> dict[str, Any]:
        return {**self._head, "object": kind}

    def _choice(self, index: int, samples: Sequence[Sample], reason: str) -> dict[str, Any]:
        text = "".join(sample.text for sample in samples)
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if self._ask.chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return choice | self._details(samples)

    def _details(self, samples: Sequence[Sample]) -> dict[str, Any]:
        details: dict[str, Any] = {}
        if self._ask.token_ids:
            details["token_ids"] = [sample.token_id for sample in samples]
        if self._ask.logprobs and self._ask.chat:
            details["logprobs"] = {"content": [_logprob(sample) for sample in samples]}
        elif self._ask.logprobs:
            details["logprobs"] = {
                "tokens": [sample.text for sample in samples],
                "token_logprobs": [sample.logprob for sample in samples],
                "top_logprobs": [{sample.text: sample.logprob} for sample in samples],
            }
        return details


def error_body(status: int, message: str) -> dict[str, Any]:
    """An error in the shape of the API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}


def _logprob(sample: Sample) -> dict[str, Any]:
    entry = {"token": sample.text, "logprob": sample.logprob, "bytes": [sample.token_id]}
    return {**entry, "top_logprobs": [dict(entry)]}


def _event(body: Mapping[str, Any]) -> bytes:
    try:
        data = orjson.dumps(body)
    except TypeError:
        data = json.dumps(
            body, separators=(",", ":")
        ).encode()  # a model's name with half of a surrogate pair
    return b"data: " + data + b"\n\n"


def _prompt(fields: Mapping[str, Any], *, chat: bool) -> list[int]:
    if chat:
        messages = fields.get("messages")
        if not isinstance(messages, list) or not messages:
            raise InvalidArgument("messages must be a list that is not empty")
        return tokens_of_messages(cast("list[object]", messages))
    prompt = fields.get("prompt")
    if isinstance(prompt, str) and prompt:
        return tokens_of_text(prompt)
    if isinstance(prompt, list) and prompt:
        tokens = cast("list[object]", prompt)
        if all(type(token) is int and 0 <= token < 2**32 for token in tokens):
            return cast("list[int]", tokens)
    raise InvalidArgument("prompt must be text or token ids, and not empty")


def _params(value: object) -> TurnParams | None:
    """The router's orders; None when there are none or they are no orders of ours."""
    if not isinstance(value, dict) or PARAMS_KEY not in value:
        return None
    try:
        return TurnParams.from_json(cast("dict[str, Any]", value)[PARAMS_KEY])
    except InvalidArgument:
        return None


def _whole(value: object, name: str) -> int:
    if type(value) is not int or not 0 < value <= 1_000_000:
        raise InvalidArgument(f"{name} must be a whole number above 0")
    return value


def _stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(stop for stop in cast("list[object]", value) if isinstance(stop, str) and stop)
    return ()
