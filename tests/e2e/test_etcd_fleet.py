"""Whatever dies or goes away, a turn is answered as a cold run would, no process ends, and reuse comes back."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvlease.core.errors import StoreUnavailable
from kvlease.store.etcd_client import EtcdClient
from kvlease.store.keys import ENGINES, LEASES
from stubs.etcd import etcdctl, options_of, put_many
from stubs.processes import Conversation, ProcessFleet, process_fleet, until

QUOTA_BYTES = 16 << 20
ENGINES_RUNNING = 2

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessFleet]:
    async with process_fleet(
        tmp_path_factory.mktemp("f"), "--quota-backend-bytes", str(QUOTA_BYTES)
    ) as fleet:
        yield fleet


async def test_a_conversation_goes_on_at_another_router_over_another_registry(fleet: ProcessFleet) -> None:
    talk = Conversation(fleet, "two routers")
    await talk.turn(router=0)
    await talk.until_reused(router=1)
    await fleet.kill("registry-1")
    assert (await talk.turn(router=1)).reused
    await talk.until_reused(router=0)
    await fleet.start("registry-1")

    await fleet.until_led(talk.name)
    await fleet.kill("router-0")
    assert (await talk.turn(router=1)).reused
    await fleet.start("router-0")
    await fleet.until_serving()
    await talk.until_reused(router=0)
    assert fleet.ended() == {}


@pytest.mark.parametrize(
    "victims",
    [("sidecar-d",), ("engine-d",), ("sidecar-d", "engine-d"), ("engine-p", "sidecar-p")],
    ids=" and ".join,
)
async def test_engines_and_sidecars_may_die_and_come_back_at_their_addresses(
    fleet: ProcessFleet, victims: tuple[str, ...]
) -> None:
    talk = Conversation(fleet, "killed " + " ".join(victims))
    await talk.turn()
    await talk.until_reused()
    await fleet.kill(*victims)
    for name in victims:
        if name.startswith("sidecar"):
            fleet.socket_of(name).unlink(missing_ok=True)  # so that the next one is waited for
    await fleet.start(*victims)
    await fleet.until_serving()
    await talk.until_reused()
    assert fleet.ended() == {}


async def test_a_session_revoked_under_healthy_processes_is_opened_again(fleet: ProcessFleet) -> None:
    talk = Conversation(fleet, "revoked")
    await talk.turn()
    client = EtcdClient(options_of(fleet.etcd))
    try:

        async def only_the_living_are_registered() -> bool:
            found, _ = await client.list_prefix(ENGINES)
            return len(found) == ENGINES_RUNNING

        # What was killed by tests before this one stays registered until its session has expired.
        await until(only_the_living_are_registered)
        engines, _ = await client.list_prefix(ENGINES)
        for engine in engines:
            await client.revoke(engine.lease)
        for _ in range(3):
            await talk.turn()
        await until(only_the_living_are_registered)
    finally:
        await client.close()
    await talk.until_reused()
    assert fleet.ended() == {}


async def test_etcd_restarts_again_and_again_under_turns(fleet: ProcessFleet) -> None:
    talks = [Conversation(fleet, f"etcd {number}") for number in (0, 1)]
    over = asyncio.Event()

    async def converse(talk: Conversation, router: int) -> int:
        turns = 0
        while not over.is_set():
            await talk.turn(router)
            turns += 1
            if len(talk.messages) > 12:
                talk.messages.clear()
        return turns

    talking = [asyncio.create_task(converse(talk, router)) for router, talk in enumerate(talks)]
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        await asyncio.sleep(1.0)
        await fleet.etcd.halt(number)
        await asyncio.sleep(1.0)
        await fleet.etcd.start()
    over.set()
    assert min(await asyncio.gather(*talking)) >= 1
    for router, talk in enumerate(talks):
        await talk.until_reused(router)
    assert fleet.ended() == {}


async def fill(fleet: ProcessFleet) -> None:
    """Writes until etcd refuses to."""
    client = EtcdClient(options_of(fleet.etcd))
    session = await client.grant(600)
    try:
        with pytest.raises(StoreUnavailable, match="space exceeded"):
            await put_for_ever(client, session)
    finally:
        await client.close()


async def put_for_ever(client: EtcdClient, session: int) -> None:
    for number in itertools.count():
        await put_many(client, {f"/filler/{number % 8}": b"x" * 500_000}, session)


async def make_room(fleet: ProcessFleet) -> None:
    """What docs/operations.md says to do."""
    revision = (await etcdctl(fleet.etcd, "endpoint", "status"))[0]["Status"]["header"]["revision"]
    await etcdctl(fleet.etcd, "compaction", "--physical", str(revision))
    await etcdctl(fleet.etcd, "defrag")
    await etcdctl(fleet.etcd, "alarm", "disarm")


async def test_an_etcd_that_takes_no_more_writes_costs_no_turn(fleet: ProcessFleet) -> None:
    talk = Conversation(fleet, "no space")
    await talk.turn()
    await fill(fleet)
    for _ in range(3):
        await talk.turn()
    await make_room(fleet)
    await talk.until_reused()

    async def recorded() -> bool:
        client = EtcdClient(options_of(fleet.etcd))
        try:
            return len((await client.list_prefix(LEASES))[0]) > 0
        finally:
            await client.close()

    await until(recorded)
    assert fleet.ended() == {}


async def test_after_all_that_every_block_comes_back(fleet: ProcessFleet) -> None:
    talk = Conversation(fleet, "last")
    await talk.turn()
    await talk.until_reused()

    async def something_held() -> bool:
        return await fleet.held_blocks() > 0

    await until(something_held)
    for name in fleet.conversations:
        await fleet.release(name)

    async def nothing_held() -> bool:
        return await fleet.held_blocks() == 0

    await until(nothing_held)
