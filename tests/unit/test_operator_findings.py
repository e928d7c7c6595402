"""What the doctor makes of what it found."""

from dataclasses import replace
from typing import Any

import pytest

from kvlease import __version__
from kvlease.core import details
from kvlease.core.ids import Holder
from kvlease.core.records import Engine, EngineRole, HolderGauges, KvLayout, KvLocation
from kvlease.operator.findings import (
    EngineFindings,
    EtcdFindings,
    Verdict,
    judge_etcd,
    judge_fleet,
)

LAYOUT = KvLayout(128, "bfloat16", 1, 1, 4096, "layout")
GAUGES = HolderGauges(total_blocks=100, free_blocks=100)
VERSION_MIN = (3, 5, 23)


def engine(role: EngineRole, told: dict[str, str] | None = None, **changes: Any) -> Engine:
    settings: dict[str, Any] = {
        "holder": Holder(role.value, "boot"),
        "role": role,
        "model": "m",
        "url": "http://10.0.0.1:8000",
        "sidecar_address": "10.0.0.1:7720",
        "layout": LAYOUT,
        "vllm_version": "0.32.0",
        "location": KvLocation("10.0.0.1", 5600),
        "details": {details.NIXL_BACKENDS: "UCX", **(told or {})},
    }
    return Engine(**{**settings, **changes})


def looked(
    prefill: Engine | None = None, decode: Engine | None = None, gauges: HolderGauges | None = GAUGES
) -> list[EngineFindings]:
    engines = [prefill or engine(EngineRole.PREFILL), decode or engine(EngineRole.DECODE)]
    return [EngineFindings(one, gauges, True, True) for one in engines]


def checks(found: list[EngineFindings], verdict: Verdict) -> dict[str, str]:
    return {finding.check: finding.text for finding in judge_fleet(found) if finding.verdict is verdict}


def problems(decode: Engine, gauges: HolderGauges | None = GAUGES) -> dict[str, str]:
    return checks(looked(decode=decode, gauges=gauges), Verdict.PROBLEM)


def test_a_fleet_in_which_all_is_well_has_neither_problem_nor_advice() -> None:
    found = looked()
    assert checks(found, Verdict.PROBLEM) == {}
    assert checks(found, Verdict.ADVICE) == {}
    assert {"roles", "layout", "versions", "nixl_backend", "side_channel"} <= set(checks(found, Verdict.OK))


def test_without_a_decode_engine_nobody_serves() -> None:
    assert "roles" in checks([], Verdict.PROBLEM)


@pytest.mark.parametrize(
    ("role", "verdict"), [(EngineRole.DECODE, Verdict.PROBLEM), (EngineRole.PREFILL, Verdict.ADVICE)]
)
def test_a_role_whose_engines_are_all_drained_is_told(role: EngineRole, verdict: Verdict) -> None:
    drained = engine(role, draining=True)
    alone = looked(**{role.value: drained})
    assert f"every {role.value} engine is draining (1)" in checks(alone, verdict)["roles"]
    other = EngineFindings(engine(role, holder=Holder("other", "boot")), GAUGES, True, True)
    assert "roles" not in checks([*alone, other], verdict)


def test_engines_of_different_layouts_are_told_with_what_differs() -> None:
    other = replace(LAYOUT, layout_hash="other", block_size=16)
    decode = engine(EngineRole.DECODE, layout=other)
    assert "block_size 16 and 128" in problems(decode)["layout"]


def test_engines_of_different_vllm_versions_are_an_advice() -> None:
    found = looked(decode=engine(EngineRole.DECODE, vllm_version="0.26.0"))
    assert "0.26.0, 0.32.0" in checks(found, Verdict.ADVICE)["versions"]


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"retain": False, "retain_refusal": "sliding window"}, "retention"),
        ({"prefix_caching": False}, "prefix_caching"),
        ({"location": KvLocation("127.0.0.1", 5600)}, "side_channel"),
    ],
)
def test_what_keeps_an_engine_from_being_reused_is_a_problem(change: dict[str, Any], check: str) -> None:
    assert check in problems(engine(EngineRole.DECODE, **change))


