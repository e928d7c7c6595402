"""The bodies of a turn: what a client sent, what each leg gets, what the client gets back.

Whatever a client may send stays valid on the prefill leg; whatever is the router's never crosses it in either
direction.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kvlease.core.conversation import Transcript, cache_salt
from kvlease.core.errors import InvalidArgument
from kvlease.core.turn import PARAMS_KEY, TurnParams, TurnReport
from kvlease.core.values import value
from kvlease.router.apis.choices import ChoicesDialect, wants_prompt_logprobs
from kvlease.router.apis.messages import MessagesDialect
from kvlease.router.apis.responses import ResponsesDialect
from kvlease.router.dialect import Api as Api
from kvlease.router.dialect import Dialect, encode, encode_answer, parse_engine_json, text_of
from kvlease.router.identity import CONVERSATION_FIELD, conversation_id_of
from kvlease.router.media import keep_media_apart
from kvlease.router.nonces import has_nonce, strip_nonce
from kvlease.router.reserved import KV_FIELD, strip_reserved
from kvlease.router.responses import ResponseStore


@value
class TurnRequest:
    """A client's request, without what belongs to the router.

    Attributes:
        body: the client's fields with `cache_salt` set; shared, never changed.
        dialect: the request in the terms of its API.
        conversation_id: as the client gave it, empty without one.
        transcript: the chain over what was said; None when the request has no single prompt.
        nonce: the prompt begins with what changes in every request, so that nothing can be reused.
        prompt_logprobs: an engine has to compute the whole prompt for the answer, whatever it holds.
    """

    api: Api
    body: Mapping[str, Any]
    dialect: Dialect
    tenant: str
    model: str
    conversation_id: str
    transcript: Transcript | None
    stream: bool
    nonce: bool = False
    prompt_logprobs: bool = False

    @property
    def choices(self) -> int:
        """Answers asked for."""
        return self.dialect.choices


@dataclass(frozen=True, slots=True)
class Reading:
    """How a router reads requests.

    Attributes:
        isolate: salt the engines' prefix caches with the tenant.
        strip_nonces: take nonces out of the head of a prompt.
        responses: what resolves `previous_response_id`; without it no response is known.
        pass_priority: a client says itself before whom an engine serves it.
    """

    isolate: bool = True
    strip_nonces: bool = False
    responses: ResponseStore | None = None
    pass_priority: bool = False


PLAIN_READING = Reading()


def parse_turn(
    api: Api, raw: bytes, tenant: str, header_id: str = "", reading: Reading = PLAIN_READING
) -> TurnRequest:
    """Reads a client's body.

    Args:
        header_id: the conversation's id from a header; one in the body is preferred.

    Raises:
        InvalidArgument: no JSON object in UTF-8, or a conversation id that is none; says so to the client.
        UnknownResponse: it goes on from a response that is not known here.
    """
    try:
        body = parse_object(raw)
        conversation_id = conversation_id_of(body, header_id)
        body.pop(CONVERSATION_FIELD, None)
        make_neutral(body, tenant, isolate=reading.isolate, pass_priority=reading.pass_priority)
        nonce = has_nonce(api, body)
        if reading.strip_nonces:
            strip_nonce(api, body)
        model = text_of(body.get("model"))
        encode(body)
        dialect = _dialect(api, body, tenant, reading.responses)
        return TurnRequest(
            api=api,
            body=body,
            dialect=dialect,
            tenant=tenant,
            model=model,
            conversation_id=conversation_id,
            transcript=dialect.transcript(tenant, model),
            stream=body.get("stream") is True,
            nonce=nonce and not reading.strip_nonces,
            prompt_logprobs=wants_prompt_logprobs(api, body),
        )
    except RecursionError as error:
        raise InvalidArgument("the body is nested too deeply") from error
    except UnicodeEncodeError as error:
        raise InvalidArgument("the body holds text that is no valid Unicode") from error


def make_neutral(body: dict[str, Any], tenant: str, *, isolate: bool, pass_priority: bool = False) -> None:
    """Removes what is the router's from a client's body, and keeps its tenant apart in the engines' caches.

    So is vLLM's `priority`, unless it may pass: among requests of all tenants an engine serves the lowest first.
    """
    strip_reserved(body)
    if not pass_priority:
        body.pop("priority", None)
    if isolate:
        salt = body.get("cache_salt")
        client_salt = salt if isinstance(salt, str) else "" if salt is None else json.dumps(salt)
        body["cache_salt"] = cache_salt(tenant, client_salt)
        keep_media_apart(body, tenant)


def prefill_body(request: TurnRequest, params: TurnParams) -> bytes:
    """The body of the prefill leg: one token, one choice, no stream."""
    return encode_answer(_with_params(request.dialect.prefill_fields(), params))


def decode_body(request: TurnRequest, params: TurnParams | None) -> bytes:
    """The body of the decode leg: the client's, with usage counted in a stream, and what an engine said before."""
    body = request.dialect.decode_fields()
    return encode_answer(body if params is None else _with_params(body, params))


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
        value = parse_engine_json(raw)
    except (ValueError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def client_answer(raw: bytes, answer: dict[str, Any] | None, dialect: Dialect) -> bytes:
    """An engine's answer without what is the router's; the engine's own bytes when nothing is."""
    if answer is None:
        return raw
    cleaned = dialect.clean(answer, streamed=False)
    return raw if cleaned is None or cleaned is answer else encode_answer(cleaned)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        InvalidArgument: it is none; says so to the client.
    """
    try:
        value = _DECODER.decode(raw.decode("utf-8-sig" if raw.startswith(BOM_UTF8) else "utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument("the body is not valid UTF-8") from error
    except ValueError as error:
        raise InvalidArgument("the body is not valid JSON") from error
    except RecursionError as error:
        raise InvalidArgument("the body is nested too deeply") from error
    if not isinstance(value, dict):
        raise InvalidArgument("the body must be a JSON object")
    return cast("dict[str, Any]", value)


def _dialect(api: Api, body: dict[str, Any], tenant: str, store: ResponseStore | None) -> Dialect:
    if api is Api.RESPONSES:
        return ResponsesDialect(body, tenant, store)
    if api is Api.MESSAGES:
        return MessagesDialect(body)
    return ChoicesDialect(api, body)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _with_params(body: dict[str, Any], params: TurnParams) -> dict[str, Any]:
    return {**body, KV_FIELD: {PARAMS_KEY: params.to_json()}}
