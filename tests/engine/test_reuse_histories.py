"""Histories that do not simply go on, and several choices: only the true common prefix is reused."""

from dataclasses import dataclass
from typing import Any

import pytest
from tests.engine.pair import (
    Message,
    Pair,
    choices_of,
    eventually,
    request_body,
    reusable_tokens,
    whole_blocks,
)

from kvlease.core.records import EngineRole
from kvlease.dev.check import EDITED, FIRST, SECOND, SYSTEM, THIRD
from kvlease.dev.completion import Completion
from kvlease.dev.engine_process import BLOCK_TOKENS
from kvlease.dev.tiny_model import THINK_START, token_id

pytestmark = pytest.mark.asyncio(loop_scope="module")

VICTIM = {"Authorization": "Bearer victim"}
INTRUDER = {"Authorization": "Bearer intruder"}


def opening(text: str) -> list[Message]:
    """A conversation's first request."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def continued(history: list[Message], reply: Completion, text: str) -> list[Message]:
    """The next request of a conversation."""
    return [*history, {"role": "assistant", "content": reply.text}, {"role": "user", "content": text}]


@dataclass(frozen=True)
class Held:
    """What a conversation keeps: its newest request, the reply, and the tokens of both."""

    history: list[Message]
    reply: Completion
    kept: list[int]


async def held(pair: Pair, conversation_id: str, *texts: str) -> Held:
    """A conversation of these user messages."""
    history, turn = opening(f"{texts[0]} {conversation_id}"), None
    for text in (*texts[1:], None):
        turn = await pair.turn(history, conversation_id)
        if text is not None:
            history = continued(history, turn.reply, text)
    assert turn is not None
    return Held(history, turn.reply, await pair.tokens(history) + turn.reply.token_ids)


async def changed(pair: Pair, case: str) -> tuple[Held, list[Message]]:
    """A conversation, and a request of it that does not go on from where its lease ends."""
    if case == "dropped":
        before = await held(pair, case, FIRST, SECOND)
        return before, before.history[:2]
    before = await held(pair, case, FIRST)
    if case == "regenerated":
        return before, before.history
    return before, continued(opening(f"{EDITED} {case}"), before.reply, SECOND)


@pytest.mark.parametrize("case", ["edited", "dropped", "regenerated"])
async def test_a_changed_history_reuses_its_true_prefix_only(pair: Pair, case: str) -> None:
    before, request = await changed(pair, case)
    await pair.reset_cache(EngineRole.PREFILL)
    counted = await pair.turns_counted("readback", "history_edited")
    turn = await pair.turn(request, case)
    assert (turn.path, turn.record["reason"]) == ("readback", "history_edited")
    assert turn.record["outcome"] == "read"
    assert turn.reused_tokens == reusable_tokens(before.kept, await pair.tokens(request))

    async def is_counted() -> bool:
        return await pair.turns_counted("readback", "history_edited") == counted + 1

    await eventually(is_counted, "the turn is counted under its reason")
    cold = await pair.cold(request)
    assert turn.reply.equals(cold)
    await assert_not_poisoned(pair, case, request, cold)
    after = continued(request, turn.reply, "Go on.")
    appended = await pair.turn(after, case)
    assert (appended.path, appended.record["reason"]) == ("append", "short_suffix")
    kept = await pair.tokens(request) + turn.reply.token_ids
    assert appended.reused_tokens == reusable_tokens(kept, await pair.tokens(after))
    assert appended.reply.equals(await pair.cold(after))


async def assert_not_poisoned(pair: Pair, name: str, request: list[Message], cold: Completion) -> None:
    """The same request without an id, and under another one, finds nothing wrong in the engines' caches."""
    for conversation_id in ("", f"{name}-again"):
        later = await pair.turn(request, conversation_id)
        assert (later.path, later.record["reason"]) == ("recompute", "first_turn")
        assert later.reply.equals(cold)


