"""A throw-away conversation that makes prefill and decode engine shake hands in both directions.

The first NIXL handshake of a pair takes seconds on a busy machine; no turn that a person looks at should pay for it.
"""

import uuid

import aiohttp

from kvlease.dev.completion import TURN_TIMEOUT_S, complete

# The reply is long enough to be read back: the prefill engine holds the prompt itself.
_REPLY_TOKENS = 128
_FIRST = "Count the stars that you see tonight, and say which of them you are certain of. " * 2
_SECOND = "Now compare them with the list of last year. " * 16


async def warm_handshakes(router_url: str, model: str) -> None:
    """Sends two turns: the first moves KV from prefill to decode, the second back.

    Raises:
        RequestFailedError: a turn was answered with an error.
    """
    conversation_id = f"warm-{uuid.uuid4().hex}"
    messages = [{"role": "user", "content": _FIRST}]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TURN_TIMEOUT_S)) as session:
        body = {"model": model, "conversation_id": conversation_id, "temperature": 0}
        reply, _ = await complete(
            session, router_url, {**body, "messages": messages, "max_tokens": _REPLY_TOKENS}
        )
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": _SECOND}]
        await complete(session, router_url, {**body, "messages": messages, "max_tokens": 1})
