"""Whatever a body says, and whenever its sender leaves, both engines live and the next turn is right."""

import asyncio
import copy
import json
import random
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from typing import Any, cast

import aiohttp
import pytest
from tests.engine.by_hand import SALT, TENANT, pinned, reading, send
from tests.engine.pair import MODEL, Message, Outcome, Pair, PairPlan, eventually, request_body

from kvlease.core.ids import Holder, lease_id_to_hex
from kvlease.core.lease import LeaseKind
from kvlease.core.records import EngineRole
from kvlease.core.turn import PARAMS_KEY, KeepOrder, ReadOrder, TurnParams
from kvlease.dev.check import FIRST, SECOND, SYSTEM, THIRD
from kvlease.router.config import RouterConfig

pytestmark = pytest.mark.asyncio(loop_scope="module")

PREFILL, DECODE = EngineRole.PREFILL, EngineRole.DECODE
FUZZ_SEED = 20_250_711
FUZZ_BODIES = 80
AT_ONCE = 8
LONG_TOKENS = 4000
UNENCODABLE = "ours: a lone surrogate"
"""vLLM's own front cannot pass it on and answers 500; its engine never sees it."""
NO_SIDECAR = "127.0.0.1:1"
NO_ROUTE = "192.0.2.1:7"


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    """A confirmed lease outlives the module, so that blocks that come back were not kept by one."""
    router = RouterConfig(
        rate_samples_min=0,
        heartbeat_interval_s=2.0,
        provisional_s=15.0,
        lease_duration_s=600.0,
        gap_floor_s=600.0,
    )
    return PairPlan(kvlease_config={"pin_wait_s": 10.0}, router=router)


def prompt(name: str) -> list[Message]:
    """A conversation's first request."""
    return [{"role": "system", "content": f"{name}. {SYSTEM}"}, {"role": "user", "content": FIRST}]


# --- hostile bodies -------------------------------------------------------------------------------------------


