"""What a client sees of one chat completion, and what it must equal."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

LOGPROB_TOLERANCE = 1e-3
"""Largest difference of a token's logprob between a reused and a cold run, in float32."""

TURN_TIMEOUT_S = 900.0
"""Bound of one turn: above the time after which a router takes an engine for stalled, and asks another one."""


class RequestFailedError(RuntimeError):
    """A request was answered with an error; the message holds the status and the start of the body."""


@dataclass(slots=True)
class Completion:
    """One reply.

    Attributes:
        token_ids: sampled ids, where the engine returned them.
        tokens: text of every sampled token, as the logprobs name it.
        logprobs: logprob of every sampled token.
    """

    text: str = ""
    tokens: list[str] = field(default_factory=list[str])
    logprobs: list[float] = field(default_factory=list[float])
    token_ids: list[int] = field(default_factory=list[int])
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""

    def equals(self, other: "Completion") -> bool:
        """Whether tokens are the same and every logprob is within `LOGPROB_TOLERANCE`."""
        if not self.tokens or self.tokens != other.tokens or len(self.logprobs) != len(other.logprobs):
            return False
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return all(abs(left - right) <= LOGPROB_TOLERANCE for left, right in pairs)

    def add(self, body: Mapping[str, Any]) -> None:
        """Adds a whole response, or one chunk of a stream."""
        usage: dict[str, Any] = body.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens", self.prompt_tokens)
        self.completion_tokens = usage.get("completion_tokens", self.completion_tokens)
        for choice in body.get("choices", ()):
            message: dict[str, Any] = choice.get("message") or choice.get("delta") or {}
            logprobs: dict[str, Any] = choice.get("logprobs") or {}
            self.text += message.get("content") or ""
            self.token_ids += choice.get("token_ids") or []
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            entries: list[dict[str, Any]] = logprobs.get("content") or []
            for entry in entries:
                self.tokens.append(entry["token"])
                self.logprobs.append(entry["logprob"])


async def complete(
    session: aiohttp.ClientSession,
    base_url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
) -> tuple[Completion, Mapping[str, str]]:
    """Sends a chat completion and collects the reply, streamed or not, with the response headers.

    Raises:
        RequestFailedError: the status is not 200, or the stream ended with an error.
        TimeoutError: nothing came for the session's timeout.
    """
    completion = Completion()
    url = f"{base_url}/v1/chat/completions"
    async with session.post(url, json=dict(body), headers=headers) as response:
        if response.status != 200:
            text = (await response.text())[:500]
            raise RequestFailedError(f"{url} answered {response.status}: {text}")
        if body.get("stream"):
            async for chunk in _events(response):
                completion.add(chunk)
        else:
            completion.add(await response.json())
        return completion, response.headers.copy()


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestFailedError(f"the stream ended with {event['error']}")
        yield event
    raise RequestFailedError("the stream ended without [DONE]")


async def tokenize(
    session: aiohttp.ClientSession, engine_url: str, model: str, messages: list[dict[str, Any]]
) -> list[int]:
    """The prompt of a chat as the engine tokenizes it."""
    body = {"model": model, "messages": messages, "add_generation_prompt": True}
    async with session.post(f"{engine_url}/tokenize", json=body) as response:
        if response.status != 200:
            raise RequestFailedError(f"{engine_url}/tokenize answered {response.status}")
        tokens: list[int] = (await response.json())["tokens"]
        return tokens


async def bytes_read(session: aiohttp.ClientSession, engine_urls: list[str]) -> int:
    """Bytes that the engines have READ by NIXL so far, from their own counters."""

    async def of_one(url: str) -> int:
        async with session.get(f"{url}/metrics") as response:
            lines = (await response.text()).splitlines()
        wanted = (line for line in lines if line.startswith("vllm:nixl_bytes_transferred_sum"))
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in wanted))

    return sum(await asyncio.gather(*(of_one(url) for url in engine_urls)))
