"""The simulated engine: reuse equals a cold run, and wrong reuse shows."""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import pytest

from kvlease.core.holding import PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseEvent, LeaseKind, MissReason
from kvlease.core.records import KvLocation, PinOutcome
from kvlease.core.turn import KeepOrder, ReadOrder, TurnParams, TurnReport
from kvlease.sim.engine import EngineSettings, PromptTooLong, SimEngine, SimRequest
from kvlease.sim.model import Sample, tokens_of_messages
from kvlease.sim.ports import Landed, ReadFailed
from kvlease.sim.reader import ReaderLimits
from kvlease.testing.clock import ManualClock

SETTINGS = EngineSettings(block_size=8, total_blocks=64, reader=ReaderLimits(10.0, threshold_tokens=8))
PROMPT = tuple(range(100, 140))


@dataclass
class Fleet:
    """Engines by address; calls between them take no time, READs wait while `gate` is closed."""

    clock: ManualClock = field(default_factory=ManualClock)
    engines: dict[str, SimEngine] = field(default_factory=dict)
    unpinned: list[str] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    def add(self, name: str, settings: EngineSettings = SETTINGS) -> SimEngine:
        engine = SimEngine(settings, Holder(name, "boot"), KvLocation(name, 1), self.clock, self, self)
        self.engines[name] = engine
        return engine

    async def pin(self, ask: PinAsk, sidecar_address: str) -> PinOutcome:
        engine = self.engines.get(sidecar_address)
        return engine.holder.pin(ask) if engine else MissReason.UNREACHABLE

    def unpin(self, holder: Holder, lease_id: int, pin_id: str, sidecar_address: str) -> None:
        self.unpinned.append(pin_id)
        if sidecar_address in self.engines:
            self.engines[sidecar_address].holder.unpin(lease_id, pin_id)

    async def read(
        self, location: KvLocation, holder: Holder, block_ids: Sequence[int], landed: Landed
    ) -> None:
        self.started.set()
        await self.gate.wait()
        engine = self.engines.get(location.side_channel_host)
        if engine is None or engine.holder.holder.boot_id != holder.boot_id:
            raise ReadFailed("gone")
        for place, block_id in enumerate(block_ids):
            landed(place, engine.pool.read(block_id))


def keep(lease_id: int, *, transfer: bool = False, supersedes: int = 0) -> KeepOrder:
    if transfer:
        return KeepOrder(lease_id, LeaseKind.TRANSFER, 30.0, pin_id=f"pin-{lease_id}")
    return KeepOrder(lease_id, LeaseKind.CONVERSATION, 6.0, supersedes=supersedes)


def read_from(name: str, lease_id: int, *, kind: LeaseKind = LeaseKind.CONVERSATION) -> ReadOrder:
    return ReadOrder(lease_id, f"pin-{lease_id}", kind, Holder(name, "boot"), name)


def orders(*, read: ReadOrder | None = None, keep: KeepOrder | None = None, tenant: str = "t") -> TurnParams:
    return TurnParams(tenant, read, keep)


async def reply(engine: SimEngine, request: SimRequest) -> tuple[list[Sample], TurnReport]:
    generation = engine.generate(request)
    async with aclosing(generation.tokens()) as tokens:
        samples = [sample async for sample in tokens]
    return samples, generation.report()


async def cold(request: SimRequest) -> list[Sample]:
    samples, _ = await reply(Fleet().add("cold"), replace(request, params=None))
    return samples


def extended(prompt: Sequence[int], samples: Sequence[Sample], more: Sequence[int]) -> tuple[int, ...]:
    return (*prompt, *(sample.token_id for sample in samples), *more)


async def test_a_read_of_a_retained_turn_equals_a_cold_run() -> None:
    fleet = Fleet()
    decode, prefill = fleet.add("d"), fleet.add("p")
    said, kept = await reply(decode, SimRequest(PROMPT, 9, params=orders(keep=keep(1))))
    assert kept.kept_tokens == 48
    request = SimRequest(extended(PROMPT, said, range(30)), 5, params=orders(read=read_from("d", 1)))
    samples, report = await reply(prefill, request)
    assert (report.outcome, report.read_tokens, report.local_tokens) == ("read", 48, 0)
    assert samples == await cold(request)
    assert fleet.unpinned == ["pin-1"]
    assert prefill.gauges().counters["bytes_read"] == 6 * SETTINGS.block_bytes