def stock_keys(**changed: Any) -> dict[str, Any]:
    """vLLM's own parameters of a remote prefill, as a stock router would send them."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3, 4]],
        "remote_engine_id": "nobody",
        "remote_request_id": "nothing",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        **changed,
    }


def ours(**changed: Any) -> dict[str, Any]:
    """Well-formed orders for nobody, with changes."""
    order = ReadOrder(7, "nobody's pin", LeaseKind.CONVERSATION, Holder("nobody", "boot", 1), NO_SIDECAR)
    keep = KeepOrder(random.Random(repr(changed)).getrandbits(63) + 1, LeaseKind.CONVERSATION, 1.0)
    return {**TurnParams(TENANT, read=order, keep=keep).to_json(), **changed}


def part(name: str, **changed: Any) -> dict[str, Any]:
    """Well-formed orders whose `read` or `keep` has changes."""
    body = ours()
    return {**body, name: {**body[name], **changed}}


STOCK_BODIES: dict[str, Any] = {
    "remote prefill without blocks": {"do_remote_prefill": True},
    "remote prefill": stock_keys(),
    "remote prefill of no block": stock_keys(remote_block_ids=[[]]),
    "remote prefill of huge blocks": stock_keys(remote_block_ids=[[1 << 40, 1 << 62]]),
    "remote prefill of negative blocks": stock_keys(remote_block_ids=[[-1, -(1 << 40)]]),
    "remote prefill of words": stock_keys(remote_block_ids="all of them"),
    "remote prefill from nowhere": stock_keys(remote_host="192.0.2.1", remote_port=1 << 20),
    "remote prefill of many tokens": stock_keys(remote_num_tokens=1 << 40),
    "remote prefill, truthy": stock_keys(do_remote_prefill="yes", tp_size="many"),
    "remote decode": {"do_remote_decode": True, "do_remote_prefill": False},
    "both": {"do_remote_decode": True, "do_remote_prefill": True},
    "stock's request of another": stock_keys(remote_request_id=["a", {"b": None}]),
    "empty": {},
    "deep": {"a": [[[[[[[[[[{"b": {}}]]]]]]]]]]},
}
OUR_BODIES: dict[str, Any] = {
    "null": None,
    "a number": 1,
    "a list": [],
    "a text": "read everything",
    "empty": {},
    "another version": ours(version=99),
    "a version of words": ours(version="1"),
    "true for a version": ours(version=True),
    "no tenant": ours(tenant=None),
    "a long tenant": ours(tenant="t" * 10_000),
    "a lone surrogate": ours(tenant="\ud800"),
    "read is a list": ours(read=[]),
    "keep is a text": ours(keep="all"),
    "an unknown holder at a dead address": ours(),
    "an unknown holder without a route": part("read", sidecar_address=NO_ROUTE),
    "an address that is none": part("read", sidecar_address="not an address"),
    "an address of another scheme": part("read", sidecar_address="unix:/dev/null"),
    "an address with a control character": part("read", sidecar_address="a\x00b:1"),
    "no lease id": part("read", lease_id=""),
    "a lease id of words": part("read", lease_id="zzzzzzzzzzzzzzzz"),
    "a long lease id": part("read", lease_id="f" * 400),
    "a negative epoch": part("read", epoch=-1),
    "a huge epoch": part("read", epoch=1 << 80),
    "an empty pin id": part("read", pin_id=""),
    "another kind": part("read", kind="everything"),
    "a transfer of nobody": part("read", kind="transfer"),
    "a transfer without a pin": part("keep", kind="transfer"),
    "a conversation with a pin": part("keep", pin_id="p"),
    "for no time": part("keep", duration_s=0),
    "for a negative time": part("keep", duration_s=-1e308),
    "for ever": part("keep", duration_s=1e308),
    "for a text": part("keep", duration_s="1"),
    "many chain keys": part("keep", chain_keys=["0" * 16] * 1000),
    "chain keys of numbers": part("keep", chain_keys=[1]),
    "a key of words": part("keep", conversation_key="words"),
    "supersedes nobody": part("keep", supersedes="f" * 16),
    "lease id 0": part("keep", lease_id="0" * 16),
}


def hostile_params(victim: Outcome) -> Iterator[tuple[str, Any]]:
    """Every row of the tables, and those that aim at a lease that is held."""
    for name, body in STOCK_BODIES.items():
        yield f"stock: {name}", body
        yield f"stock with ours: {name}", {**body, PARAMS_KEY: ours()}
    for name, body in OUR_BODIES.items():
        yield f"ours: {name}", {PARAMS_KEY: body}
    lease_id = victim.record["lease_id"]
    other = "0" * 32
    yield "a lease id in use", {PARAMS_KEY: part("keep", lease_id=lease_id)}
    yield (
        "a transfer under a lease id in use",
        {PARAMS_KEY: part("keep", lease_id=lease_id, kind="transfer", pin_id="taken")},
    )
    yield "supersedes another's lease", {PARAMS_KEY: {**part("keep", supersedes=lease_id), "tenant": other}}
    yield "reads another's lease", {PARAMS_KEY: {**part("read", lease_id=lease_id), "tenant": other}}


async def attack(pair: Pair, url: str, params: Any) -> int:
    """Sends a body with these parameters; the status."""
    body = {
        "model": MODEL,
        "prompt": uuid.uuid4().hex * 4,
        "max_tokens": 2,
        "kv_transfer_params": params,
        "cache_salt": SALT,
    }
    headers = {"Content-Type": "application/json"}
    async with pair.session.post(f"{url}/v1/completions", data=json.dumps(body), headers=headers) as response:
        await response.read()
        return response.status


async def attack_all(pair: Pair, attacks: list[tuple[str, str, Any]]) -> None:
    """Sends (what, base URL, parameters) a few at once; none is a fault of the server."""
    at_once = asyncio.Semaphore(AT_ONCE)

    async def one(what: str, url: str, params: Any) -> str:
        async with at_once:
            status = await attack(pair, url, params)
            return f"{what} at {url}: {status}" if status >= 500 and what != UNENCODABLE else ""

    answers = await asyncio.gather(*(one(*row) for row in attacks))
    assert [answer for answer in answers if answer] == []


async def serves_as_before(pair: Pair, messages: list[Message], victim: str, reply: str) -> None:
    """The victim's lease was not touched, and its next turn reads it back and is right."""
    # A hostile transfer is pinned for a second, and a reset frees no pinned block.
    await pair.settles(PREFILL)
    await pair.reset_cache(PREFILL)
    question = {"role": "user", "content": THIRD}
    again = [*messages, {"role": "assistant", "content": reply}, question]
    turn = await pair.turn(again, victim)
    assert (turn.path, turn.record["outcome"]) == ("readback", "read")
    assert turn.reply.equals(await pair.cold(again))


