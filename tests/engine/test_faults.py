"""Faults of engines and leases: the turn is right, nothing is left waiting, and every block comes back."""

import asyncio
import signal
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.engine.pair import MODEL, PROVISIONAL_S, Outcome, Pair, PairPlan, eventually, whole_blocks

from kvlease.core.holding import PinAsk
from kvlease.core.records import EngineRole, Pinned
from kvlease.dev.check import FIRST, SYSTEM, THIRD
from kvlease.dev.completion import Completion, complete
from kvlease.router.config import RouterConfig
from kvlease.sidecar.sidecar import Sidecar

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL, DECODE = EngineRole.PREFILL, EngineRole.DECODE
READ_PART_S = 30.0
"""The READ must be posted within 0.4 of it, however busy the machine is."""
NO_RETURN_IS_WORTH_IT = 1e9
"""Returns an hour that are asked for: conversations are kept for the floor."""
CHURN_TOKENS = 2500
CHURN_PROMPTS = 5


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    """Engines with few blocks, so that they are soon used again, whose READs need the holder's processor.

    Over shared memory a READ from a stopped process completes by itself.
    """
    return PairPlan(
        kvlease_config={"read_part_s": READ_PART_S, "reading_cap": 0.9},
        arguments=dict.fromkeys(EngineRole, ("--num-gpu-blocks-override", "300")),
        environment={"UCX_TLS": "tcp"},
        router=RouterConfig(
            rate_samples_min=0,
            reservation_s=15.0,
            heartbeat_interval_s=2.0,
            provisional_s=PROVISIONAL_S,
            gap_returns_per_hour=NO_RETURN_IS_WORTH_IT,
        ),
    )


def history(text: str) -> list[dict[str, Any]]:
    """A conversation's first request; every text begins another prompt."""
    return [{"role": "system", "content": f"{text}. {SYSTEM}"}, {"role": "user", "content": FIRST}]


def extended(messages: list[dict[str, Any]], reply: Completion) -> list[dict[str, Any]]:
    """The next request, with a long question."""
    return [
        *messages,
        {"role": "assistant", "content": reply.text},
        {"role": "user", "content": THIRD},
    ]


async def churn(pair: Pair, role: EngineRole) -> None:
    """Lets other requests use every free block of an engine."""
    for _ in range(CHURN_PROMPTS):
        body = {"model": MODEL, "prompt": (uuid.uuid4().hex * 80)[:CHURN_TOKENS], "max_tokens": 1}
        async with pair.session.post(f"{pair.url(role)}/v1/completions", json=body) as response:
            response.raise_for_status()
            await response.read()


async def is_right(pair: Pair, messages: list[dict[str, Any]], turn: Outcome) -> None:
    """A turn that ended well and equals a cold run."""
    assert turn.record["ended"] == "well"
    assert turn.reply.equals(await pair.cold(messages))


async def test_an_expired_lease_is_a_miss_and_its_blocks_serve_others(pair: Pair) -> None:
    short = RouterConfig(
        rate_samples_min=0,
        heartbeat_interval_s=0.5,
        lease_duration_s=2.0,
        provisional_s=2.0,
        gap_floor_s=0.5,
        gap_returns_per_hour=NO_RETURN_IS_WORTH_IT,
    )
    async with pair.another_router(short):
        messages = history("expired")
        first = await pair.turn(messages, "expired")
        held = first.record["lease_id"]
        assert held

        async def is_gone() -> bool:
            return (await pair.gauges(DECODE)).held_blocks == 0

        await eventually(is_gone, "the lease of a silent conversation expires")
        await churn(pair, DECODE)
        again = extended(messages, first.reply)
        second = await pair.turn(again, "expired")
        assert second.path == "recompute"
        assert second.record["reason"] == "lease_expired"
        await is_right(pair, again, second)
    await pair.settles()


