"""Three turns through the router, one of each path, and one with an edited history, all compared with cold runs.

A turn is right when it took the path that the planner should take by default, when at least the tokens that
the conversation truly shares were reused, when KV moved exactly where it should, and when tokens and logprobs
equal those of the same prompt computed from nothing.
"""

import asyncio
import itertools
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import aiohttp

from kvlease.dev.completion import TURN_TIMEOUT_S, Completion, bytes_read, complete, tokenize

MAX_TOKENS = 24
SYSTEM = (
    "You are the steward of a small observatory. You answer in short sentences, you never guess a "
    "measurement, and you name the instrument that each number comes from. When a tool returns a log, you "
    "read it to its end before you answer, since the last lines correct the first ones more often than not."
)
FIRST = (
    "Last night the north dome reported three readings that do not agree with each other. Before we look at "
    "the logs, tell me which instruments stand in that dome, which of them were calibrated this month, and "
    "what you would check first if the temperature of the mirror had drifted by more than half a degree."
)
EDITED = FIRST.replace("north dome", "south dome").replace("three readings", "five readings")
SECOND = "Thank you. Which of these would you check first?"
THIRD = "Here is the log of the dome. What does its last line correct?\n" + "\n".join(
    f"{hour:02d}:{minute:02d} mirror {17.2 + 0.013 * hour:.3f} C, humidity {41 + hour % 5} %, "
    f"wind {3 + minute % 7} m/s"
    for hour, minute in itertools.product(range(8), (0, 20, 40))
)


CONFIRMED_WITHIN_S = 10.0
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn, as the table shows it.

    Attributes:
        read_bytes: bytes that the engines READ by NIXL during the turn, by their own counters.
        expected_tokens: tokens that the prompt truly shares with what the lease keeps, in whole blocks.
        ttft_ms: time to the first token at the router.
        problem: what is wrong with the turn, empty when nothing is.
    """

    path: str
    reason: str
    prompt_tokens: int
    reused_tokens: int
    expected_tokens: int
    read_bytes: int
    ttft_ms: float
    lease_id: str
    state: str
    equals_cold: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """All turns; `ok` when none has a problem."""

    turns: list[TurnRow]

    @property
    def ok(self) -> bool:
        """Whether every turn was right."""
        return bool(self.turns) and not any(turn.problem for turn in self.turns)

    def to_json(self) -> dict[str, Any]:
        """The document of `--output json`."""
        return {"ok": self.ok, "turns": [asdict(turn) for turn in self.turns]}


@dataclass(frozen=True, slots=True)
class Target:
    """Where the check sends its turns: base URLs of router and engines."""

    router_url: str
    engine_urls: list[str]
    cold_url: str
    model: str
    block_size: int


@dataclass(slots=True)
class ConversationCheck:
    """Holds one conversation and compares every turn."""

    session: aiohttp.ClientSession
    target: Target
    conversation_id: str
    kept: list[int]

    async def turn(self, messages: list[dict[str, Any]], want: str) -> tuple[Completion, TurnRow]:
        """Sends one turn that should take the path `want`, then the same prompt cold."""
        before = await bytes_read(self.session, self.target.engine_urls)
        body = self._body(messages)
        reply, _ = await complete(
            self.session, self.target.router_url, {**body, "conversation_id": self.conversation_id}
        )
        read = await bytes_read(self.session, self.target.engine_urls) - before
        record, state = await self._record()
        prompt = await tokenize(self.session, self.target.cold_url, self.target.model, messages)
        expected = self._shared_tokens(prompt)
        cold, _ = await complete(self.session, self.target.cold_url, {**body, "cache_salt": uuid.uuid4().hex})
        self.kept = prompt + reply.token_ids
        row = TurnRow(
            path=record["path"],
            reason=record["reason"],
            prompt_tokens=record["prompt_tokens"],
            reused_tokens=record["reused_tokens"],
            expected_tokens=expected,
            read_bytes=read,
            ttft_ms=round(record["ttft_ms"], 1),
            lease_id=record["lease_id"],
            state=state,
            equals_cold=reply.equals(cold),
        )
        return reply, _judged(row, want)

    def _body(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "model": self.target.model,
            "messages": messages,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 1,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def _shared_tokens(self, prompt: list[int]) -> int:
        """Tokens of the last turn that this prompt begins with: whole blocks that leave a token to compute."""
        pairs = zip(self.kept[:-1], prompt[:-1], strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return shared // self.target.block_size * self.target.block_size

    async def _record(self) -> tuple[dict[str, Any], str]:
        """The router's record of the turn, and the lease's state once the holder has answered for it."""
        url = f"{self.target.router_url}/v1/kvlease/conversations/{self.conversation_id}"
        conversation: dict[str, Any] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(CONFIRMED_WITHIN_S):
                while not conversation or conversation["lease"]["state"] == "pending":
                    async with self.session.get(url) as response:
                        response.raise_for_status()
                        conversation = await response.json()
                    await asyncio.sleep(0.02)
        return conversation["turns"][-1], conversation["lease"]["state"]


async def run_check(target: Target, conversation_id: str, progress: Progress, *, edited: bool) -> CheckResult:
    """Holds the conversation; `edited` adds a turn whose first user message was changed.

    Raises:
        RequestFailedError: a turn was answered with an error.
    """
    timeout = aiohttp.ClientTimeout(total=TURN_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        check = ConversationCheck(session, target, conversation_id, kept=[])
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        rows: list[TurnRow] = []
        script = ((FIRST, "recompute"), (SECOND, "append"), (THIRD, "readback"))
        for number, (text, want) in enumerate(script, start=1):
            progress(f"turn {number} of {len(script)}: {want} expected")
            messages.append({"role": "user", "content": text})
            reply, row = await check.turn(messages, want)
            messages.append({"role": "assistant", "content": reply.text})
            rows.append(row)
        if edited:
            progress(
                "the same conversation with its first message edited: only the true prefix may be reused"
            )
            history = [dict(message) for message in messages]
            history[1]["content"] = EDITED
            _, row = await check.turn([*history, {"role": "user", "content": SECOND}], "readback")
            rows.append(row)
    return CheckResult(rows)


def _judged(row: TurnRow, want: str) -> TurnRow:
    """The row with what is wrong with it."""
    problems: list[str] = []
    if row.path != want:
        problems.append(f"took {row.path} ({row.reason}), not {want}")
    if not row.equals_cold:
        problems.append("differs from the cold run")
    if row.reused_tokens < row.expected_tokens:
        problems.append(f"reused {row.reused_tokens} of {row.expected_tokens} shared tokens")
    if (row.path == "append") != (row.read_bytes == 0):
        problems.append(f"{row.read_bytes} bytes were READ on path {row.path}")
    return replace(row, problem="; ".join(problems))
