"""Clients that hold conversations, and know what every answer must be."""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random
from typing import Any

import orjson

from kvlease.core.conversation import tenant_digest
from kvlease.router.bodies import Api, parse_turn
from kvlease.router.turn import RequestHead
from kvlease.sim.model import Sample, SimModel, tokens_of_messages
from kvlease.simulation.loop import Process
from kvlease.simulation.world import MODEL, World

PATIENCE_S = 30.0
"""After this a client leaves: longer than any turn takes while its router runs."""

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


_MODEL = SimModel(MODEL)


def cold_reply(token_ids: Sequence[int], max_tokens: int, block_size: int) -> list[Sample]:
    """What a fresh engine answers to a prompt: the model alone, without blocks or leases."""
    tokens = bytearray(token_ids)
    samples: list[Sample] = []
    state, done = _MODEL.start(), 0
    for _ in range(max_tokens):
        while len(tokens) - done >= block_size:
            state = _after(state, bytes(tokens[done : done + block_size]))
            done += block_size
        sample = _MODEL.sample(_after(state, bytes(tokens[done:])) if len(tokens) > done else state)
        samples.append(sample)
        tokens.append(sample.token_id)
    return samples


@lru_cache(maxsize=16_384)
def _after(state: bytes, tokens: bytes) -> bytes:
    """The state after some tokens, one byte each. A conversation's next turn begins with those of the turn before."""
    return _MODEL.attend(state, _MODEL.compute(state, tokens))


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
        bodies = _events(self.data) if self.data.startswith(b"data:") else [orjson.loads(self.data)]
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


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn of a client.

    Attributes:
        patience_s: after this the client leaves.
    """

    conversation_id: str
    messages: Sequence[dict[str, Any]]
    max_tokens: int
    stream: bool
    patience_s: float


class Clients:
    """Conversations over the routers of a world; every answer is compared with a cold run."""

    def __init__(self, world: World, tally: Tally) -> None:
        self._world = world
        self._tally = tally
        settings = world.settings.engine()
        self._block_size = settings.block_size
        self.tokens_max = settings.block_size * settings.total_blocks // 2

    async def turn(self, tenant: str, router: str, ask: Ask) -> str | None:
        """What was said, or None when it failed or was given up."""
        world, tally = self._world, self._tally
        body = {
            "model": MODEL,
            "messages": list(ask.messages),
            "max_tokens": ask.max_tokens,
            "logprobs": True,
            "stream": ask.stream,
        }
        request = parse_turn(Api.CHAT, orjson.dumps(body), tenant, ask.conversation_id)
        request_id = f"{ask.conversation_id}-{len(ask.messages)}"
        client, process = RecordingClient(), world.network.processes.get(router)
        tally.turns += 1
        if process is not None and not await self._answered(
            process, world.runner(process).run(request, RequestHead(request_id, {}), client), ask.patience_s
        ):
            tally.aborted += 1
            return None
        said = client.logprobs()
        world.network.note(f"{request_id} {client.status} {said}")
        if said is None:
            tally.errors += 1
            return None
        right = cold_reply(tokens_of_messages(ask.messages), ask.max_tokens, self._block_size)
        if said != [(sample.text, sample.logprob) for sample in right]:
            tally.wrong.append(f"(a) turn {request_id} differs from a cold run")
        return "".join(token for token, _ in said)

    async def _answered(self, process: Process, work: Coroutine[Any, Any, None], patience_s: float) -> bool:
        """Lets a router work. False when the client left first; a router that dies has answered, badly."""
        running = self._world.network.spawn(process, work)
        died = asyncio.ensure_future(process.died.wait())
        await asyncio.wait({running, died}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if running.done() or process.dead:
            return True
        process.post(running.cancel)
        return False


class Client:
    """One conversation after another."""

    def __init__(self, world: World, clients: Clients, number: int) -> None:
        self._world = world
        self._clients = clients
        self._random = Random(world.random.random())
        self._number = number
        self._tenant = tenant_digest(f"tenant-{number % 2}")

    async def run(self, until_s: float) -> None:
        """Talks until the virtual time `until_s`."""
        loop, random, count = self._world.loop, self._random, 0
        while loop.virtual_s < until_s:
            count += 1
            messages: list[dict[str, Any]] = [{"role": "system", "content": self._text(5, 20)}]
            for _ in range(random.randint(2, 6)):
                branch = [*messages, {"role": "user", "content": self._text(2, 60)}]
                messages.append({"role": "user", "content": self._text(2, 60)})
                reply = await self._next(messages, branch, f"client-{self._number}-{count}")
                if reply is None or loop.virtual_s >= until_s:
                    await asyncio.sleep(0.5)
                    break
                messages.append({"role": "assistant", "content": reply})
                if len(tokens_of_messages(messages)) > self._clients.tokens_max:
                    break
                if random.random() < self._world.settings.edits:
                    messages[random.randrange(len(messages))]["content"] = self._text(2, 40)
                await asyncio.sleep(random.choice([0.0, 0.3, 1.0, 3.0, 6.0]) * random.random())

    async def _next(
        self, messages: Sequence[dict[str, Any]], branch: Sequence[dict[str, Any]], conversation_id: str
    ) -> str | None:
        """The next turn; at times another one that goes on from the same turn runs beside it."""
        if self._random.random() > self._world.settings.branches:
            return await self._turn(messages, conversation_id)
        said = await asyncio.gather(
            self._turn(messages, conversation_id), self._turn(branch, conversation_id)
        )
        return said[0]

    async def _turn(self, messages: Sequence[dict[str, Any]], conversation_id: str) -> str | None:
        random = self._random
        hasty = random.random() < 0.07
        ask = Ask(
            conversation_id,
            messages,
            max_tokens=random.randint(2, 8),
            stream=random.random() < 0.7,
            patience_s=random.uniform(0.05, 2.0) if hasty else PATIENCE_S,
        )
        return await self._clients.turn(self._tenant, random.choice(self._world.routers), ask)

    def _text(self, least: int, most: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(least, most)))


class Survivor:
    """A conversation after all is repaired: its second turn reuses the first, also past a lease's duration."""

    def __init__(self, world: World, clients: Clients, number: int) -> None:
        self._world = world
        self._clients = clients
        self._number = number

    async def run(self, pause_s: float, suffix_words: int) -> None:
        """Two turns with a pause between them."""
        world, router = self._world, self._world.routers[self._number % len(self._world.routers)]
        conversation_id, tenant = f"survivor-{self._number}", tenant_digest("tenant-0")
        messages: list[dict[str, Any]] = [{"role": "user", "content": " ".join(_WORDS) * 3}]
        for turn in range(2):
            ask = Ask(conversation_id, messages, max_tokens=8, stream=True, patience_s=PATIENCE_S)
            reply = await self._clients.turn(tenant, router, ask)
            if reply is None:
                world.promises.broken("f", f"turn {turn + 1} of {conversation_id} failed after the repair")
                return
            messages.append({"role": "assistant", "content": reply})
            messages.append({"role": "user", "content": " ".join(_WORDS[:5]) + " so" * suffix_words})
            await asyncio.sleep(0.0 if turn else pause_s)
        conversations = world.services(world.network.processes[router]).conversations
        conversation = conversations.find(tenant, conversation_id)
        record = conversation.turns[-1] if conversation is not None else None
        if record is None or not record.reused_tokens:
            self._world.promises.broken("f", f"{conversation_id} reused nothing after the repair: {record}")


def _events(data: bytes) -> list[Any] | None:
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"[DONE]":
        return None
    return [orjson.loads(line) for line in lines[:-1]]
