"""A nonce at the head of a prompt: it changes with every request, so that no two prompts share a prefix.

Claude Code puts a line `x-anthropic-billing-header: ...` with a hash of the request in front of its system prompt.
vLLM leaves it out of the prompts of the Messages API; a gateway that turns such requests into chat or responses
requests carries it along, and then nothing can be reused. The router says so, and takes the line out when told to.
"""

from collections.abc import Mapping
from typing import Any, cast

from kvlease.router.dialect import Api, mapping, objects, text_of

ATTRIBUTION = "x-anthropic-billing-header"
SYSTEM_ROLES = ("system", "developer")


def is_attribution(text: str) -> bool:
    """The text begins with Claude Code's attribution line."""
    return text.startswith(ATTRIBUTION)


def has_nonce(api: Api, body: Mapping[str, Any]) -> bool:
    """The prompt that an engine renders of this request begins with a nonce."""
    return api is not Api.MESSAGES and any(is_attribution(text) for text in _heads(api, body))


def strip_nonce(api: Api, body: dict[str, Any]) -> None:
    """Takes the attribution line out of the head of the prompt."""
    if isinstance(body.get("instructions"), str):
        body["instructions"] = _stripped(body["instructions"])
    if api is Api.MESSAGES:
        body["system"] = _stripped_content(body.get("system"))
        if not body["system"]:
            del body["system"]
        return
    for message in _leading(api, body):
        message["content"] = _stripped_content(message.get("content"))


def _leading(api: Api, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first message when it is a system prompt."""
    messages = body.get("input" if api is Api.RESPONSES else "messages")
    first = objects(cast("list[object]", messages)[:1]) if isinstance(messages, list) else []
    return first if first and first[0].get("role") in SYSTEM_ROLES else []


def _heads(api: Api, body: Mapping[str, Any]) -> list[str]:
    heads = [text_of(body.get("instructions"))]
    for message in _leading(api, body):
        content = message.get("content")
        heads.append(text_of(content))
        heads.extend(text_of(part.get("text")) for part in objects(content)[:1])
    return heads


def _stripped(text: str) -> str:
    return text.partition("\n")[2] if is_attribution(text) else text


def _stripped_content(content: object) -> object:
    if isinstance(content, str):
        return _stripped(content)
    if not isinstance(content, list):
        return content
    parts: list[object] = []
    for part in cast("list[object]", content):
        fields = mapping(part)
        text = text_of(fields.get("text"))
        if is_attribution(text):
            rest = _stripped(text)
            if rest:
                parts.append({**fields, "text": rest})
        else:
            parts.append(part)
    return parts
