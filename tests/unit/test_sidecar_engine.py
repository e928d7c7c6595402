"""What a sidecar believes of an engine follows the connector, in whichever order its threads send."""

import pytest

from kvlease.core.attachment import LeaseOffer
from kvlease.core.holding import HoldEvent
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState, MissReason
from kvlease.core.records import Engine, EngineRole, KvLayout, LeaseRecord
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


@pytest.fixture
def engine(records: Records) -> AttachedEngine:
    layout = KvLayout(32, "float32", 1, 1, 4096, "layout")
    registered = Engine(HOLDER, EngineRole.DECODE, "m", "http://d", "d:1", layout)
    return AttachedEngine(registered, None, records, ManualClock())  # type: ignore[arg-type]


def offer(
    lease_id: int,
    *,
    provisional: bool = True,
    kind: LeaseKind = LeaseKind.CONVERSATION,
    state: LeaseState = LeaseState.HELD,
    epoch: int = 1,
) -> LeaseOffer:
    holder = Holder("e", "boot-1", epoch)
    return LeaseOffer(LeaseRecord(lease_id, kind, state, holder, "t", b"c", 64), 6.0, provisional)


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
