"""What a sidecar believes of an engine follows the connector, in whichever order its threads send."""

import asyncio
from collections.abc import Sequence

import pytest

from kvlease.core.attachment import LeaseOffer
from kvlease.core.holding import HoldEvent, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState, MissReason
from kvlease.core.records import Engine, EngineRole, KvLayout, LeaseRecord, Pinned
from kvlease.sidecar.engine import AttachedEngine
from kvlease.testing.clock import ManualClock

HOLDER = Holder("e", "boot-1", 1)


class Records:
    """Stands for the recorder: what should be in the store."""

    def __init__(self) -> None:
        self.leases: dict[int, LeaseRecord] = {}
        self.epoch = 1

    def put(self, record: LeaseRecord, supersedes: int) -> None:
        self.leases[record.lease_id] = record

    def remove(self, lease_id: int) -> None:
        self.leases.pop(lease_id, None)

    def set_engine(self, engine: Engine) -> None:
        self.epoch = engine.holder.epoch


@pytest.fixture
def records() -> Records:
    return Records()


class Link:
    """Stands for the connector: renews everything, pins everything, notes the order of eviction."""

    def __init__(self) -> None:
        self.orders: list[tuple[int, ...]] = []
        self.known: set[int] | None = None

    async def renew(self, lease_ids: Sequence[int], *_: object) -> dict[int, MissReason]:
        denied = set(lease_ids) - self.known if self.known is not None else ()
        return dict.fromkeys(denied, MissReason.EXPIRED)

    async def pin(self, ask: PinAsk) -> Pinned | MissReason:
        if self.known is not None and ask.lease_id not in self.known:
            return MissReason.UNKNOWN
        return Pinned(ask.holder, 64)

    def order_evictions(self, lease_ids: Sequence[int]) -> None:
        self.orders.append(tuple(lease_ids))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def engine(records: Records, link: Link, clock: ManualClock) -> AttachedEngine:
    layout = KvLayout(32, "float32", 1, 1, 4096, "layout")
    registered = Engine(HOLDER, EngineRole.DECODE, "m", "http://d", "d:1", layout)
    return AttachedEngine(registered, link, records, clock)  # type: ignore[arg-type]


def offer(
    lease_id: int,
    *,
    provisional: bool = True,
    kind: LeaseKind = LeaseKind.CONVERSATION,
    state: LeaseState = LeaseState.HELD,
    epoch: int = 1,
    exclusive_bytes: int = 0,
    supersedes: int = 0,
) -> LeaseOffer:
    holder = Holder("e", "boot-1", epoch)
    record = LeaseRecord(lease_id, kind, state, holder, "t", b"c", 64, exclusive_bytes=exclusive_bytes)
    return LeaseOffer(record, 6.0, provisional, supersedes)


def test_a_confirmation_that_overtakes_its_offer_is_recorded(
    engine: AttachedEngine, records: Records
) -> None:
    engine.apply_events(HOLDER, [HoldEvent(1, LeaseState.HELD, confirmed=True)])
    engine.offer(offer(1))
    assert set(records.leases) == {1}


@pytest.mark.parametrize("state", [LeaseState.EVICTED, LeaseState.DRAINING])
async def test_an_ending_that_overtakes_its_offer_leaves_nothing(
    engine: AttachedEngine, records: Records, state: LeaseState
) -> None:
    engine.apply_events(HOLDER, [HoldEvent(1, state)])
    engine.offer(offer(1, provisional=False))
    assert not records.leases
    assert await engine.release(1, "t", superseded=False) is MissReason.UNKNOWN


def test_a_draining_lease_is_no_longer_recorded(engine: AttachedEngine, records: Records) -> None:
    engine.offer(offer(1, provisional=False))
    engine.apply_events(HOLDER, [HoldEvent(1, LeaseState.READING)])
    assert set(records.leases) == {1}
    engine.apply_events(HOLDER, [HoldEvent(1, LeaseState.DRAINING)])
    assert not records.leases


def test_a_lease_that_is_being_read_when_it_is_offered_is_recorded_as_held(
    engine: AttachedEngine, records: Records
) -> None:
    engine.offer(offer(1, provisional=False, state=LeaseState.READING))
    assert records.leases[1].state is LeaseState.HELD


def test_a_transfer_is_never_recorded(engine: AttachedEngine, records: Records) -> None:
    engine.offer(offer(1, provisional=False, kind=LeaseKind.TRANSFER, state=LeaseState.READING))
    assert not records.leases