def test_a_side_channel_on_loopback_is_well_where_everything_is() -> None:
    here = {"location": KvLocation("127.0.0.1", 5600), "sidecar_address": "127.0.0.1:7720"}
    assert problems(engine(EngineRole.DECODE, **here)) == {}


def test_an_engine_that_does_not_answer_is_a_problem() -> None:
    assert "connector" in problems(engine(EngineRole.DECODE), None)


@pytest.mark.parametrize(("handles", "well"), [(0, False), (4, True)])
def test_libfabric_without_an_open_device_moves_kv_over_sockets(handles: int, well: bool) -> None:
    told = {details.NIXL_BACKENDS: "LIBFABRIC"}
    found = looked(
        engine(EngineRole.PREFILL, told),
        engine(EngineRole.DECODE, told),
        replace(GAUGES, counters={details.FABRIC_HANDLES: handles}),
    )
    assert ("nixl_backend" in checks(found, Verdict.OK)) is well
    assert ("nixl_backend" in checks(found, Verdict.PROBLEM)) is not well


def test_engines_of_different_backends_are_a_problem() -> None:
    decode = engine(EngineRole.DECODE, {details.NIXL_BACKENDS: "LIBFABRIC"})
    assert "different NIXL backends" in problems(decode)["nixl_backend"]


def test_small_blocks_on_a_gpu_are_an_advice_and_on_a_cpu_none() -> None:
    small = replace(LAYOUT, block_size=16)
    for device, advised in (("cuda", True), ("cpu", False)):
        decode = engine(EngineRole.DECODE, {details.DEVICE: device}, layout=small)
        assert ("block_size" in checks(looked(decode=decode), Verdict.ADVICE)) is advised


def test_engines_that_take_prompts_of_different_lengths_are_an_advice() -> None:
    found = looked(
        engine(EngineRole.PREFILL, {details.MODEL_LENGTH_MAX: "131072"}),
        engine(EngineRole.DECODE, {details.MODEL_LENGTH_MAX: "32768"}),
    )
    assert "32768, 131072" in checks(found, Verdict.ADVICE)["settings"]


def test_the_settings_of_each_cache_are_told() -> None:
    told = {details.CACHE_DTYPE: "fp8", details.RETENTION_BUDGET: "0.5"}
    found = looked(decode=engine(EngineRole.DECODE, told, total_blocks=1 << 20))
    text = checks(found, Verdict.OK)["settings"]
    assert text == "1048576 blocks of 128 tokens (4.0 GiB), cache dtype fp8, 0.5 of them for leases"


def test_many_quarantined_blocks_are_a_problem() -> None:
    gauges = replace(GAUGES, quarantined_blocks=11)
    assert "quarantine" in problems(engine(EngineRole.DECODE), gauges)


def test_a_connector_of_another_version_is_an_advice() -> None:
    own = engine(EngineRole.DECODE, {details.CONNECTOR_VERSION: __version__})
    other = engine(EngineRole.DECODE, {details.CONNECTOR_VERSION: "0.0.1"})
    assert "versions" not in checks(looked(decode=own), Verdict.ADVICE)
    assert "0.0.1" in checks(looked(decode=other), Verdict.ADVICE)["versions"]


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (EtcdFindings("e:1", "3.5.23", 10), None),
        (EtcdFindings("e:1", "3.5.22", 10), None),
        (EtcdFindings("e:1", "3.6.0", 90, 100), "etcd_quota"),
        (EtcdFindings("e:1", "3.6.0", 10, 100, ("alarm:NOSPACE",)), "etcd_alarm"),
        (EtcdFindings("e:1", failure="no answer"), "etcd"),
    ],
)
def test_etcd_is_judged_by_version_room_and_alarms(found: EtcdFindings, problem: str | None) -> None:
    seen = [one.check for one in judge_etcd(found, VERSION_MIN) if one.verdict is Verdict.PROBLEM]
    assert seen == ([problem] if problem else [])


def test_an_etcd_that_is_too_old_is_an_advice_since_services_refuse_it_themselves() -> None:
    found = {one.check: one for one in judge_etcd(EtcdFindings("e:1", "3.5.1", 10), VERSION_MIN)}
    assert found["etcd_version"].verdict is Verdict.ADVICE
    assert "before 3.5.23" in found["etcd_version"].text
    assert "--etcd-accept-old" in found["etcd_version"].text
