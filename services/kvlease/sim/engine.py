"""A simulated engine: computes prompts over blocks, keeps and READs them as its orders say.

One instance is one engine incarnation on one event loop. Time passes only where computing takes time.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache

from kvlease import __version__
from kvlease.core import details
from kvlease.core.attachment import EngineFacts
from kvlease.core.clock import Clock
from kvlease.core.digests import DIGEST_BYTES, BlockChain, ChainRoot, chain
from kvlease.core.holding import Grant, HoldLimits
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind
from kvlease.core.records import HolderGauges, KvLayout, KvLocation
from kvlease.core.turn import KeepOrder, TurnParams, TurnReport
from kvlease.sim.holder import SimHolder
from kvlease.sim.model import Sample, SimModel
from kvlease.sim.pool import BlockPool
from kvlease.sim.ports import RemotePins, Transfers
from kvlease.sim.reader import PinnedRead, Reader, ReaderLimits

DEADLINES_CHECKED_S = 0.5
"""A request that waits for blocks looks this often for leases whose deadline has passed."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What a simulated engine is made of. All durations are seconds.

    Attributes:
        prefill_token_s: to compute one token of a prompt.
        decode_step_s: to compute one token of a reply.
        reading_cap: fraction of the blocks that may be pinned at once.
    """

    model: str = "sim"
    weights_version: str = ""
    block_size: int = 16
    total_blocks: int = 4096
    block_bytes: int = 16_384
    prefill_token_s: float = 0.0
    decode_step_s: float = 0.0
    reading_cap: float = 0.25
    lifetime_max_s: float = 1800.0
    reader: ReaderLimits = field(default_factory=ReaderLimits)

    def layout(self) -> KvLayout:
        """How KV lies in this engine."""
        return KvLayout(
            self.block_size, "digest", 1, 1, self.block_bytes, f"sim-{self.model}-{self.block_size}"
        )


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request.

    Attributes:
        token_ids: the prompt.
        stop: the reply ends when its text ends with one of these.
        params: the router's orders.
    """

    token_ids: tuple[int, ...]
    max_tokens: int
    cache_salt: str = ""
    stop: tuple[str, ...] = ()
    params: TurnParams | None = None


class PromptTooLong(ValueError):
    """A request needs more blocks than the engine has."""


@dataclass(slots=True)
class Work:
    """A request while it runs.

    Attributes:
        blocks: its blocks, each referenced once.
        computed: blocks at the head that hold the KV of the prompt.
        attended: per block, what it held when it was attended to.
        states: per block that was attended to, the state after it.
        digests: by tenant, those of the full blocks that were asked for so far.
    """

    request: SimRequest
    tokens: list[int]
    blocks: list[int] = field(default_factory=list[int])
    computed: int = 0
    local_tokens: int = 0
    read_tokens: int = 0
    verified_tokens: int = 0
    outcome: str = "none"
    kept_tokens: int = 0
    read_s: float = 0.0
    sampled: int = 0
    attended: list[bytes] = field(default_factory=list[bytes])
    states: list[bytes] = field(default_factory=list[bytes])
    digests: dict[str, bytes] = field(default_factory=dict[str, bytes])


class Generation:
    """The reply to one request, token by token.

    Leaving `tokens()` early aborts the request; what was promised to be kept is kept from the first token on.
    """

    def __init__(self, engine: "SimEngine", request: SimRequest) -> None:
        self._engine = engine
        self._work = Work(request, list(request.token_ids))
        self.finish_reason = ""

    async def tokens(self) -> AsyncGenerator[Sample, None]:
        """Computes the reply.

        Raises:
            PromptTooLong: it can never be computed here.
        """
        engine, work, text = self._engine, self._work, ""
        engine.running += 1
        try:
            await engine.prefill(work)
            for number in range(work.request.max_tokens):
                if number:
                    await engine.decode(work)
                sample = engine.sample(work)
                text += sample.text
                if any(text.endswith(stop) for stop in work.request.stop):
                    self.finish_reason = "stop"
                elif number + 1 == work.request.max_tokens:
                    self.finish_reason = "length"
                if self.finish_reason:
                    engine.keep(work)
                yield sample
                if self.finish_reason:
                    return
        finally:
            engine.running -= 1
            engine.finish(work)

    def report(self) -> TurnReport:
        """What was reused and kept, so far."""
        work = self._work
        return TurnReport(
            prompt_tokens=len(work.request.token_ids),
            local_tokens=work.local_tokens,
            read_tokens=work.read_tokens,
            verified_tokens=work.verified_tokens,
            outcome=work.outcome,
            kept_tokens=work.kept_tokens,
            read_s=work.read_s,
        )