def test_the_next_epoch_loses_the_leases_of_the_last_also_without_their_events(
    engine: AttachedEngine, records: Records
) -> None:
    engine.offer(offer(1, provisional=False))
    engine.apply_events(Holder("e", "boot-1", 2), [])
    assert not records.leases
    assert records.epoch == 2
    engine.offer(offer(2, provisional=False, epoch=2))
    assert set(records.leases) == {2}


async def test_the_order_follows_what_leases_free_and_when_they_were_used(
    engine: AttachedEngine, link: Link, clock: ManualClock
) -> None:
    for lease_id, exclusive_bytes in ((1, 4096), (2, 4096), (3, 1024)):
        engine.offer(offer(lease_id, exclusive_bytes=exclusive_bytes))
        clock.advance(1.0)
    await engine.renew([1, 2, 3], 20.0, [], 0.0)
    assert link.orders == [(1, 2, 3)]
    await engine.pin(PinAsk(1, "pin", HOLDER, "t", 30.0), 0.0)
    clock.advance(5.0)
    await engine.renew([1, 2, 3], 20.0, [], 0.0)
    assert link.orders[-1] == (2, 1, 3)


async def test_a_lease_that_is_let_go_comes_first_in_the_next_order(
    engine: AttachedEngine, link: Link, clock: ManualClock
) -> None:
    for lease_id in (1, 2):
        engine.offer(offer(lease_id, exclusive_bytes=4096))
        clock.advance(1.0)
    await engine.renew([1, 2], 20.0, [], 0.0)
    clock.advance(15.0)
    await engine.renew([1], 20.0, [], 0.0)
    assert link.orders == [(1, 2), (2, 1)]


async def test_an_order_that_stays_the_same_is_not_told_again(
    engine: AttachedEngine, link: Link, clock: ManualClock
) -> None:
    engine.offer(offer(1, exclusive_bytes=4096))
    for _ in range(3):
        clock.advance(5.0)
        await engine.renew([1], 20.0, [], 0.0)
    assert link.orders == [(1,)]


async def test_the_gaps_of_conversations_teach_what_is_worth_keeping(
    engine: AttachedEngine, link: Link, clock: ManualClock
) -> None:
    engine.offer(offer(1, exclusive_bytes=4096))
    for lease_id in range(2, 400):
        clock.advance(200.0)
        engine.offer(offer(lease_id, exclusive_bytes=4096, supersedes=lease_id - 1))
        engine.apply_events(HOLDER, [HoldEvent(lease_id - 1, LeaseState.RELEASED)])
    clock.advance(1.0)
    engine.offer(offer(1000, exclusive_bytes=4096))
    await engine.renew([399, 1000], 20.0, [], 0.0)
    assert link.orders[-1] == (1000, 399)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_of_two_that_wait_for_an_offer_one_that_gives_up_costs_the_other_nothing(
    engine: AttachedEngine, link: Link
) -> None:
    link.known = set()
    asks = [PinAsk(1, pin_id, HOLDER, "t", reservation_s=30.0) for pin_id in ("a", "b")]
    gives_up, stays = (
        asyncio.create_task(engine.pin(ask, wait_s)) for ask, wait_s in zip(asks, (0.001, 2.0), strict=True)
    )
    await settle()
    assert await gives_up is MissReason.UNKNOWN
    link.known = {1}
    engine.offer(offer(1))
    assert isinstance(await stays, Pinned)


async def test_pins_that_are_cancelled_while_they_wait_take_no_place_from_later_ones(
    engine: AttachedEngine, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvlease.sidecar.engine.OFFER_WAITERS_MAX", 1)
    link.known = set()
    cancelled = asyncio.create_task(engine.pin(PinAsk(1, "a", HOLDER, "t", reservation_s=30.0), 60.0))
    await settle()
    cancelled.cancel()
    await asyncio.wait([cancelled])
    later = asyncio.create_task(engine.pin(PinAsk(2, "b", HOLDER, "t", reservation_s=30.0), 60.0))
    await settle()
    link.known = {2}
    engine.offer(offer(2))
    assert isinstance(await later, Pinned)


@pytest.mark.parametrize("asked", ["renewed", "pinned"])
async def test_a_lease_that_its_holder_denies_is_no_longer_recorded(
    engine: AttachedEngine, link: Link, records: Records, asked: str
) -> None:
    for lease_id in (1, 2):
        engine.offer(offer(lease_id, provisional=False))
    link.known = {2}
    if asked == "renewed":
        assert await engine.renew((1, 2), 20.0, (), 30.0) == {1: MissReason.EXPIRED}
    else:
        assert await engine.pin(PinAsk(1, "pin", HOLDER, "t", reservation_s=30.0), 0.0) is MissReason.UNKNOWN
    assert set(records.leases) == {2}