async def test_no_parameters_that_reach_an_engine_kill_it_or_touch_a_lease(pair: Pair) -> None:
    messages = prompt("victim")
    victim = await pair.turn(messages, "victim")
    rows = list(hostile_params(victim))
    urls = (pair.url(PREFILL), pair.url(DECODE))
    await attack_all(pair, [(what, url, params) for what, params in rows for url in urls])
    await attack_all(pair, [(what, pair.stack.router_url, params) for what, params in rows[::4]])
    await serves_as_before(pair, messages, "victim", victim.reply.text)


async def test_parameters_changed_at_random_kill_no_engine(pair: Pair) -> None:
    messages = prompt("fuzz")
    victim = await pair.turn(messages, "fuzz")
    dice = random.Random(FUZZ_SEED)
    rows = [params for _, params in hostile_params(victim)]
    urls = (pair.url(PREFILL), pair.url(DECODE))
    attacks = [
        (f"body {number} of seed {FUZZ_SEED}", urls[number % 2], mutated(dice, dice.choice(rows)))
        for number in range(FUZZ_BODIES)
    ]
    await attack_all(pair, attacks)
    await serves_as_before(pair, messages, "fuzz", victim.reply.text)


VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 70,
    1e300,
    "",
    "x" * 600,
    "\u0000",
    "ffffffffffffffff",
    [],
    {},
    [[0]],
)


def mutated(dice: random.Random, value: Any) -> Any:
    """A copy of a JSON value in which one to three places are changed, removed or added."""
    root = {"root": copy.deepcopy(value)}
    for _ in range(dice.randint(1, 3)):
        place, key = dice.choice(list(places(root)))
        change = dice.random()
        if change < 0.2 and place is not root:
            del place[key]
        elif change < 0.3 and isinstance(place, dict):
            place[dice.choice(("read", "keep", "kvlease", "do_remote_prefill"))] = dice.choice(VALUES)
        else:
            place[key] = copy.deepcopy(dice.choice(VALUES))
    return root["root"]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container with every key or index in it."""
    container = cast(dict[Any, Any] | list[Any], value)
    for key in list(container if isinstance(container, dict) else range(len(container))):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


async def test_two_requests_may_share_a_pin_and_a_pin_id_serves_no_second_lease(pair: Pair) -> None:
    messages, others = prompt("shared pin"), prompt("other lease")
    first, other = await pair.turn(messages, "shared pin"), await pair.turn(others, "other lease")
    again = [
        *messages,
        {"role": "assistant", "content": first.reply.text},
        {"role": "user", "content": SECOND},
    ]
    await pair.reset_cache(PREFILL)
    async with pinned(pair, first, "one pin") as order:
        both = await asyncio.gather(*(send(pair, PREFILL, again, reading(order)) for _ in range(2)))
    async with pinned(pair, first, "one pin") as order:
        stolen = {**reading(order)[PARAMS_KEY]["read"], "lease_id": other.record["lease_id"]}
        params = {PARAMS_KEY: {**reading(order)[PARAMS_KEY], "read": stolen}}
        third = await send(pair, PREFILL, others, params)
    cold = await pair.cold(again)
    assert all(reply.equals(cold) for reply in both)
    assert third.equals(await pair.cold(others))
    assert lease_id_to_hex(order.lease_id) == first.record["lease_id"]


# --- clients that leave ---------------------------------------------------------------------------------------


async def leave_after(pair: Pair, name: str, seconds: float, *, stream: bool) -> None:
    """A client that closes its connection after a while, whatever came until then."""
    body = {**request_body(prompt(name), stream=stream), "conversation_id": name}
    url = f"{pair.stack.router_url}/v1/chat/completions"
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds), pair.session.post(url, json=body) as response:
            await response.read()


async def leave_when(pair: Pair, name: str, *, events: int = 0, finished: bool = False) -> None:
    """A client that closes its connection after some events, or when it knows how the turn finished.

    One that leaves midway leaves an answer that goes on for long: however late that is noticed, it has not ended.
    """
    tokens = 200 if finished else LONG_TOKENS
    body = {**request_body(prompt(name), max_tokens=tokens, ignore_eos=not finished), "conversation_id": name}
    url = f"{pair.stack.router_url}/v1/chat/completions"
    async with pair.session.post(url, json=body) as response:
        async with aclosing(stream_events(response)) as stream:
            seen = 0
            async for event in stream:
                seen += 1
                done = any(choice.get("finish_reason") for choice in event.get("choices", ()))
                if done if finished else seen == events:
                    break
        response.close()


async def stream_events(response: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON events of a stream."""
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


