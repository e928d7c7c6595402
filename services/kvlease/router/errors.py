"""Errors as each API shapes them: `code` is the machine-readable reason in all of them.

| status | OpenAI's `type` | Anthropic's `type` |
|---|---|---|
| 400, 413, 422 | `invalid_request_error` | `invalid_request_error` (413: `request_too_large`) |
| 401 | `invalid_request_error` | `authentication_error` |
| 403 | `invalid_request_error` | `permission_error` |
| 404, 405 | `invalid_request_error` | `not_found_error` |
| 429 | `rate_limit_error` | `rate_limit_error` |
| 503 | `server_error` | `overloaded_error` |
| other | `server_error` | `api_error` |
"""

import json
from typing import Any, cast

from kvlease.router.dialect import Api, encode, mapping, text_of

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(
    status: int, message: str, code: str = "", api: Api = Api.CHAT, param: str | None = None
) -> bytes:
    """An error as the body of an answer."""
    return encode(_error(status, message, code, api, param))


def error_event(status: int, message: str, code: str = "", api: Api = Api.CHAT) -> bytes:
    """An error as an event in a stream."""
    error = _error(status, message, code, api, None)
    if api is Api.RESPONSES:
        # Its readers look for the fields of an event, and the official client for an `error` object.
        error = {"type": "error", "code": code or None, "message": message, "param": None, **error}
    head = b"event: error\n" if api in (Api.RESPONSES, Api.MESSAGES) else b""
    return head + b"data: " + encode(error) + b"\n\n"


def refusal_body(status: int, body: bytes, api: Api) -> bytes:
    """An engine's refusal: its own words, in the shape of the API where they have another."""
    try:
        parsed: object = json.loads(body)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        return error_body(status, f"the engine answered {status}", "engine_error", api)
    if api is not Api.MESSAGES:
        return body
    error = cast("dict[str, Any]", parsed)
    inner = mapping(error.get("error"))
    if error.get("type") == "error" and inner.get("type") in set(ANTHROPIC_TYPES.values()) | {"api_error"}:
        return body
    message = text_of(inner.get("message")) or f"the engine answered {status}"
    return error_body(status, message, "engine_error", api)


def _error(status: int, message: str, code: str, api: Api, param: str | None) -> dict[str, Any]:
    if api is Api.MESSAGES:
        kind = ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": code or None}}
    kind = (
        "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    )
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}
