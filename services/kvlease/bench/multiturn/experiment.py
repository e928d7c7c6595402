"""Runs cells on engines that serve: a first turn per conversation, then the second turns, all at once, measured."""

import asyncio
import uuid

from kvlease.bench.multiturn.client import Fleet, Reply, read_counters
from kvlease.bench.multiturn.fleet import AUTO_SAMPLES, Running
from kvlease.bench.multiturn.plan import Cell, Mode, Sweep, TurnStats, prompt_tokens

SECOND_REPLY_TOKENS = 16
WARM_LENGTH = 512
AUTO_SUFFIXES = (256, 1024)


class Experiment:
    """Measures cells of a sweep.

    Args:
        vocabulary: token ids of the model.
    """

    def __init__(self, sweep: Sweep, vocabulary: int) -> None:
        self._sweep = sweep
        self.vocabulary = vocabulary

    async def warm(self, running: Running) -> None:
        """Turns of every mode that nobody measures: handshakes, kernels for every length, rates for AUTO."""
        lengths = self._sweep.lengths
        for mode in running.fleets:
            for length in dict.fromkeys((WARM_LENGTH, lengths[0], lengths[-1])):
                await self.run(running, Cell(mode, length, self._sweep.suffix_min, 1, -1))
        if Mode.AUTO in running.fleets:
            for number in range(2 * AUTO_SAMPLES):
                # While thresholds decide, these suffixes are appended and read back in turn, at every length.
                length, suffix = lengths[number // 2 % len(lengths)], AUTO_SUFFIXES[number % 2]
                await self.run(running, Cell(Mode.AUTO, length, suffix, 1, -1))

    async def run(self, running: Running, cell: Cell) -> list[TurnStats]:
        """The second turns of a cell. Its prompts are new to every engine."""
        fleet = running.fleets[cell.mode]
        names = [f"{cell.mode}-{uuid.uuid4().hex}" for _ in range(cell.conversations)]
        prompts = [await self._first_turn(fleet, cell, name) for name in names]
        await asyncio.sleep(self._sweep.think_s)
        before = await read_counters(running.session, running.engine_urls)
        replies = await asyncio.gather(
            *(
                fleet.turn(name, prompt, SECOND_REPLY_TOKENS, stream=True)
                for name, prompt in zip(names, prompts, strict=True)
            )
        )
        # Engines count a transfer with their next step.
        read = await read_counters(running.session, running.engine_urls) - before
        share = 1 / cell.conversations
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
                read.seconds * 1e3 * share,
                read.bytes * share,
                read.descriptors * share,
                read_ms=reply.read_s * 1e3,
            )
            for name, prompt, reply in zip(names, prompts, replies, strict=True)
        ]

    async def _first_turn(self, fleet: Fleet, cell: Cell, name: str) -> list[int]:
        """The prompt of the second turn. Not streamed: only then does a stock engine say what it kept."""
        seed = f"{self._sweep.seed}/{name}"
        prompt = prompt_tokens(seed, cell.length, self.vocabulary)
        first = await fleet.turn(name, prompt, self._sweep.output_tokens, stream=False)
        return prompt + first.token_ids + prompt_tokens(f"{seed}/suffix", cell.suffix, self.vocabulary)


async def inter_token_ms(
    running: Running, mode: Mode, experiment: Experiment, cells: list[Cell], streams: int, tokens: int
) -> dict[str, list[float]]:
    """Milliseconds between the tokens of streams that run on the decode engine, without and with turns beside.

    Both parts generate the same number of tokens; the turns of `cells` follow each other as long as they run.
    """
    fleet = running.fleets[mode]

    async def stream(number: int) -> Reply:
        prompt = prompt_tokens(f"stream/{uuid.uuid4()}/{number}", 64, experiment.vocabulary)
        return await fleet.turn(f"stream-{uuid.uuid4()}", prompt, tokens, stream=True)

    async def turns() -> None:
        while True:
            for cell in cells:
                await experiment.run(running, cell)

    gaps: dict[str, list[float]] = {}
    for part in ("quiet", "busy"):
        beside = asyncio.create_task(turns()) if part == "busy" else None
        replies = await asyncio.gather(*(stream(number) for number in range(streams)))
        if beside is not None:
            beside.cancel()
            await asyncio.gather(beside, return_exceptions=True)
        gaps[part] = [
            (later - earlier) * 1e3
            for reply in replies
            for earlier, later in zip(reply.arrivals_s, reply.arrivals_s[1:], strict=False)
        ]
    return gaps