async def test_a_whole_turn_over_two_engines_equals_a_cold_run() -> None:
    fleet = Fleet()
    prefill, decode = fleet.add("p"), fleet.add("d")
    request = SimRequest(PROMPT[:37], 6)
    _, kept = await reply(prefill, replace(request, max_tokens=1, params=orders(keep=keep(2, transfer=True))))
    assert kept.kept_tokens == 37
    read = read_from("p", 2, kind=LeaseKind.TRANSFER)
    samples, report = await reply(decode, replace(request, params=orders(read=read, keep=keep(3))))
    assert (report.outcome, report.read_tokens) == ("read", 37)
    assert samples == await cold(request)
    assert prefill.gauges().held_blocks == 0
    assert decode.gauges().held_blocks == report.kept_tokens // 8 == 5


async def test_an_edited_history_reuses_the_true_prefix_only() -> None:
    fleet = Fleet()
    decode, prefill = fleet.add("d"), fleet.add("p")
    said, _ = await reply(decode, SimRequest(PROMPT, 9, params=orders(keep=keep(1))))
    edited = (*PROMPT[:20], 7, *PROMPT[21:])
    request = SimRequest(extended(edited, said, range(9)), 5, params=orders(read=read_from("d", 1)))
    samples, report = await reply(prefill, request)
    assert (report.verified_tokens, report.read_tokens) == (16, 16)
    assert samples == await cold(request)
    assert prefill.gauges().counters["mismatches"] == 1


@pytest.mark.parametrize("damaged", [0, 3])
async def test_one_block_of_wrong_kv_changes_the_reply(damaged: int) -> None:
    fleet = Fleet()
    decode, prefill = fleet.add("d"), fleet.add("p")
    said, _ = await reply(decode, SimRequest(PROMPT, 9, params=orders(keep=keep(1))))
    hold = decode.holder.table.get(1)
    assert hold is not None
    decode.pool.write(hold.grant.block_ids[damaged], b"wrong")
    request = SimRequest(extended(PROMPT, said, range(9)), 5, params=orders(read=read_from("d", 1)))
    samples, _ = await reply(prefill, request)
    assert samples != await cold(request)


async def test_another_tenant_reads_nothing() -> None:
    fleet = Fleet()
    decode, prefill = fleet.add("d"), fleet.add("p")
    said, _ = await reply(decode, SimRequest(PROMPT, 9, params=orders(keep=keep(1))))
    params = orders(read=read_from("d", 1), tenant="other")
    request = SimRequest(extended(PROMPT, said, range(9)), 5, params=params)
    samples, report = await reply(prefill, request)
    assert (report.outcome, report.read_tokens) == ("forbidden", 0)
    assert samples == await cold(request)


async def test_a_read_that_ends_after_the_fence_is_not_used_and_its_blocks_wait_for_it() -> None:
    fleet = Fleet()
    decode, prefill = fleet.add("d"), fleet.add("p")
    said, _ = await reply(decode, SimRequest(PROMPT, 9, params=orders(keep=keep(1))))
    fleet.gate.clear()
    request = SimRequest(extended(PROMPT, said, range(9)), 5, params=orders(read=read_from("d", 1)))
    task = asyncio.create_task(reply(prefill, request))
    await fleet.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert prefill.gauges().quarantined_blocks == 6
    assert prefill.gauges().free_blocks == SETTINGS.total_blocks - 6
    fleet.gate.set()
    while prefill.gauges().quarantined_blocks:
        await asyncio.sleep(0)
    assert prefill.gauges().free_blocks == SETTINGS.total_blocks
    samples, _ = await reply(prefill, replace(request, params=None))
    assert samples == await cold(request)


async def test_a_read_seen_done_too_late_is_computed_instead() -> None:
    fleet = Fleet()
    decode, prefill = fleet.add("d"), fleet.add("p")
    said, _ = await reply(decode, SimRequest(PROMPT, 9, params=orders(keep=keep(1))))
    fleet.gate.clear()
    request = SimRequest(extended(PROMPT, said, range(9)), 5, params=orders(read=read_from("d", 1)))
    task = asyncio.create_task(reply(prefill, request))
    await fleet.started.wait()
    fleet.clock.advance(8.0)
    fleet.gate.set()
    samples, report = await task
    assert (report.outcome, report.read_tokens) == ("fence", 0)
    assert samples == await cold(request)
    assert prefill.gauges().free_blocks == SETTINGS.total_blocks


