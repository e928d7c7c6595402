"""etcd is away for a whole minute: every turn through it is answered as a cold run would, and all heals after it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.store.etcd_client import EtcdClient
from kvlease.store.keys import ENGINES, LEASES
from stubs.etcd import options_of, stop_threads
from stubs.processes import Conversation, ProcessFleet, process_fleet, until

OUTAGE_S = 60.0
PACE_S = 0.5
"""Between two turns of a conversation: an outage is of interest for its length, not for what it costs."""

ENGINES_RUNNING = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessFleet]:
    async with process_fleet(tmp_path_factory.mktemp("o")) as fleet:
        yield fleet


async def resume(etcd: EmbeddedEtcd) -> None:
    os.kill(etcd.pid, signal.SIGCONT)


async def count(fleet: ProcessFleet, prefix: str) -> int:
    client = EtcdClient(options_of(fleet.etcd))
    try:
        return len((await client.list_prefix(prefix))[0])
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("leave", "come_back"),
    [(EmbeddedEtcd.halt, EmbeddedEtcd.start), (stop_threads, resume)],
    ids=["no process", "a process that hangs"],
)
async def test_a_minute_without_etcd_costs_no_turn_and_leaves_nothing(
    fleet: ProcessFleet,
    leave: Callable[[EmbeddedEtcd], Awaitable[None]],
    come_back: Callable[[EmbeddedEtcd], Awaitable[None]],
) -> None:
    talks = [Conversation(fleet, f"{leave.__name__} {number}") for number in (0, 1)]
    for router, talk in enumerate(talks):
        await talk.turn(router)
        await talk.until_reused(router)
    over = asyncio.Event()

    async def converse(talk: Conversation, router: int) -> int:
        turns = 0
        while not over.is_set():
            await talk.turn(router)  # fails on any answer that is not 200 or not that of a cold run
            turns += 1
            if len(talk.messages) > 12:
                talk.messages.clear()
            await asyncio.sleep(PACE_S)
        return turns

    talking = [asyncio.create_task(converse(talk, router)) for router, talk in enumerate(talks)]
    await leave(fleet.etcd)
    try:
        await asyncio.sleep(OUTAGE_S)
        assert fleet.ended() == {}, fleet.log()
    finally:
        await come_back(fleet.etcd)
    over.set()
    assert min(await asyncio.gather(*talking)) >= 1

    for router, talk in enumerate(talks):
        await talk.until_reused(router)
    await until(lambda: is_count(fleet, ENGINES, ENGINES_RUNNING))
    for talk in talks:
        await fleet.release(talk.name)
    await until(lambda: holds_nothing(fleet))
    await until(lambda: is_count(fleet, LEASES, 0))
    assert fleet.ended() == {}


async def is_count(fleet: ProcessFleet, prefix: str, wanted: int) -> bool:
    return await count(fleet, prefix) == wanted


async def holds_nothing(fleet: ProcessFleet) -> bool:
    return await fleet.held_blocks() == 0
