"""Hundreds of turns over many conversations at once, each compared with a cold run: `make soak`.

Conversations go on, edit what was said, drop their last messages or ask the same again, more of them than the
engines have room for; some clients leave in the middle of a stream. `KVLEASE_SOAK_TURNS` and `KVLEASE_SOAK_OUTPUT`
(a JSON file) are for other lengths and for the record.
"""

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.engine.pair import Message, Pair, PairPlan, eventually, request_body

from kvlease.core.records import EngineRole
from kvlease.dev.check import SYSTEM, THIRD
from kvlease.router.config import RouterConfig

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.soak, pytest.mark.timeout(7200)]

TURNS = int(os.environ.get("KVLEASE_SOAK_TURNS", "300"))
CONVERSATIONS = 30
AT_ONCE = 4
LEAVING = 20
BLOCKS = 1600
PROMPT_TOKENS_MAX = 2200
SEED = 20261130


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    """Caches that do not hold all conversations, so that leases are evicted and blocks change owner."""
    override = ("--num-gpu-blocks-override", str(BLOCKS))
    return PairPlan(
        arguments=dict.fromkeys(EngineRole, override),
        router=RouterConfig(gap_floor_s=60.0, append_tokens_max=96),
    )


class Talk:
    """One conversation: what was said so far, and how it goes on."""

    def __init__(self, number: int) -> None:
        self.name = f"soak {number}"
        self.chance = random.Random(SEED + number)
        self.messages: list[Message] = []
        self._begin()

    def _begin(self) -> None:
        opening = f"{self.name}, part {self.chance.random()}. {SYSTEM}"
        self.messages = [{"role": "system", "content": opening}, self._question()]

    def _question(self) -> Message:
        long = self.chance.random() < 0.5
        text = THIRD[: self.chance.randrange(150, 700)] if long else "And then?"
        return {"role": "user", "content": f"{text} {self.chance.randrange(1000)}"}

    def go_on(self, reply: str) -> str:
        """Prepares the next request; what kind of step it is."""
        if sum(len(str(message["content"])) for message in self.messages) > PROMPT_TOKENS_MAX:
            self._begin()
            return "begin"
        step = self.chance.choices(["follow", "edit", "drop", "again"], [12, 2, 1, 1])[0]
        answered = [*self.messages, {"role": "assistant", "content": reply}]
        if step == "follow":
            self.messages = [*answered, self._question()]
        elif step == "edit":
            place = self.chance.randrange(len(self.messages))
            edited = {**self.messages[place], "content": f"{self.messages[place]['content']} (edited)"}
            self.messages = [*self.messages[:place], edited, *answered[place + 1 :], self._question()]
        elif step == "drop" and len(self.messages) > 3:
            self.messages = self.messages[:-2]
        return step


async def leave(pair: Pair, number: int) -> None:
    """A client that leaves in the middle of its turn, at another moment each time."""
    body = {
        **request_body([{"role": "user", "content": f"{number} {THIRD}"}]),
        "conversation_id": f"left {number}",
    }
    try:
        async with (
            asyncio.timeout(0.1 * number),
            pair.session.post(f"{pair.stack.router_url}/v1/chat/completions", json=body) as response,
        ):
            await response.read()
    except TimeoutError:
        pass


async def test_every_turn_of_a_long_run_equals_a_cold_one_and_every_block_comes_back(pair: Pair) -> None:
    begun = time.monotonic()
    talks: asyncio.Queue[Talk] = asyncio.Queue()
    for number in range(CONVERSATIONS):
        talks.put_nowait(Talk(number))
    left = iter(range(TURNS))
    taken: Counter[str] = Counter()
    wrong: list[str] = []

    async def hold() -> None:
        for turn_number in left:
            talk = talks.get_nowait()
            turn = await pair.turn(talk.messages, talk.name, stream=talk.chance.random() < 0.5)
            if not turn.reply.equals(await pair.cold(talk.messages)):
                wrong.append(f"turn {turn_number} of {talk.name}: {turn.record}")
            taken[f"{turn.record['path']}: {turn.record['reason']}"] += 1
            taken[f"step {talk.go_on(turn.reply.text)}"] += 1
            talks.put_nowait(talk)
            if turn_number % 25 == 24:
                print(f"{turn_number + 1} of {TURNS} turns, {len(wrong)} wrong, {dict(taken)}", flush=True)

    async def come_and_leave() -> None:
        for number in range(LEAVING):
            await leave(pair, number)

    await asyncio.gather(come_and_leave(), *(hold() for _ in range(AT_ONCE)))
    counters = {role.value: dict((await pair.gauges(role)).counters) for role in EngineRole}
    read_bytes = await pair.bytes_read(EngineRole.PREFILL)

    async def nothing_runs() -> bool:
        gauges = [await pair.gauges(role) for role in EngineRole]
        idle = [await pair.is_idle(role) for role in EngineRole]
        return all(idle) and not any(one.reading_blocks + one.quarantined_blocks for one in gauges)

    await eventually(nothing_runs, "no request, pin or quarantined block is left")
    await pair.reset_cache(EngineRole.DECODE)
    await pair.reset_cache(EngineRole.PREFILL)
    await pair.settles()
    write_record(taken, wrong, counters, read_bytes, time.monotonic() - begun)
    assert not wrong
    assert read_bytes > 0
    assert {path.split(":")[0] for path in taken} >= {"append", "readback", "recompute"}


def write_record(
    taken: Counter[str],
    wrong: list[str],
    counters: dict[str, dict[str, int]],
    read_bytes: int,
    seconds: float,
) -> None:
    """The record of the run, where it was asked for."""
    record = {
        "turns": TURNS,
        "conversations": CONVERSATIONS,
        "clients_that_left": LEAVING,
        "seed": SEED,
        "wrong": wrong,
        "paths": dict(sorted(taken.items())),
        "bytes_read_by_prefill": read_bytes,
        "counters": counters,
        "seconds": round(seconds, 1),
    }
    print(json.dumps(record, indent=2))
    if output := os.environ.get("KVLEASE_SOAK_OUTPUT"):
        Path(output).write_text(json.dumps(record, indent=2) + "\n")