class SimEngine:
    """One engine incarnation.

    Args:
        holder: who it is.
        location: where other engines READ from it.
    """

    pool_class: type[BlockPool] = BlockPool
    holder_class: type[SimHolder] = SimHolder
    reader_class: type[Reader] = Reader

    def __init__(
        self,
        settings: EngineSettings,
        holder: Holder,
        location: KvLocation,
        clock: Clock,
        pins: RemotePins,
        transfers: Transfers,
    ) -> None:
        self.settings = settings
        self.pool = self.pool_class(settings.total_blocks)
        limits = HoldLimits(int(settings.total_blocks * settings.reading_cap), settings.lifetime_max_s)
        self.holder = self.holder_class(holder, self.pool, limits, clock, settings.layout(), location)
        self.reader = self.reader_class(self.pool, pins, transfers, clock, settings.reader, self._wake)
        self.running = 0
        self._location = location
        self._model = SimModel(settings.model, settings.weights_version)
        self._freed = asyncio.Event()

    def place(self, location: KvLocation) -> None:
        """Sets where other engines READ from it, once its port is known."""
        self._location = location
        self.holder.place(location)

    def generate(self, request: SimRequest) -> Generation:
        """The reply to a request; nothing is computed before its tokens are asked for."""
        return Generation(self, request)

    def facts(self) -> EngineFacts:
        """What the engine tells its sidecar of itself."""
        settings = self.settings
        return EngineFacts(
            holder=self.holder.holder,
            model=settings.model,
            layout=settings.layout(),
            location=self._location,
            vllm_version="sim",
            total_blocks=settings.total_blocks,
            details={details.DEVICE: "sim", details.CONNECTOR_VERSION: __version__},
        )

    def gauges(self) -> HolderGauges:
        """The holder's gauges and counters."""
        held = self.holder.held_blocks()
        counters = Counter(self.reader.counters)
        counters["evictions"] = counters["evictions_pressure"] = self.holder.evictions
        return HolderGauges(
            held_blocks=held,
            reading_blocks=self.holder.reading_blocks(),
            quarantined_blocks=self.reader.quarantined_blocks,
            free_blocks=self.pool.free_blocks,
            total_blocks=self.pool.total_blocks,
            running_requests=self.running,
            counters=dict(counters),
        )

    def reset_prefix_cache(self) -> bool:
        """Loses every hold, then empties the prefix cache. False while blocks are pinned or in use."""
        self.holder.reset()
        return self.pool.forget_prefixes()

    async def close(self) -> None:
        """Ends every READ."""
        await self.reader.close()

    # --- a request, step by step --------------------------------------------------------------------------

    async def prefill(self, work: Work) -> None:
        """Fills the prompt's blocks: from the prefix cache, by a READ, and by computing the rest."""
        work.outcome = "none"
        keys = self._cache_keys(work, len(work.tokens) - 1)
        read = await self._pin(work)
        try:
            await self._admit(work, keys)
            if read is not None:
                read = await self._refresh(work, read)
        except BaseException:
            if read is not None:
                self.reader.drop(read)
            raise
        if read is not None:
            await self._read(work, read)
        await self._compute_prompt(work)

    async def decode(self, work: Work) -> None:
        """Computes the KV of the token sampled last."""
        await asyncio.sleep(self.settings.decode_step_s)
        last = self._blocks_of(len(work.tokens)) - 1
        self._compute(work, last)
        if len(work.tokens) % self.settings.block_size == 0:
            self.pool.cache(work.blocks[last], self._cache_keys(work, len(work.tokens))[last])

    def sample(self, work: Work) -> Sample:
        """The next token, from the KV that the request's blocks hold now."""
        sample = self._model.sample(self._attend(work, self._blocks_of(len(work.tokens))))
        work.tokens.append(sample.token_id)
        work.sampled += 1
        return sample

    def keep(self, work: Work) -> None:
        """Grants the lease that the orders ask for, once."""
        params = work.request.params
        if params is None or params.keep is None or not work.sampled or work.kept_tokens:
            return
        if params.keep.kind is LeaseKind.TRANSFER:
            work.kept_tokens = self._keep_prompt(work, params, params.keep)
        else:
            work.kept_tokens = self._keep_turn(work, params, params.keep)

    def finish(self, work: Work) -> None:
        """Ends the request; one that was aborted after its first token is kept too."""
        self.keep(work)
        self.pool.free(work.blocks)
        work.blocks = []
        self._wake()

    # --- inside -------------------------------------------------------------------------------------------

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_size)

    def _cache_keys(self, work: Work, tokens: int) -> list[bytes]:
        """The prefix cache's keys of the full blocks among the first `tokens` tokens."""
        digests = self._chain(work, "", tokens).digests
        return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]

    def _chain(self, work: Work, tenant: str, tokens: int) -> BlockChain:
        settings, known = self.settings, work.digests.get(tenant, b"")
        root = ChainRoot(tenant, settings.model, settings.weights_version, "", "", work.request.cache_salt)
        run = _chain(root, tuple(work.tokens[:tokens]), settings.block_size, known)
        if len(run.digests) > len(known):
            work.digests[tenant] = run.digests
        return run

    async def _pin(self, work: Work) -> PinnedRead | None:
        params = work.request.params
        if params is None or params.read is None:
            return None
        prompt = self._chain(work, params.tenant, len(work.tokens))
        read = await self.reader.pin(params.read, params.tenant, prompt)
        if isinstance(read, str):
            work.outcome = read
            return None
        work.verified_tokens = read.verified_tokens
        return read

    async def _refresh(self, work: Work, read: PinnedRead) -> PinnedRead | None:
        """The pin with a current read part, if the READ is worth it; else it is dropped."""
        if not self.reader.worth_reading(read, read.verified_tokens - work.local_tokens):
            self.reader.drop(read)
            work.outcome = "local" if read.verified_tokens <= work.local_tokens else "below_threshold"
            return None
        if not self.reader.is_stale(read):
            return read
        return await self._pin(work)

    async def _read(self, work: Work, read: PinnedRead) -> None:
        head, end = work.computed, self._blocks_of(read.verified_tokens)
        source = read.blocks.block_ids[head:end]
        destination = work.blocks[head:end]
        result = await self.reader.read(read, source, destination, self.settings.block_bytes)
        work.outcome = result.outcome
        if result.used:
            work.read_tokens = read.verified_tokens - work.local_tokens
            work.read_s = result.read_s
            work.computed = end
            keys = self._cache_keys(work, read.verified_tokens)
            for place in range(head, len(keys)):
                self.pool.cache(work.blocks[place], keys[place])
            return
        # A late write may still land in these: the request goes on with others.
        given_up = work.blocks[head:]
        del work.blocks[head:]
        self.pool.free(given_up)
        self._wake()
        while (blocks := self._take(len(given_up))) is None:
            await self._wait_for_blocks()
        work.blocks += blocks

    async def _compute_prompt(self, work: Work) -> None:
        """Computes what is neither cached nor READ; the last token always, since the reply starts there."""
        missing = max(1, len(work.tokens) - work.computed * self.settings.block_size)
        await asyncio.sleep(missing * self.settings.prefill_token_s)
        keys = self._cache_keys(work, len(work.tokens))
        first = work.computed
        self._compute(work, first)
        for place in range(first, len(keys)):
            self.pool.cache(work.blocks[place], keys[place])

    def _compute(self, work: Work, first: int) -> None:
        """The KV from one block on, each on top of what the blocks before it hold."""
        size, pool, model = self.settings.block_size, self.pool, self._model
        state = self._attend(work, first)
        for place in range(first, self._blocks_of(len(work.tokens))):
            content = model.compute(state, work.tokens[place * size : (place + 1) * size])
            pool.write(work.blocks[place], content)
            state = model.attend(state, content)
            work.attended.append(content)
            work.states.append(state)

    def _attend(self, work: Work, blocks: int) -> bytes:
        """The state after the first blocks, from what they hold now; what is unchanged is not computed again."""
        contents = self.pool.read_all(work.blocks[:blocks])
        known = _common(work.attended, contents)
        states = work.states
        del states[known:]
        state = states[-1] if states else self._model.start()
        for content in contents[known:]:
            state = self._model.attend(state, content)
            states.append(state)
        work.attended = contents
        return state

    async def _admit(self, work: Work, keys: list[bytes]) -> None:
        """Takes the request's blocks, all of its reply too: what the prefix cache holds, and others.

        A request that waits holds nothing, so that those which run can end.
        """
        needed = self._blocks_of(len(work.tokens) + work.request.max_tokens - 1)
        if needed > self.pool.total_blocks:
            raise PromptTooLong(f"{needed} blocks are needed, {self.pool.total_blocks} exist")
        while True:
            cached = self.pool.cached_prefix(keys)
            self.pool.touch(cached)
            blocks = self._take(needed - len(cached))
            if blocks is not None:
                break
            self.pool.free(cached)
            await self._wait_for_blocks()
        work.blocks = cached + blocks
        work.computed = len(cached)
        work.local_tokens = work.computed * self.settings.block_size

    def _take(self, count: int) -> list[int] | None:
        """Blocks, if there are enough once leases that nobody reads are evicted."""
        self._freed.clear()
        return self.pool.allocate(count) if self.holder.make_free(count) else None

    async def _wait_for_blocks(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DEADLINES_CHECKED_S):
                await self._freed.wait()

    def _keep_turn(self, work: Work, params: TurnParams, keep: KeepOrder) -> int:
        """A CONVERSATION lease over the full blocks below the token sampled last, which has no KV."""
        blocks = (len(work.tokens) - 1) // self.settings.block_size
        run = self._chain(work, params.tenant, blocks * self.settings.block_size)
        granted = blocks > 0 and self.holder.grant(
            self._grant(work, params, keep, run, blocks), keep.duration_s
        )
        return run.tokens if granted else 0

    def _keep_prompt(self, work: Work, params: TurnParams, keep: KeepOrder) -> int:
        """A TRANSFER lease over the whole prompt, its partial last block too."""
        run = self._chain(work, params.tenant, len(work.request.token_ids))
        grant = self._grant(work, params, keep, run, self._blocks_of(run.tokens))
        return run.tokens if self.holder.grant_transfer(grant, keep.pin_id, keep.duration_s) else 0

    def _grant(self, work: Work, params: TurnParams, keep: KeepOrder, run: BlockChain, blocks: int) -> Grant:
        return Grant(
            lease_id=keep.lease_id,
            kind=keep.kind,
            block_ids=tuple(work.blocks[:blocks]),
            digests=run.digests,
            tokens=run.tokens,
            block_size=run.block_size,
            tail_digest=run.tail,
            tenant=params.tenant,
            conversation_key=keep.conversation_key,
            chain_keys=keep.chain_keys,
            supersedes=keep.supersedes,
            model=self.settings.model,
        )

    def _wake(self) -> None:
        self._freed.set()


@lru_cache(maxsize=32)
def _chain(root: ChainRoot, token_ids: tuple[int, ...], block_size: int, known: bytes) -> BlockChain:
    """What one of two engines that share a turn has just digested is not digested again."""
    return chain(root, token_ids, block_size, known=known)


def _common(left: list[bytes], right: list[bytes]) -> int:
    """Length of the longest common prefix."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    return next(place for place in range(length) if left[place] != right[place])