async def test_a_holder_that_died_or_came_back_as_another_costs_a_recompute() -> None:
    fleet = Fleet()
    decode, prefill = fleet.add("d"), fleet.add("p")
    said, _ = await reply(decode, SimRequest(PROMPT, 9, params=orders(keep=keep(1))))
    fleet.gate.clear()
    request = SimRequest(extended(PROMPT, said, range(9)), 5, params=orders(read=read_from("d", 1)))
    task = asyncio.create_task(reply(prefill, request))
    await fleet.started.wait()
    del fleet.engines["d"]
    fleet.gate.set()
    samples, report = await task
    assert report.outcome == "failed"
    assert samples == await cold(request)
    _, report = await reply(prefill, request)
    assert report.outcome in ("unreachable", "local")


async def test_a_turn_aborted_after_its_first_token_is_kept_and_an_earlier_one_is_not() -> None:
    engine = Fleet().add("d")
    generation = engine.generate(SimRequest(PROMPT, 9, params=orders(keep=keep(1))))
    async with aclosing(generation.tokens()) as tokens:
        async for _ in tokens:
            break
    hold = engine.holder.table.get(1)
    assert hold is not None
    assert (hold.provisional, hold.grant.tokens) == (True, 40)


async def test_a_live_request_evicts_what_nobody_reads_and_no_pinned_block() -> None:
    fleet = Fleet()
    engine = fleet.add("d", replace(SETTINGS, total_blocks=16, reading_cap=1.0))
    await reply(engine, SimRequest(PROMPT, 2, params=orders(keep=keep(1))))
    await reply(engine, SimRequest(tuple(range(40)), 2, params=orders(keep=keep(2))))
    pinned = engine.holder.pin(PinAsk(1, "x", Holder("d", "boot"), "t", read_part_s=10.0))
    assert not isinstance(pinned, MissReason)
    samples, _ = await reply(engine, SimRequest(tuple(range(200, 280)), 2))
    assert len(samples) == 2
    assert engine.holder.table.get(1) is not None
    assert engine.holder.table.get(2) is None
    assert engine.gauges().counters["evictions"] == 1


async def test_a_request_waits_for_blocks_and_a_prompt_that_never_fits_is_refused() -> None:
    fleet = Fleet()
    engine = fleet.add("d", replace(SETTINGS, total_blocks=8, reading_cap=1.0))
    await reply(engine, SimRequest(PROMPT, 2, params=orders(keep=keep(1))))
    engine.holder.pin(PinAsk(1, "x", Holder("d", "boot"), "t", read_part_s=10.0))
    waiting = asyncio.create_task(reply(engine, SimRequest(tuple(range(60)), 2)))
    await asyncio.sleep(0)
    engine.holder.end(1, LeaseEvent.RELEASE)
    assert not waiting.done()
    engine.holder.unpin(1, "x")
    samples, _ = await waiting
    assert len(samples) == 2
    with pytest.raises(PromptTooLong):
        await reply(engine, SimRequest(tuple(range(100)), 2))


async def test_a_reset_loses_holds_and_answers_false_while_blocks_are_pinned() -> None:
    engine = Fleet().add("d")
    await reply(engine, SimRequest(PROMPT, 2, params=orders(keep=keep(1))))
    engine.holder.pin(PinAsk(1, "x", Holder("d", "boot"), "t", read_part_s=10.0))
    assert not engine.reset_prefix_cache()
    engine.holder.unpin(1, "x")
    assert engine.reset_prefix_cache()
    assert engine.holder.holder.epoch == 2
    _, report = await reply(engine, SimRequest(PROMPT, 2))
    assert report.local_tokens == 0


async def test_tenants_with_their_own_salts_do_not_meet_in_the_prefix_cache() -> None:
    engine = Fleet().add("d")
    first, _ = await reply(engine, SimRequest(PROMPT, 2, cache_salt="a"))
    again, again_report = await reply(engine, SimRequest(PROMPT, 2, cache_salt="a"))
    other, other_report = await reply(engine, SimRequest(PROMPT, 2, cache_salt="b"))
    assert (again_report.local_tokens, other_report.local_tokens) == (32, 0)
    assert first == again == other


def test_the_next_turn_of_a_chat_begins_with_the_tokens_of_the_one_before() -> None:
    turn = [{"role": "system", "content": "s"}, {"role": "user", "content": "é"}]
    said = [*turn, {"role": "assistant", "content": "abc"}, {"role": "user", "content": "more"}]
    before = tokens_of_messages(turn)
    assert tokens_of_messages(said)[: len(before) + 3] == before + list(b"abc")