@pytest.mark.parametrize(("text", "path"), [(SECOND, "append"), (THIRD, "readback")])
async def test_a_history_whose_thoughts_the_template_strips_reuses_its_true_prefix(
    pair: Pair, text: str, path: str
) -> None:
    conversation_id = f"thoughts-{path}"
    thoughtful = f"<think>The log of {conversation_id} tells.</think>\nI will read the log."
    history: list[Message] = [
        *opening(FIRST + conversation_id),
        {"role": "assistant", "content": thoughtful},
        {"role": "tool", "tool_call_id": "log", "content": "21:40 mirror 17.4 C"},
    ]
    first = await pair.turn(history, conversation_id)
    kept = await pair.tokens(history) + first.reply.token_ids
    request = continued(history, first.reply, text)
    prompt = await pair.tokens(request)
    assert token_id(THINK_START) in kept
    assert token_id(THINK_START) not in prompt
    await pair.reset_cache(EngineRole.PREFILL)
    turn = await pair.turn(request, conversation_id)
    assert turn.path == path
    assert turn.reused_tokens == reusable_tokens(kept, prompt) > 0
    cold = await pair.cold(request)
    assert turn.reply.equals(cold)
    await assert_not_poisoned(pair, conversation_id, request, cold)


async def test_another_tenant_reuses_nothing_of_the_same_conversation(pair: Pair) -> None:
    history = opening(FIRST + " tenants")
    first = await pair.turn(history, "shared-id", headers=VICTIM)
    kept = await pair.tokens(history) + first.reply.token_ids
    request = continued(history, first.reply, THIRD)
    lease = await held_lease(pair)
    hits = await pair.prefix_hits()
    stolen = await pair.turn(request, "shared-id", headers=INTRUDER)
    assert (stolen.path, stolen.record["reason"]) == ("recompute", "first_turn")
    assert stolen.reused_tokens == 0
    assert await pair.prefix_hits() == hits
    assert stolen.record["lease_id"] != lease["lease_id"]
    assert stolen.reply.equals(await pair.cold(request))
    assert await held_lease(pair) == lease
    await pair.reset_cache(EngineRole.PREFILL)
    own = await pair.turn(request, "shared-id", headers=VICTIM)
    assert own.path == "readback"
    assert own.record["read_tokens"] == reusable_tokens(kept, await pair.tokens(request))
    assert own.reply.equals(stolen.reply)
    # The victim's own next turn is seen by the counter that saw nothing of the intruder's.
    await pair.turn(continued(request, own.reply, SECOND), "shared-id", headers=VICTIM)
    assert await pair.prefix_hits() > hits


async def held_lease(pair: Pair) -> dict[str, Any]:
    """The victim's lease, once the holder has acknowledged a renewal of it."""

    async def is_held() -> bool:
        return (await pair.conversation("shared-id", VICTIM))["lease"]["state"] == "held"

    await eventually(is_held, "the victim's lease is held")
    lease: dict[str, Any] = (await pair.conversation("shared-id", VICTIM))["lease"]
    return lease


async def test_two_choices_are_both_right_and_leave_one_lease(pair: Pair) -> None:
    for role in EngineRole:
        await pair.reset_cache(role)
    await pair.settles()
    history: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": FIRST + " choices"},
    ]
    for text, path in ((SECOND, "recompute"), (THIRD, "append"), ("", "readback")):
        prompt = await pair.tokens(history)
        choices = await two_choices(pair, history, path)
        lease_blocks = whole_blocks(len(prompt) + len(choices[0].token_ids) - 1) // BLOCK_TOKENS

        async def one_lease_is_left(blocks: int = lease_blocks) -> bool:
            gauges = await pair.gauges(EngineRole.DECODE)
            return bool(gauges.held_blocks == blocks and not gauges.reading_blocks)

        await eventually(one_lease_is_left, "the engine holds the blocks of one lease")
        history = [
            *history,
            {"role": "assistant", "content": choices[0].text},
            {"role": "user", "content": text},
        ]
        await pair.reset_cache(EngineRole.PREFILL)
    await pair.release("choices")
    await pair.settles()


async def two_choices(pair: Pair, history: list[Message], path: str) -> list[Completion]:
    """Two sampled replies of one turn; both equal their cold runs."""
    body = request_body(history, n=2, temperature=1.0, seed=11, stream=False)
    answer, headers = await pair.post(
        f"{pair.stack.router_url}/v1/chat/completions", {**body, "conversation_id": "choices"}
    )
    assert headers["X-Kvlease-Route"].split(";")[0] == path
    cold, _ = await pair.post(
        f"{pair.url(EngineRole.DECODE)}/v1/chat/completions", {**body, "cache_salt": path}
    )
    choices, expected = choices_of(answer), choices_of(cold)
    assert choices[0].text != choices[1].text
    assert [one.equals(other) for one, other in zip(choices, expected, strict=True)] == [True, True]
    return choices
