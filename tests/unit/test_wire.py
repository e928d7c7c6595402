"""What crosses a process comes back the same; what makes no sense is refused."""

import subprocess
import sys

import pytest

from kvlease.core.attachment import EngineFacts, LeaseOffer
from kvlease.core.errors import InvalidArgument, VersionMismatch
from kvlease.core.holding import HoldEvent, PinAsk
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind, LeaseState, MissReason
from kvlease.core.records import BlockList, Engine, EngineRole, KvLayout, KvLocation, LeaseRecord, Pinned
from kvlease.v1 import lease_pb2
from kvlease.wire import engines, leases, values

HOLDER = Holder("engine-1", "boot-1", 3)
LAYOUT = KvLayout(32, "float32", 1, 2, 65_536, "layout-hash")
LOCATION = KvLocation("10.0.0.7", 5600, 1, 2, {"remote_notify_port": "7", "empty": ""})
RECORD = LeaseRecord(
    lease_id=(1 << 64) - 1,
    kind=LeaseKind.CONVERSATION,
    state=LeaseState.READING,
    holder=HOLDER,
    tenant="ab12",
    conversation_key=b"\x00\xff",
    tokens=128,
    generation=7,
    exclusive_bytes=1 << 40,
    model="m",
    lora="l",
    layout_hash="layout-hash",
    chain_keys=(1, (1 << 64) - 1),
)
OFFER = LeaseOffer(RECORD, 5.5, True, 9, ("pin-1", "pin-2"))
FACTS = EngineFacts(
    HOLDER, "m", LAYOUT, LOCATION, "0.32.0", 1, 90, False, False, "sliding window", {"device": "cpu"}
)


def test_a_lease_record_comes_back_the_same() -> None:
    assert leases.lease_from_wire(leases.lease_to_wire(RECORD)) == RECORD


def test_an_engine_comes_back_the_same() -> None:
    engine = Engine(
        HOLDER,
        EngineRole.DECODE,
        "m",
        "http://d:8000",
        "d:9000",
        LAYOUT,
        "0.32.0",
        1,
        90,
        False,
        False,
        "why",
        draining=True,
        location=LOCATION,
        details={"nixl_backends": "UCX"},
    )
    assert engines.engine_from_wire(engines.engine_to_wire(engine)) == engine


def test_a_hello_with_its_holds_comes_back_the_same() -> None:
    assert engines.hello_from_wire(engines.hello_to_wire(FACTS, [OFFER])) == (FACTS, (OFFER,))


def test_a_hello_of_another_protocol_version_is_refused() -> None:
    message = engines.hello_to_wire(FACTS, [])
    message.protocol_version += 1
    with pytest.raises(VersionMismatch):
        engines.hello_from_wire(message)


def test_lease_events_come_back_in_order() -> None:
    events = [HoldEvent(1, LeaseState.HELD, confirmed=True), HoldEvent(1, LeaseState.EXPIRED)]
    assert engines.events_from_wire(engines.events_to_wire(HOLDER, events)) == (HOLDER, events)


def test_misses_come_back_with_their_reasons() -> None:
    misses = {1: MissReason.EXPIRED, 2: MissReason.LOST}
    assert engines.misses_from_wire(engines.misses_to_wire(misses)) == misses


@pytest.mark.parametrize(
    "ask",
    [
        PinAsk(5, "pin", HOLDER, "t", reservation_s=30.0),
        PinAsk(5, "pin", HOLDER, "t", read_part_s=10.25),
        PinAsk(5, "pin", HOLDER, "t", reservation_s=30.0, read_part_s=60.0),
    ],
)
def test_a_pin_comes_back_the_same(ask: PinAsk) -> None:
    assert leases.pin_from_wire(leases.pin_to_wire(ask, 0.02)) == (ask, pytest.approx(0.02))


def test_a_pin_without_any_part_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="reservation or a read part"):
        leases.pin_from_wire(leases.pin_to_wire(PinAsk(5, "pin", HOLDER, "t")))


BLOCKS = BlockList((4, 2, 9), b"d" * 32, 70, b"t" * 16)


@pytest.mark.parametrize(
    "outcome",
    [
        Pinned(HOLDER, 70, "layout-hash", BLOCKS, LOCATION),
        Pinned(HOLDER, 70),
        *MissReason,
    ],
)
def test_the_outcome_of_a_pin_comes_back_the_same(outcome: Pinned | MissReason) -> None:
    assert leases.outcome_from_wire(leases.outcome_to_wire(outcome)) == outcome


def test_blocks_whose_digests_do_not_fit_are_refused() -> None:
    message = leases.blocks_to_wire(BLOCKS)
    message.block_ids.append(1)
    with pytest.raises(InvalidArgument, match="do not fit"):
        leases.blocks_from_wire(message)


def test_a_pin_result_that_says_nothing_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        leases.outcome_from_wire(lease_pb2.PinResult())


@pytest.mark.parametrize("read", [values.kind_from_wire, values.state_from_wire, values.role_from_wire])
@pytest.mark.parametrize("number", [0, 99])
def test_an_unspecified_or_unknown_enum_value_is_refused(read: object, number: int) -> None:
    assert callable(read)
    with pytest.raises(InvalidArgument):
        read(number)


def test_every_value_of_every_enum_has_a_number() -> None:
    assert all(values.kind_from_wire(values.kind_to_wire(kind)) is kind for kind in LeaseKind)
    assert all(values.role_from_wire(values.role_to_wire(role)) is role for role in EngineRole)
    assert all(values.miss_from_wire(values.miss_to_wire(miss)) is miss for miss in MissReason)
    crossing = [state for state in LeaseState if state is not LeaseState.NONE]
    assert all(values.state_from_wire(values.state_to_wire(state)) is state for state in crossing)


def test_a_miss_reason_of_a_later_version_is_still_a_miss() -> None:
    assert values.miss_from_wire(99) is MissReason.UNKNOWN
    assert values.miss_from_wire(0) is None


@pytest.mark.parametrize("seconds", [0.0, 0.02, 1.999999999, 1800.0])
def test_a_duration_comes_back_to_the_nanosecond(seconds: float) -> None:
    assert values.duration_from_wire(values.duration_to_wire(seconds)) == pytest.approx(seconds, abs=1e-9)


@pytest.mark.parametrize("seconds", [-0.001, -5.0, 86_400.0])
def test_a_negative_or_day_long_duration_is_refused(seconds: float) -> None:
    with pytest.raises(InvalidArgument):
        values.duration_from_wire(values.duration_to_wire(seconds))


def test_the_connectors_part_needs_no_package_beyond_grpcio_and_protobuf() -> None:
    program = (
        "import sys; import kvlease.wire.engines, kvlease.wire.leases; "
        "sys.exit(any(name in sys.modules for name in ('google.rpc', 'grpc_status', 'aiohttp')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
