"""The other APIs on real engines: a second turn reads its history back and says what a cold engine says."""

import uuid
from typing import Any

import pytest
from tests.engine.pair import MODEL, Pair

from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SYSTEM, THIRD

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 24


class Messages:
    """Anthropic's Messages API."""

    path = "/v1/messages"

    def first(self, name: str) -> dict[str, Any]:
        """The body of a conversation's first request."""
        content = f"{name}. {FIRST}"
        return {"system": SYSTEM, "max_tokens": TOKENS, "messages": [{"role": "user", "content": content}]}

    def next(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """The body of the next request, with a long question."""
        said = {"role": "assistant", "content": self.text(answer)}
        return {**body, "messages": [*body["messages"], said, {"role": "user", "content": THIRD}]}

    def text(self, answer: dict[str, Any]) -> str:
        """What was said."""
        return "".join(part.get("text", "") for part in answer["content"])


class Responses:
    """OpenAI's Responses API."""

    path = "/v1/responses"

    def first(self, name: str) -> dict[str, Any]:
        """The body of a conversation's first request."""
        said = [{"role": "user", "content": f"{name}. {FIRST}"}]
        return {"instructions": SYSTEM, "max_output_tokens": TOKENS, "input": said}

    def next(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """The body of the next request, with a long question."""
        said = {"role": "assistant", "content": self.text(answer)}
        return {**body, "input": [*body["input"], said, {"role": "user", "content": THIRD}]}

    def text(self, answer: dict[str, Any]) -> str:
        """What was said."""
        parts = (part for item in answer["output"] for part in item.get("content") or ())
        return "".join(part.get("text", "") for part in parts)


def common(body: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "temperature": 0, **body}


@pytest.mark.parametrize("api", [Messages(), Responses()], ids=lambda api: api.path)
async def test_a_second_turn_reads_its_history_back_and_equals_a_cold_one(
    pair: Pair, api: Messages | Responses
) -> None:
    name = f"apis {uuid.uuid4().hex}"
    headers = {"X-Conversation-Id": name}
    body = common(api.first(name))
    url = f"{pair.stack.router_url}{api.path}"
    async with pair.session.post(url, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        first = await response.json()
    body = api.next(body, first)
    await pair.reset_cache(EngineRole.PREFILL)
    before = await pair.bytes_read(EngineRole.PREFILL)
    async with pair.session.post(url, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        second = await response.json()
    assert "kv_transfer_params" not in second
    assert await pair.bytes_read(EngineRole.PREFILL) > before
    record = (await pair.conversation(name))["turns"][-1]
    assert (record["path"], record["ended"]) == ("readback", "well")
    assert record["verified_tokens"] > 300
    cold, _ = await pair.post(f"{pair.url(EngineRole.DECODE)}{api.path}", {**body, "cache_salt": name})
    assert api.text(second) == api.text(cold)
    assert len(api.text(second)) > TOKENS // 2
