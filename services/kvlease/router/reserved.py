"""Fields of a body that steer an engine's KV cache: they are the router's, and no client's reach an engine.

vLLM reads `kv_transfer_params` and `ec_transfer_params` of a request, and whatever `vllm_xargs` holds becomes
an extra argument beside them. They are removed wherever an engine, or a front between, might read parameters.
What is left alone is what the client says: there they are its own words. Every body is parsed whole and written
anew, so that no spelling of a key (escaped, doubled, in another encoding) is read otherwise by an engine.
"""

from typing import Any, cast

from kvlease.core.turn import PARAMS_KEY

KV_FIELD = "kv_transfer_params"
RESERVED_FIELDS = (KV_FIELD, "ec_transfer_params", "vllm_xargs", PARAMS_KEY)

CONTENT_FIELDS = frozenset(
    {
        "messages",
        "prompt",
        "input",
        "system",
        "instructions",
        "tools",
        "functions",
        "response_format",
        "text",
        "metadata",
    }
)
"""Fields of a body whose insides are the client's own words or schemas: nothing is removed in them."""


def strip_reserved(body: dict[str, Any]) -> None:
    """Removes the reserved fields from a body and from all in it that an engine reads parameters from."""
    for name in RESERVED_FIELDS:
        body.pop(name, None)
    for name, value in body.items():
        if name not in CONTENT_FIELDS:
            _strip(value)


def _strip(value: object) -> None:
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        for name in RESERVED_FIELDS:
            fields.pop(name, None)
        for inner in fields.values():
            _strip(inner)
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            _strip(inner)
