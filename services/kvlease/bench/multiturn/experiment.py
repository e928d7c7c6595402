"""Runs cells on engines that serve: a first turn per conversation, then the second turns, all at once, measured."""

import asyncio
import uuid
from collections.abc import Collection, Coroutine, Iterable, Iterator
from typing import TypeVar

from kvlease.bench.multiturn.client import Fleet
from kvlease.bench.multiturn.engines import engine_facts
from kvlease.bench.multiturn.fleet import AUTO_SAMPLES, Running
from kvlease.bench.multiturn.plan import REPLY_TOKENS, Cell, Mode, Sweep, TurnStats, prompt_tokens
from kvlease.core.errors import InvalidArgument

AUTO_SUFFIXES = (256, 1024)

T = TypeVar("T")


class Experiment:
    """Measures cells of a sweep."""

    def __init__(self, sweep: Sweep) -> None:
        self._sweep = sweep

    async def warm(self, running: Running) -> None:
        """Turns of every mode that nobody measures: handshakes, kernels for every length, rates for AUTO.

        Raises:
            InvalidArgument: a conversation is longer than the engines' context.
        """
        await self._check_lengths(running)
        for cell in self.warm_cells(running.fleets):
            await self.run(running, cell)

    def warm_cells(self, modes: Collection[Mode]) -> Iterator[Cell]:
        """Stock's engines have one mode and get as many turns as ours: none is measured on colder engines.

        The further ones are short, since a stock decode engine keeps each for a while.
        """
        lengths = self._sweep.lengths
        ends = tuple(dict.fromkeys((lengths[0], lengths[-1])))
        rates = 2 * AUTO_SAMPLES if Mode.AUTO in self._sweep.modes else 0
        for mode in modes:
            for length in ends:
                yield self._warm_cell(mode, length)
        if Mode.STOCK in modes:
            ours = len([mode for mode in self._sweep.modes if mode is not Mode.STOCK])
            for _ in range(max(0, ours - 1) * len(ends) + rates):
                yield self._warm_cell(Mode.STOCK, lengths[0])
        if Mode.AUTO in modes:
            for number in range(rates):
                # While thresholds decide, these suffixes are appended and read back in turn, at every length.
                length, suffix = lengths[number // 2 % len(lengths)], AUTO_SUFFIXES[number % 2]
                yield self._warm_cell(Mode.AUTO, length, suffix)

    def _warm_cell(self, mode: Mode, length: int, suffix: int = 0) -> Cell:
        return Cell(mode, length, suffix or self._sweep.suffix_min, 1, -1)

    async def run(self, running: Running, cell: Cell) -> list[TurnStats]:
        """The second turns of a cell. Its prompts are new to every engine."""
        fleet = running.fleets[cell.mode]
        names = [f"{cell.mode}-{uuid.uuid4().hex}" for _ in range(cell.conversations)]
        prompts = [await self._first_turn(running, fleet, cell, name) for name in names]
        await asyncio.sleep(cell.think_s)
        before = await running.reads()
        replies = await all_of(
            fleet.turn(name, prompt, REPLY_TOKENS, stream=True)
            for name, prompt in zip(names, prompts, strict=True)
        )
        share = (await running.reads() - before).share(cell.conversations)
        return [
            TurnStats(
                cell.name,
                cell.mode,
                cell.length,
                cell.suffix,
                cell.conversations,
                name,
                len(prompt),
                reply.ttft_s * 1e3,
                reply.path,
                reply.reason,
                reply.reused_tokens,
                reply.prefill_s * 1e3,
                read_ms=reply.read_s * 1e3,
                think_s=cell.think_s,
            ).moved(share)
            for name, prompt, reply in zip(names, prompts, replies, strict=True)
        ]

    async def _first_turn(self, running: Running, fleet: Fleet, cell: Cell, name: str) -> list[int]:
        """The prompt of the second turn. Not streamed: only then does a stock engine say what it kept."""
        seed = f"{self._sweep.seed}/{name}"
        prompt = prompt_tokens(seed, cell.length, running.vocabulary)
        first = await fleet.turn(name, prompt, self._sweep.output_tokens, stream=False)
        return prompt + first.token_ids + prompt_tokens(f"{seed}/suffix", cell.suffix, running.vocabulary)

    async def _check_lengths(self, running: Running) -> None:
        needed = self._sweep.context_tokens
        if Mode.AUTO in running.fleets:
            needed = max(needed, self._sweep.lengths[-1] + max(AUTO_SUFFIXES) + self._sweep.reply_tokens)
        for url in (*running.prefill_urls, *running.decode_urls):
            context = (await engine_facts(running.session, url)).context_tokens
            if context is not None and needed > context:
                raise InvalidArgument(
                    f"the longest conversation needs {needed} tokens, the context of {url} has {context} "
                    "(--lengths, --suffixes; --engine-arguments='--max-model-len N')"
                )


async def all_of(turns: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """What all of them return, at once. When one fails, the others end first."""
    tasks = [asyncio.create_task(turn) for turn in turns]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