async def turn_seconds(pair: Pair) -> float:
    """How long a turn takes here and today, to spread the clients over its phases."""
    began_s = time.monotonic()
    await pair.turn(prompt("measured"), "measured")
    return time.monotonic() - began_s


async def ended(pair: Pair, name: str) -> str:
    """How the router says that a conversation's turn ended."""
    endings: list[str] = []

    async def has_ended() -> bool:
        endings.append((await pair.conversation(name))["turns"][-1]["ended"])
        return endings[-1] != ""

    await eventually(has_ended, f"the turn of {name} ends")
    return endings[-1]


async def test_twenty_clients_that_leave_in_all_phases_of_a_turn_leave_nothing_behind(pair: Pair) -> None:
    seconds = await turn_seconds(pair)
    await pair.reset_cache(DECODE)
    await pair.settles()
    early = [f"early {number}" for number in range(8)]
    for number, name in enumerate(early):
        await leave_after(pair, name, 0.9 * seconds * number / len(early), stream=number % 2 == 0)
    midway = [f"midway {number}" for number in range(8)]
    await asyncio.gather(*(leave_when(pair, name, events=1 + 5 * n) for n, name in enumerate(midway)))
    assert {await ended(pair, name) for name in midway} == {"aborted"}
    # Confirmed leases are renewed for longer than anybody waits here: no turn that was left is kept.
    await drop_leases_of_finished(pair, early)
    await pair.settles()
    late = [f"late {number}" for number in range(4)]
    await asyncio.gather(*(leave_when(pair, name, finished=True) for name in late))

    async def nothing_runs() -> bool:
        gauges = await pair.gauges(DECODE)
        return await pair.is_idle(PREFILL) and await pair.is_idle(DECODE) and not gauges.reading_blocks

    await eventually(nothing_runs, "clients that leave at the end leave no request and no pin")
    await pair.reset_cache(DECODE)
    await pair.settles()
    assert (await pair.turn(prompt("after"), "after")).reply.equals(await pair.cold(prompt("after")))


async def was_begun(pair: Pair, name: str) -> bool:
    """Whether the router saw a client's request before the client left."""
    url = f"{pair.stack.router_url}/v1/kvlease/conversations/{name}"
    async with pair.session.get(url) as response:
        return response.status == 200


async def drop_leases_of_finished(pair: Pair, names: list[str]) -> None:
    """A turn that was faster than its client's leaving has a lease by right: ends those."""
    finished = [name for name in names if await was_begun(pair, name) and await ended(pair, name) == "well"]
    if finished:
        await pair.reset_cache(DECODE)
