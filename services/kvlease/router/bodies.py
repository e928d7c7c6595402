"""The bodies of a turn: what a client sent, what each leg gets, what the client gets back.

Whatever a client may send stays valid on the prefill leg; whatever is the router's never crosses it in either
direction.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from kvlease.core.conversation import Transcript, cache_salt, message_transcript, prompt_transcript
from kvlease.core.errors import InvalidArgument
from kvlease.core.turn import PARAMS_KEY, TurnParams, TurnReport

CONVERSATION_FIELD = "conversation_id"
CONVERSATION_ID_BYTES_MAX = 512
KV_FIELD = "kv_transfer_params"

CONTENT_FIELDS = frozenset({"messages", "prompt", "tools", "functions", "response_format", "metadata"})
"""Fields whose insides are the client's own words or schemas: nothing is stripped in them."""

PREFILL_DROPPED = (
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
)
"""Fields that cost on the prefill leg, or that would not be valid beside one token without a stream."""


class Api(Enum):
    """The two APIs that take turns; the value is the path at the engine."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """A client's request, without what belongs to the router.

    Attributes:
        body: the client's fields with `cache_salt` set; shared, never changed.
        conversation_id: as the client gave it, empty without one.
        transcript: the chain over what was said; None when the request has no single prompt.
        choices: answers asked for.
        wants_usage: the client asked for usage in the stream.
    """

    api: Api
    body: Mapping[str, Any]
    tenant: str
    model: str
    conversation_id: str
    transcript: Transcript | None
    stream: bool
    choices: int
    wants_usage: bool


def parse_turn(
    api: Api, raw: bytes, tenant: str, header_id: str = "", *, isolate: bool = True
) -> TurnRequest:
    """Reads a client's body.

    Args:
        header_id: the conversation's id from a header; one in the body is preferred.
        isolate: salt the engines' prefix caches with the tenant.

    Raises:
        InvalidArgument: no JSON object in UTF-8, or a conversation id that is none; says so to the client.
    """
    try:
        body = _object(raw)
        conversation_id = _conversation_id(body.pop(CONVERSATION_FIELD, None)) or _conversation_id(header_id)
        _strip_all(body)
        if isolate:
            salt = body.get("cache_salt")
            client_salt = salt if isinstance(salt, str) else "" if salt is None else json.dumps(salt)
            body["cache_salt"] = cache_salt(tenant, client_salt)
        model = body.get("model")
        named = model if isinstance(model, str) else ""
        encode(body)
        return TurnRequest(
            api=api,
            body=body,
            tenant=tenant,
            model=named,
            conversation_id=conversation_id,
            transcript=_transcript(api, body, tenant, named),
            stream=body.get("stream") is True,
            choices=_choices(body),
            wants_usage=_wants_usage(body),
        )
    except RecursionError as error:
        raise InvalidArgument("the body is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise InvalidArgument("the body holds text that is no valid Unicode") from error


def prefill_body(request: TurnRequest, params: TurnParams) -> bytes:
    """The body of the prefill leg: one token, one choice, no stream."""
    body = {name: value for name, value in request.body.items() if name not in PREFILL_DROPPED}
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
    return encode(_with_params(body, params))


def decode_body(request: TurnRequest, params: TurnParams | None) -> bytes:
    """The body of the decode leg: the client's, with usage counted in a stream."""
    body = dict(request.body)
    if request.stream and not request.wants_usage:
        options = body.get("stream_options")
        if options is None or isinstance(options, dict):
            known = cast("dict[str, Any]", options or {})
            body["stream_options"] = {**known, "include_usage": True}
    return encode(body if params is None else _with_params(body, params))


def report_of(answer: Mapping[str, Any]) -> TurnReport | None:
    """What the engine's connector reports, None when it reports nothing readable."""
    params = answer.get(KV_FIELD)
    if not isinstance(params, dict):
        return None
    try:
        return TurnReport.from_json(cast("dict[str, Any]", params).get(PARAMS_KEY))
    except InvalidArgument:
        return None


def parse_answer(raw: bytes) -> dict[str, Any] | None:
    """An engine's JSON object, None when it is something else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def client_answer(raw: bytes, answer: dict[str, Any] | None) -> bytes:
    """An engine's answer without what is the router's; the engine's own bytes when nothing is."""
    if answer is None or not (KV_FIELD in answer or PARAMS_KEY in answer):
        return raw
    return encode({name: value for name, value in answer.items() if name not in (KV_FIELD, PARAMS_KEY)})


def error_body(status: int, message: str, code: str = "") -> bytes:
    """An error in the shape of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return encode({"error": {"message": message, "type": kind, "param": None, "code": code or status}})


def encode(body: Mapping[str, Any]) -> bytes:
    """JSON in UTF-8 without spaces."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidArgument("the body is not valid UTF-8") from error
    except ValueError as error:
        raise InvalidArgument("the body is not valid JSON") from error
    if not isinstance(value, dict):
        raise InvalidArgument("the body must be a JSON object")
    return cast("dict[str, Any]", value)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _conversation_id(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InvalidArgument(f"{CONVERSATION_FIELD} must be a string")
    text = str(value)
    if len(text.encode()) > CONVERSATION_ID_BYTES_MAX:
        raise InvalidArgument(f"{CONVERSATION_FIELD} is longer than {CONVERSATION_ID_BYTES_MAX} bytes")
    return text


def _strip_all(body: dict[str, Any]) -> None:
    """Removes the router's keys from the body and from all in it that an engine reads parameters from."""
    for name in (KV_FIELD, PARAMS_KEY):
        body.pop(name, None)
    for name, value in body.items():
        if name not in CONTENT_FIELDS:
            _strip(value)


def _strip(value: object) -> None:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        for name in (KV_FIELD, PARAMS_KEY):
            fields.pop(name, None)
        for inner in fields.values():
            _strip(inner)
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            _strip(inner)


def _transcript(api: Api, body: Mapping[str, Any], tenant: str, model: str) -> Transcript | None:
    if api is Api.CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            return None
        said = cast("list[object]", messages)
        if not all(isinstance(message, dict) for message in said):
            return None
        return message_transcript(tenant, model, said, body.get("tools"))
    prompt: object = body.get("prompt")
    if isinstance(prompt, list) and len(cast("list[object]", prompt)) == 1:
        only = cast("list[object]", prompt)[0]
        prompt = cast("object", only) if isinstance(only, str | list) else cast("object", prompt)
    if isinstance(prompt, str):
        return prompt_transcript(tenant, model, prompt)
    if isinstance(prompt, list) and all(type(token) is int for token in cast("list[object]", prompt)):
        tokens = cast("list[int]", prompt)
        return prompt_transcript(tenant, model, tokens) if all(0 <= t < 1 << 32 for t in tokens) else None
    return None


def _choices(body: Mapping[str, Any]) -> int:
    choices = body.get("n")
    return choices if type(choices) is int and choices > 1 else 1


def _wants_usage(body: Mapping[str, Any]) -> bool:
    options = body.get("stream_options")
    return isinstance(options, dict) and cast("dict[str, Any]", options).get("include_usage") is True


def _with_params(body: dict[str, Any], params: TurnParams) -> dict[str, Any]:
    return {**body, KV_FIELD: {PARAMS_KEY: params.to_json()}}
