"""Sends turns of the experiment, through kvlease's router."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from kvlease.bench.multiturn.engines import TurnFailedError


@dataclass(slots=True)
class Reply:
    """One turn's answer.

    Attributes:
        token_ids: that were generated.
        ttft_s: from sending it to its first token.
        prefill_s: of those, the prefill leg.
        read_s: of those, the prefill engine's READ, where it is told.
        arrivals_s: when each event with a token came, on this process's clock.
    """

    token_ids: list[int] = field(default_factory=list[int])
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    read_s: float = 0.0
    path: str = ""
    reason: str = ""
    reused_tokens: int = 0
    arrivals_s: list[float] = field(default_factory=list[float])
    kv_transfer_params: dict[str, Any] = field(default_factory=dict[str, Any])


class Fleet(Protocol):
    """Serves turns of conversations."""

    async def turn(
        self, conversation_id: str, prompt: Sequence[int], tokens: int, *, stream: bool, salt: str = ""
    ) -> Reply:
        """One turn that generates `tokens` tokens. No cache is shared with turns of another salt.

        Raises:
            TurnFailedError: it was answered with an error.
        """
        ...


class RoutedFleet:
    """Engines behind kvlease's router."""

    def __init__(self, session: aiohttp.ClientSession, router_url: str, model: str) -> None:
        self._session = session
        self._router_url = router_url
        self._model = model

    async def turn(
        self, conversation_id: str, prompt: Sequence[int], tokens: int, *, stream: bool, salt: str = ""
    ) -> Reply:
        """One turn; its path and what was reused come from the router's record."""
        body = completion_body(self._model, prompt, tokens, stream, salt)
        body["conversation_id"] = conversation_id
        reply = await send(self._session, self._router_url, body)
        url = f"{self._router_url}/v1/kvlease/conversations/{conversation_id}"
        async with self._session.get(url) as response:
            if response.status != 200:
                raise TurnFailedError(f"{url} answered {response.status}")
            turns: list[dict[str, Any]] = (await response.json())["turns"]
        record = turns[-1]
        reply.path, reply.reason = record["path"], record["reason"]
        reply.reused_tokens = record["reused_tokens"]
        reply.prefill_s, reply.read_s = record["prefill_ms"] / 1e3, record["prefill_read_ms"] / 1e3
        return reply


def completion_body(
    model: str, prompt: Sequence[int], tokens: int, stream: bool, salt: str = ""
) -> dict[str, Any]:
    """A greedy completion of exactly `tokens` tokens."""
    salted = {"cache_salt": salt} if salt else {}
    return {
        **salted,
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }


async def post(session: aiohttp.ClientSession, base_url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON answer to a completion.

    Raises:
        TurnFailedError: its status is not 200.
    """
    async with session.post(f"{base_url}/v1/completions", json=dict(body)) as response:
        if response.status != 200:
            raise TurnFailedError(f"{base_url} answered {response.status}: {(await response.text())[:300]}")
        answer: dict[str, Any] = await response.json()
        return answer


async def send(session: aiohttp.ClientSession, base_url: str, body: Mapping[str, Any]) -> Reply:
    """A completion, streamed or not, with the time to its first token.

    Raises:
        TurnFailedError: its status is not 200, the stream broke, or no token came.
    """
    reply = Reply()
    began_s = time.perf_counter()
    if body["stream"]:
        async for chunk in _events(session, base_url, body):
            tokens = [token for choice in chunk["choices"] for token in choice.get("token_ids") or ()]
            reply.token_ids += tokens
            if tokens:
                reply.arrivals_s.append(time.perf_counter())
    else:
        answer = await post(session, base_url, body)
        reply.arrivals_s.append(time.perf_counter())
        reply.token_ids += answer["choices"][0]["token_ids"]
        reply.kv_transfer_params = answer.get("kv_transfer_params") or {}
    if not reply.token_ids:
        raise TurnFailedError(f"{base_url} generated no token")
    reply.ttft_s = reply.arrivals_s[0] - began_s
    return reply


async def _events(
    session: aiohttp.ClientSession, base_url: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    async with session.post(f"{base_url}/v1/completions", json=dict(body)) as response:
        if response.status != 200:
            raise TurnFailedError(f"{base_url} answered {response.status}: {(await response.text())[:300]}")
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise TurnFailedError(f"the stream ended with {chunk['error']}")
            yield chunk
    raise TurnFailedError("the stream ended without [DONE]")
