"""The reader half of a simulated engine: pins, verifies, READs, fences, quarantines."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from kvlease.core.clock import Clock
from kvlease.core.digests import BlockChain, verified_tokens
from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.records import BlockList, KvLocation, Pinned
from kvlease.core.turn import ReadOrder
from kvlease.sim.pool import BlockPool
from kvlease.sim.ports import Landed, ReadFailed, RemotePins, Transfers

FENCE_SHARE = 0.8
"""Share of a read part that the reader may count on: clocks drift by at most 10 % on either side."""

RENEW_SHARE = 0.4
"""A read part of which this share has passed is asked for again before the READ is posted."""


@dataclass(frozen=True, slots=True)
class ReaderLimits:
    """Bounds of a reader.

    Attributes:
        read_part_s: how long a pin's read part lasts at the holder.
        threshold_tokens: fewer tokens than this are computed rather than READ.
    """

    read_part_s: float = 10.0
    threshold_tokens: int = 64


@dataclass(frozen=True, slots=True)
class PinnedRead:
    """A lease that may be READ until `fence_s`.

    Attributes:
        asked_s: when the pin was asked for, before the question left.
        verified_tokens: tokens at the lease's head that belong to the prompt.
    """

    order: ReadOrder
    tenant: str
    holder: Holder
    blocks: BlockList
    location: KvLocation
    asked_s: float
    fence_s: float
    verified_tokens: int


@dataclass(slots=True)
class ReadResult:
    """What became of a READ: destination blocks that hold verified KV, or why there are none.

    Attributes:
        read_s: seconds until it ended, or was given up.
    """

    used: bool
    outcome: str
    read_s: float


class Reader:
    """READs for one engine.

    Args:
        freed: called when blocks left quarantine.
    """

    def __init__(
        self,
        pool: BlockPool,
        pins: RemotePins,
        transfers: Transfers,
        clock: Clock,
        limits: ReaderLimits,
        freed: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._pins = pins
        self._transfers = transfers
        self._clock = clock
        self._limits = limits
        self._freed = freed
        self._running: set[asyncio.Task[None]] = set()
        self._quarantined: dict[asyncio.Task[None], tuple[int, ...]] = {}
        self.counters: Counter[str] = Counter()

    @property
    def quarantined_blocks(self) -> int:
        """Blocks that a READ which was given up may still write to."""
        return sum(map(len, self._quarantined.values()))

    async def pin(self, order: ReadOrder, tenant: str, prompt: BlockChain) -> PinnedRead | str:
        """Pins the lease for this reader and compares its digests; or the reason why it is not read."""
        asked_s = self._clock.now_s()
        ask = PinAsk(order.lease_id, order.pin_id, order.holder, tenant, read_part_s=self._limits.read_part_s)
        pinned = await self._pins.pin(ask, order.sidecar_address)
        if not isinstance(pinned, Pinned):
            self.counters["misses"] += 1
            self.counters[f"outcome_{pinned.value}"] += 1
            return pinned.value
        if pinned.blocks is None or pinned.location is None:
            self._unpin(order, pinned.holder)
            return "failed"
        fence_s = asked_s + FENCE_SHARE * self._limits.read_part_s
        verified = verified_tokens(chain_of(pinned.blocks, prompt.block_size), prompt)
        self.counters["verified_tokens"] += verified
        self.counters["mismatches"] += verified < min(pinned.blocks.tokens, prompt.tokens)
        return PinnedRead(
            order, tenant, pinned.holder, pinned.blocks, pinned.location, asked_s, fence_s, verified
        )

    def worth_reading(self, read: PinnedRead, tokens: int) -> bool:
        """Whether a READ of `tokens` is worth it."""
        return tokens >= max(1, self._limits.threshold_tokens) and read.verified_tokens > 0

    def is_stale(self, read: PinnedRead) -> bool:
        """Whether the read part should be asked for again before the READ is posted."""
        return self._clock.now_s() - read.asked_s > RENEW_SHARE * self._limits.read_part_s

    def drop(self, read: PinnedRead) -> None:
        """Ends the pin of a lease that is not READ."""
        self._unpin(read.order, read.holder)

    async def read(
        self, read: PinnedRead, source: Sequence[int], destination: Sequence[int], block_bytes: int
    ) -> ReadResult:
        """READs blocks `source` of the lease into blocks of the pool, up to the fence, and ends the pin.

        When the result is not used, the destination may still be written to: it stays referenced until the transfer
        has ended, and the caller drops its own references.
        """
        owned, begun_s = tuple(destination), self._clock.now_s()
        transfer = self._transfers.read(read.location, read.holder, source, self._landing(owned, block_bytes))
        task = asyncio.create_task(_contained(transfer))
        self._running.add(task)
        task.add_done_callback(self._ended)
        self.counters["reads"] += 1
        try:
            await asyncio.wait([task], timeout=max(0.0, read.fence_s - self._clock.now_s()))
        finally:
            in_time = self._is_in_time(read) and task.done() and task.exception() is None
            if not in_time:
                self._quarantine(task, owned)
            self._unpin(read.order, read.holder)
        outcome = (
            "read" if in_time else ("failed" if task.done() and task.exception() is not None else "fence")
        )
        self.counters[f"outcome_{outcome}"] += 1
        return ReadResult(in_time, outcome, self._clock.now_s() - begun_s)

    async def close(self) -> None:
        """Ends every transfer."""
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    # --- inside -------------------------------------------------------------------------------------------

    def _landing(self, owned: tuple[int, ...], block_bytes: int) -> Landed:
        """Writes what arrives into the blocks that were named, whoever has them by then."""

        def land(place: int, content: bytes) -> None:
            self._pool.write(owned[place], content)
            self.counters["bytes_read"] += block_bytes

        return land

    def _is_in_time(self, read: PinnedRead) -> bool:
        return self._clock.now_s() < read.fence_s

    def _quarantine(self, task: asyncio.Task[None], blocks: tuple[int, ...]) -> None:
        if not task.done():
            self._pool.touch(blocks)
            self._quarantined[task] = blocks

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        blocks = self._quarantined.pop(task, None)
        if not task.cancelled():
            task.exception()
        if blocks is not None:
            self._pool.free(blocks)
            self._freed()

    def _unpin(self, order: ReadOrder, holder: Holder) -> None:
        self._pins.unpin(holder, order.lease_id, order.pin_id, order.sidecar_address)


def chain_of(blocks: BlockList, block_size: int) -> BlockChain:
    """The digests of a pinned lease."""
    return BlockChain(block_size, blocks.digests, blocks.tokens, blocks.tail_digest)


async def _contained(transfer: Coroutine[Any, Any, None]) -> None:
    try:
        await transfer
    except OSError as error:
        raise ReadFailed(str(error)) from error