async def test_a_read_that_its_stopped_holder_delays_writes_into_no_other_prompt(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = history("met")
    met_reply = (await pair.turn(met, "met")).reply
    await pair.reset_cache(PREFILL)
    # After the pair's first handshake the fence comes soon.
    assert (await pair.turn(extended(met, met_reply), "met")).read_bytes
    messages = history("stopped")
    first = await pair.turn(messages, "stopped")
    again = extended(messages, first.reply)
    await pair.reset_cache(PREFILL)
    before = (await pair.gauges(PREFILL)).counters
    stop_after_read_pin(pair, monkeypatch)
    turn = asyncio.create_task(pair.turn(again, "stopped"))
    try:

        async def is_quarantined() -> bool:
            return (await pair.gauges(PREFILL)).quarantined_blocks > 0

        await eventually(is_quarantined, "the READ from a stopped engine is given up")
        counters = (await pair.gauges(PREFILL)).counters
        assert counters["reads"] == before["reads"] + 1
        assert counters["given_up"] == before["given_up"] + 1

        async def prefill_is_idle() -> bool:
            return await pair.is_idle(PREFILL)

        await eventually(prefill_is_idle, "the prefill leg ends without its READ")
        others = [history(f"other {number}") for number in range(4)]
        meanwhile = [await at_prefill(pair, other) for other in others]
        assert not turn.done()
    finally:
        monkeypatch.undo()
        pair.engine(DECODE).signal_group(signal.SIGCONT)
    late = await turn
    assert late.record["outcome"] == "fence"
    await is_right(pair, again, late)
    for other, reply in zip(others, meanwhile, strict=True):
        cold = await pair.cold(other)
        assert reply.equals(cold)
        assert (await at_prefill(pair, other)).equals(cold)
    await pair.settles(PREFILL)


def stop_after_read_pin(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stops the decode engine between its answer to the next reader's pin and the READ.

    The answer has arrived at the reader's sidecar: nothing bounds how long that takes to pass it on.
    """
    remote_pin = Sidecar.remote_pin

    async def pin_then_stop(sidecar: Sidecar, ask: PinAsk, wait_for_offer_s: float, address: str) -> Any:
        outcome = await remote_pin(sidecar, ask, wait_for_offer_s, address)
        decode = {engine.holder.engine_id for engine in await decode_engines(pair)}
        if isinstance(outcome, Pinned) and ask.holder.engine_id in decode:
            pair.engine(DECODE).signal_group(signal.SIGSTOP)
            await eventually(lambda: is_stopped(pair.engine(DECODE).pid), "the decode engine has stopped")
        return outcome

    monkeypatch.setattr(Sidecar, "remote_pin", pin_then_stop)


async def decode_engines(pair: Pair) -> list[Any]:
    """What is registered as a decode engine."""
    return [engine for engine in await pair.stack.store.list_engines() if engine.role is DECODE]


async def is_stopped(group: int) -> bool:
    """Whether every process of a group is stopped."""
    return all(state in "TtZ" for state in states_of(group))


def states_of(group: int) -> list[str]:
    """The state letter of every process of a group."""
    states: list[str] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            states += [state] * (its_group == str(group))
    return states


async def at_prefill(pair: Pair, messages: list[dict[str, Any]]) -> Completion:
    """A prompt that the prefill engine serves alone, from its own prefix cache where it can."""
    body = {
        "model": MODEL,
        "messages": messages,
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 1,
    }
    reply, _ = await complete(pair.session, pair.url(PREFILL), body)
    return reply


async def test_a_killed_decode_engine_loses_its_leases_and_its_successor_serves(pair: Pair) -> None:
    # An engine that was stopped for long may still be on its way back to its sidecar.
    await eventually(lambda: pair.is_registered(DECODE), "the decode engine is registered")
    messages = history("killed")
    first = await pair.turn(messages, "killed")
    assert first.record["lease_id"]
    engine = pair.engine(DECODE)
    await engine.kill()

    async def is_gone() -> bool:
        return not await pair.is_registered(DECODE)

    await eventually(is_gone, "the record of the killed engine vanishes")
    await engine.start()
    await engine.wait_ready()
    await eventually(lambda: pair.is_registered(DECODE), "the new engine takes the place of the killed one")
    (successor,) = await decode_engines(pair)
    assert successor.holder.engine_id != first.record["decode_engine_id"]
    again = extended(messages, first.reply)
    second = await pair.turn(again, "killed")
    assert second.path == "recompute"
    assert second.record["reason"] == "lease_lost"
    await is_right(pair, again, second)
    third = extended(again, second.reply)
    await pair.reset_cache(PREFILL)
    read = await pair.turn(third, "killed")
    assert read.path == "readback"
    assert read.reused_tokens >= whole_blocks(len(await pair.tokens(again)))
    await is_right(pair, third, read)
    await pair.reset_cache(DECODE)
    await pair.settles()
