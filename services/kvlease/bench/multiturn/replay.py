"""Replays conversations of a file on engines that serve, by every mode, and measures every turn.

The engines' own answers, as long as those of the file, become the history. Prompts are tokens, without a chat
template, so that every mode sends the same. Nothing is cached from one cell to the next: each has a salt of its own.
"""

import asyncio
import uuid
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from kvlease.bench.multiturn.conversations import Conversation, Passage
from kvlease.bench.multiturn.engines import engine_facts, tokenize
from kvlease.bench.multiturn.experiment import Experiment, all_of
from kvlease.bench.multiturn.fleet import Running
from kvlease.bench.multiturn.plan import (
    Mode,
    Point,
    Sweep,
    TurnStats,
    pause,
    prompt_tokens,
    require_think_s,
)
from kvlease.core.errors import InvalidArgument

TEXT_BYTES_A_TOKEN = 4
"""For engines without a tokenizer: what a token of English stands for, about."""


@dataclass(frozen=True, slots=True)
class ReplayCell:
    """All conversations of a file by one mode, so many of them at once."""

    mode: Mode
    source: str
    conversations: int
    repeat: int
    think_s: float = 0.0

    @property
    def name(self) -> str:
        """Unique in a replay; also what a resumed run knows it by."""
        return f"{self.mode}/{self.point}#{self.repeat}"

    @property
    def point(self) -> str:
        """What is measured, by whichever mode."""
        return f"{self.source}x{self.conversations}{pause(self.think_s)}"


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What is replayed.

    Attributes:
        source: names the file in the record.
        at_once: conversations at once.
        output_tokens: generated where the file has no answer.
        think_s: between the turns of a conversation.
        has_tokenizer: whether the engines can tell the tokens of a text.
    """

    modes: tuple[Mode, ...]
    source: str
    conversations: tuple[Conversation, ...]
    at_once: int
    repeats: int
    output_tokens: int
    think_s: float
    has_tokenizer: bool

    def __post_init__(self) -> None:
        if min(self.at_once, self.repeats, self.output_tokens) < 1:
            raise InvalidArgument(
                f"conversations ({self.at_once}), repeats ({self.repeats}) and output_tokens "
                f"({self.output_tokens}) must be above 0"
            )
        require_think_s(self.think_s)
        if not self.conversations:
            raise InvalidArgument(f"{self.source} has no conversation")

    def cells(self, done: Collection[str] = ()) -> Iterator[ReplayCell]:
        """The cells that are left; stock's come last: they need engines of their own."""
        modes = sorted(self.modes, key=lambda mode: mode is Mode.STOCK)
        for repeat, mode in product(range(self.repeats), modes):
            cell = ReplayCell(mode, self.source, self.at_once, repeat, self.think_s)
            if cell.name not in done:
                yield cell


@dataclass(frozen=True, slots=True)
class _Turn:
    """Tokens that a turn adds, and how many are to be generated."""

    question: list[int]
    answer_tokens: int


class Replay:
    """Measures the cells of a replay."""

    def __init__(self, plan: ReplayPlan) -> None:
        self._plan = plan
        self._scripts: list[list[_Turn]] = []

    async def warm(self, running: Running) -> None:
        """Tokenizes the conversations, and sends turns of their lengths that nobody measures.

        Raises:
            InvalidArgument: a conversation is longer than the engines' context.
        """
        if not self._scripts:
            self._scripts = [await self._script(running, one) for one in self._plan.conversations]
        await self._check_lengths(running)
        firsts = [len(script[0].question) for script in self._scripts]
        points = dict.fromkeys(Point(length, 1) for length in (min(firsts), max(firsts)))
        sweep = Sweep(self._plan.modes, tuple(points), 1, self._plan.output_tokens, (0.0,), 0)
        await Experiment(sweep).warm(running)

    async def run(self, running: Running, cell: ReplayCell) -> list[TurnStats]:
        """The turns of a cell that were measured: all, but of stock engines the last of each conversation."""
        waiting = iter(self._scripts)
        salt = uuid.uuid4().hex
        measured: list[TurnStats] = []

        async def client() -> None:
            for script in waiting:
                measured.extend(await self._converse(running, cell, script, salt))

        before = await running.reads()
        await all_of(client() for _ in range(cell.conversations))
        turns = sum(map(len, self._scripts))
        share = (await running.reads() - before).share(turns)
        return [turn.moved(share) for turn in measured]

    async def _converse(
        self, running: Running, cell: ReplayCell, script: Sequence[_Turn], salt: str
    ) -> list[TurnStats]:
        """One conversation. A stock engine says what it kept only to a request that is not streamed."""
        fleet, name = running.fleets[cell.mode], f"{cell.mode}-{uuid.uuid4().hex}"
        prompt: list[int] = []
        generated, measured = 0, list[TurnStats]()
        for number, turn in enumerate(script, start=1):
            if number > 1:
                await asyncio.sleep(self._plan.think_s)
            length = len(prompt) - generated
            prompt = prompt + turn.question
            streamed = cell.mode is not Mode.STOCK or number == len(script)
            reply = await fleet.turn(name, prompt, turn.answer_tokens, stream=streamed, salt=salt)
            if streamed:
                stats = TurnStats(
                    cell.name,
                    cell.mode,
                    length,
                    len(turn.question),
                    cell.conversations,
                    name,
                    len(prompt),
                    reply.ttft_s * 1e3,
                    reply.path,
                    reply.reason,
                    reply.reused_tokens,
                    reply.prefill_s * 1e3,
                    turn=number,
                    source=cell.source,
                    read_ms=reply.read_s * 1e3,
                    think_s=self._plan.think_s,
                    last=number == len(script),
                )
                measured.append(stats)
            prompt, generated = prompt + reply.token_ids, len(reply.token_ids)
        return measured

    # --- tokens -----------------------------------------------------------------------------------------------

    async def _script(self, running: Running, conversation: Conversation) -> list[_Turn]:
        turns: list[_Turn] = []
        for exchange in conversation.exchanges:
            question = [token for part in exchange.question for token in await self._tokens(running, part)]
            answer = self._plan.output_tokens
            if exchange.answer is not None:
                answer = max(1, len(await self._tokens(running, exchange.answer)))
            turns.append(_Turn(question, answer))
        return turns

    async def _tokens(self, running: Running, passage: Passage) -> list[int]:
        if not passage.text:
            return prompt_tokens(passage.seed, passage.tokens, running.vocabulary)
        if self._plan.has_tokenizer:
            return await tokenize(running.session, running.decode_urls[0], running.model, passage.text)
        count = max(1, len(passage.text.encode()) // TEXT_BYTES_A_TOKEN)
        return prompt_tokens(passage.text, count, running.vocabulary)

    async def _check_lengths(self, running: Running) -> None:
        context = (await engine_facts(running.session, running.decode_urls[0])).context_tokens
        if context is None:
            return
        for conversation, script in zip(self._plan.conversations, self._scripts, strict=True):
            needs = list(accumulate(len(turn.question) + turn.answer_tokens for turn in script))
            if needs[-1] > context:
                fits = sum(need <= context for need in needs)
                raise InvalidArgument(
                    f"conversation {conversation.name} needs {needs[-1]} tokens, the engines' context has "
                    f"{context}: {fits} of its {len(needs)} turns fit (--turns-max)"
                )
