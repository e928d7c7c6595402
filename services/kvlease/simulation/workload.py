"""Clients that hold conversations, and know what every answer must be."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvlease.core.conversation import tenant_digest
from kvlease.router.bodies import Api, parse_turn
from kvlease.router.turn import RequestHead
from kvlease.sim.model import Sample, SimModel, tokens_of_messages
from kvlease.simulation.world import MODEL, World

_WORDS = (
    "the",
    "mirror",
    "dome",
    "reads",
    "wrong",
    "after",
    "rain",
    "so",
    "we",
    "ask",
    "again",
    "whether",
    "log",
    "is",
    "right",
    "or",
    "clock",
)


def cold_reply(token_ids: Sequence[int], max_tokens: int, block_size: int) -> list[Sample]:
    """What a fresh engine answers to a prompt: the model alone, without blocks or leases."""
    model, tokens = SimModel(MODEL), list(token_ids)
    samples: list[Sample] = []
    state, done = model.start(), 0
    for _ in range(max_tokens):
        while len(tokens) - done >= block_size:
            block = tokens[done : done + block_size]
            state = model.attend(state, [model.compute(state, block)])
            done += block_size
        rest = tokens[done:]
        sample = model.sample(model.attend(state, [model.compute(state, rest)]) if rest else state)
        samples.append(sample)
        tokens.append(sample.token_id)
    return samples


@dataclass
class RecordingClient:
    """A `ClientPort` that keeps what it gets."""

    status: int = 0
    data: bytes = b""

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Takes the head of a streamed answer."""
        self.status = status

    async def write(self, data: bytes) -> None:
        """Takes a part of a streamed answer."""
        self.data += data

    async def end(self) -> None:
        """Takes the end of a streamed answer."""

    async def answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Takes a whole answer."""
        self.status, self.data = status, body

    def logprobs(self) -> list[tuple[str, float]] | None:
        """Tokens and their logprobs; None when the answer is an error or not whole."""
        if self.status != 200:
            return None
        bodies = _events(self.data) if self.data.startswith(b"data:") else [json.loads(self.data)]
        if bodies is None or any("error" in body for body in bodies):
            return None
        contents = [choice["logprobs"]["content"] for body in bodies for choice in body["choices"]]
        return [(str(entry["token"]), float(entry["logprob"])) for content in contents for entry in content]


@dataclass
class Tally:
    """What clients saw."""

    turns: int = 0
    errors: int = 0
    aborted: int = 0
    wrong: list[str] = field(default_factory=list[str])


class Client:
    """One conversation after another, each turn compared with a cold run."""

    def __init__(self, world: World, number: int, tally: Tally) -> None:
        self._world = world
        self._random = Random(world.random.random())
        self._tally = tally
        self._number = number
        settings = world.settings.engine()
        self._tokens_max = settings.block_size * settings.total_blocks // 2
        self._tenant = tenant_digest(f"tenant-{number % 2}")

    async def run(self, until_s: float) -> None:
        """Talks until the virtual time `until_s`."""
        loop, random, count = asyncio.get_running_loop(), self._random, 0
        while loop.time() < until_s:
            count += 1
            messages: list[dict[str, Any]] = [{"role": "system", "content": self._text(10, 40)}]
            for _ in range(random.randint(2, 8)):
                messages.append({"role": "user", "content": self._text(2, 120)})
                reply = await self._turn(messages, f"client-{self._number}-{count}")
                if reply is None or loop.time() >= until_s:
                    await asyncio.sleep(1.0)
                    break
                messages.append({"role": "assistant", "content": reply})
                if len(tokens_of_messages(messages)) > self._tokens_max:
                    break
                if random.random() < 0.1:
                    messages[random.randrange(len(messages))]["content"] = self._text(2, 40)
                await asyncio.sleep(random.choice([0.0, 0.5, 2.0, 8.0, 25.0]) * random.random())

    async def _turn(self, messages: Sequence[dict[str, Any]], conversation_id: str) -> str | None:
        """One turn. What was said, or None when it failed or was aborted."""
        world, random = self._world, self._random
        max_tokens = random.randint(2, 24)
        body = {
            "model": MODEL,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "logprobs": True,
            "stream": random.random() < 0.7,
        }
        request = parse_turn(Api.CHAT, json.dumps(body).encode(), self._tenant, conversation_id)
        client, head = RecordingClient(), RequestHead(f"{conversation_id}-{len(messages)}", {})
        self._tally.turns += 1
        bound_s = random.uniform(0.05, 2.0) if random.random() < 0.05 else None
        try:
            async with asyncio.timeout(bound_s):
                await random.choice(world.runners).run(request, head, client)
        except TimeoutError:
            self._tally.aborted += 1
            return None
        said = client.logprobs()
        if said is None:
            self._tally.errors += 1
            return None
        block_size = world.settings.engine().block_size
        right = cold_reply(tokens_of_messages(messages), max_tokens, block_size)
        if said != [(sample.text, sample.logprob) for sample in right]:
            self._tally.wrong.append(f"turn {head.request_id} differs from a cold run")
        return "".join(token for token, _ in said)

    def _text(self, least: int, most: int) -> str:
        return " ".join(self._random.choice(_WORDS) for _ in range(self._random.randint(least, most)))


def _events(data: bytes) -> list[Any] | None:
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"[DONE]":
        return None
    return [json.loads(line) for line in lines[:-1]]
