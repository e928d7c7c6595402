"""The orders and reports in `kv_transfer_params`: nothing odd in a body gets further than a refusal."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.core.digests import ChainRoot
from kvlease.core.errors import InvalidArgument
from kvlease.core.ids import Holder, lease_id_from_hex, lease_id_to_hex
from kvlease.core.lease import LeaseKind
from kvlease.core.turn import KeepOrder, ReadOrder, TurnParams, TurnReport

LEASE_IDS = st.integers(1, 2**64 - 1)
FILLED = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=64)
READS = st.builds(
    ReadOrder,
    lease_id=LEASE_IDS,
    pin_id=FILLED,
    kind=st.sampled_from(LeaseKind),
    holder=st.builds(Holder, FILLED, FILLED, st.integers(0, 2**63 - 1)),
    sidecar_address=FILLED,
)
DURATIONS = st.floats(min_value=0, max_value=86_399, exclude_min=True)
KEYS = st.lists(LEASE_IDS, max_size=16).map(tuple)
KEEPS = st.builds(
    KeepOrder,
    lease_id=LEASE_IDS,
    kind=st.just(LeaseKind.TRANSFER),
    duration_s=DURATIONS,
    pin_id=FILLED,
) | st.builds(
    KeepOrder,
    lease_id=LEASE_IDS,
    kind=st.just(LeaseKind.CONVERSATION),
    duration_s=DURATIONS,
    conversation_key=st.binary(max_size=32),
    chain_keys=KEYS,
    supersedes=st.just(0) | LEASE_IDS,
)
PARAMS = st.builds(TurnParams, tenant=FILLED, read=st.none() | READS, keep=st.none() | KEEPS)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
EXAMPLE = TurnParams(
    tenant="t",
    read=ReadOrder(1, "pin", LeaseKind.CONVERSATION, Holder("e", "b", 1), "host:1"),
    keep=KeepOrder(2, LeaseKind.CONVERSATION, 6.0, "", b"\x01\x02", (3, 4), 1),
).to_json()
PLACES = [
    *(("", key) for key in EXAMPLE),
    *(("read", key) for key in EXAMPLE["read"]),
    *(("keep", key) for key in EXAMPLE["keep"]),
]


def copy_of(value: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(value))
    return copied


@given(params=PARAMS)
def test_orders_survive_the_way_through_json(params: TurnParams) -> None:
    assert TurnParams.from_json(json.loads(json.dumps(params.to_json()))) == params


@given(
    report=st.builds(
        TurnReport,
        *(st.integers(0, 2**40) for _ in range(4)),
        outcome=st.sampled_from(["none", "read", "fence"]),
        kept_tokens=st.integers(0, 2**40),
    )
)
def test_reports_survive_the_way_through_json(report: TurnReport) -> None:
    assert TurnReport.from_json(json.loads(json.dumps(report.to_json()))) == report


@given(value=JSON_VALUES)
def test_no_value_does_more_than_be_refused(value: object) -> None:
    with pytest.raises(InvalidArgument):
        TurnParams.from_json(value)
    with pytest.raises(InvalidArgument):
        TurnReport.from_json(value)


@pytest.mark.parametrize(("part", "key"), PLACES)
@given(
    value=JSON_VALUES
    | st.sampled_from([-1, 0, 10**30, float("nan"), float("inf"), "", "0x00000000000001", [0]])
)
def test_one_odd_value_anywhere_is_refused_or_usable(part: str, key: str, value: object) -> None:
    body = copy_of(EXAMPLE)
    (body[part] if part else body)[key] = value
    try:
        params = TurnParams.from_json(body)
    except InvalidArgument:
        return
    ChainRoot(params.tenant, "model").key()
    again = TurnParams.from_json(json.loads(json.dumps(params.to_json())))
    assert again == params
    if params.read is not None:
        assert 0 <= params.read.holder.epoch < 2**63
        params.read.pin_id.encode()


@pytest.mark.parametrize(
    ("part", "key"), [place for place in PLACES if place not in {("", "read"), ("", "keep")}]
)
def test_no_key_may_be_missing(part: str, key: str) -> None:
    body = copy_of(EXAMPLE)
    del (body[part] if part else body)[key]
    with pytest.raises(InvalidArgument):
        TurnParams.from_json(body)


@pytest.mark.parametrize("version", [0, 2, "1", None, True, 1.5])
def test_another_version_is_refused(version: object) -> None:
    with pytest.raises(InvalidArgument):
        TurnParams.from_json({**EXAMPLE, "version": version})


@pytest.mark.parametrize(
    "text",
    ["", "0" * 16, "1", "0x00000000000001", "+000000000000001", "0000_0000_0000_1", " 00000000000001 ",
     "g" * 16, "1" * 17, "\N{ARABIC-INDIC DIGIT ONE}" * 16],
)  # fmt: skip
def test_a_lease_id_is_16_hex_digits_and_nothing_else(text: str) -> None:
    with pytest.raises(InvalidArgument):
        lease_id_from_hex(text)


@given(lease_id=LEASE_IDS)
def test_a_lease_id_survives_its_hex(lease_id: int) -> None:
    assert lease_id_from_hex(lease_id_to_hex(lease_id)) == lease_id


def test_a_transfer_is_kept_under_a_pin_and_a_conversation_is_not() -> None:
    for kind, pin_id in (("transfer", ""), ("conversation", "x")):
        body = copy_of(EXAMPLE)
        body["keep"] |= {"kind": kind, "pin_id": pin_id}
        with pytest.raises(InvalidArgument):
            TurnParams.from_json(body)


@pytest.mark.parametrize("keys", [["0000000000000001"] * 17, "0000000000000001", None, [1234567890123456]])
def test_chain_keys_are_at_most_16_ids_in_hex(keys: object) -> None:
    body = copy_of(EXAMPLE)
    body["keep"]["chain_keys"] = keys
    with pytest.raises(InvalidArgument):
        TurnParams.from_json(body)
