"""Settings, quarantine, notes and digests of the connector."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from tests.connector.fake_pool import FakePool

from kvlease.core.digests import ChainRoot
from kvlease.core.errors import InvalidArgument
from kvlease_vllm.block_layout import layout_factors, pack_layers, prefer_layers_together
from kvlease_vllm.chain import can_verify, request_chain, request_root
from kvlease_vllm.notifications import drop_own_notifications
from kvlease_vllm.quarantine import Quarantine
from kvlease_vllm.settings import ConnectorSettings

ROOT = ChainRoot("tenant", "model")


def request(tokens: int = 12, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "_all_token_ids": list(range(tokens)),
        "prompt_token_ids": list(range(tokens)),
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**{**values, **changes})


def image(offset: int, length: int, identifier: str) -> Any:
    return SimpleNamespace(mm_position=SimpleNamespace(offset=offset, length=length), identifier=identifier)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({}, "socket_dir"),
        ({"socket_dir": "x", "budget": 1}, "budget"),
        ({"socket_dir": "x", "retention_budget": 1.5}, r"retention_budget.*1\.5"),
        ({"socket_dir": "x", "tenant_share": 0.0}, r"tenant_share.*0\.0"),
        ({"socket_dir": "x", "tenant_leases_max": 0}, r"tenant_leases_max.*1.*0"),
        ({"socket_dir": "x", "outbox_max": 0}, r"outbox_max.*1.*0"),
        ({"socket_dir": "x", "pin_wait_s": 0}, "pin_wait_s"),
        ({"socket_dir": "x", "read_part_s": 90.0}, r"60\.0.*90\.0"),
        ({"socket_dir": "x", "switch_interval_s": 0}, r"switch_interval_s.*above 0.*0"),
    ],
)
def test_wrong_settings_are_refused_by_name(body: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidArgument, match=names):
        ConnectorSettings.from_extra_config({"kvlease": body})


def test_settings_need_the_directory_of_the_socket_alone() -> None:
    assert ConnectorSettings.from_extra_config({"kvlease": {"socket_dir": "x"}}).read_part_s == 10.0


def cache_of(groups: int) -> Any:
    return SimpleNamespace(kv_cache_groups=[object()] * groups)


def test_layers_lie_together_unless_an_operator_or_the_model_says_otherwise() -> None:
    default: dict[str, Any] = {}
    refused: dict[str, Any] = {"enable_cross_layers_blocks": "False"}
    for extra in (default, refused):
        prefer_layers_together(extra, cache_of(1))
    assert default == {"enable_cross_layers_blocks": "True"}
    assert refused == {"enable_cross_layers_blocks": "False"}
    hybrid: dict[str, Any] = {}
    prefer_layers_together(hybrid, cache_of(2))
    assert hybrid == {}


@dataclass
class Tensor:
    """The part of vLLM 0.26's plan of a cache that the connector changes."""

    size: int
    shared_by: list[str]
    offset: int = 0
    block_stride: int = 0


def plan_of(*tensors: Tensor, num_blocks: int = 5) -> Any:
    return SimpleNamespace(kv_cache_tensors=list(tensors), num_blocks=num_blocks)


def test_packed_layers_share_every_block_and_none_overlaps_another() -> None:
    plan = plan_of(*[Tensor(500, [f"layer.{number}"]) for number in range(3)])
    assert pack_layers(plan, "FLASH_ATTN", 1)
    assert [tensor.shared_by for tensor in plan.kv_cache_tensors] == [["layer.0"], ["layer.1"], ["layer.2"]]
    pages = [
        range(block * tensor.block_stride + tensor.offset, block * tensor.block_stride + tensor.offset + 100)
        for tensor in plan.kv_cache_tensors
        for block in range(5)
    ]
    assert sorted(number for page in pages for number in page) == list(range(1500))
    assert {tensor.size for tensor in plan.kv_cache_tensors} == {1500}


@pytest.mark.parametrize(
    ("plan", "backend", "kernel_blocks"),
    [
        (plan_of(Tensor(500, ["a"]), Tensor(400, ["b"])), "FLASH_ATTN", 1),
        (plan_of(Tensor(500, ["a", "b"]), Tensor(500, ["c", "d"])), "FLASH_ATTN", 1),
        (plan_of(Tensor(500, ["a"], 0, 200), Tensor(500, ["b"], 100, 200)), "FLASH_ATTN", 1),
        (plan_of(Tensor(501, ["a"]), Tensor(501, ["b"])), "FLASH_ATTN", 1),
        (plan_of(Tensor(500, ["a"])), "FLASH_ATTN", 1),
        (plan_of(Tensor(500, ["a"]), Tensor(500, ["b"])), "FLASHINFER", 1),
        (plan_of(Tensor(500, ["a"]), Tensor(500, ["b"])), "FLASH_ATTN", 2),
    ],
)
def test_a_plan_that_cannot_be_packed_stays_as_it_is(plan: Any, backend: str, kernel_blocks: int) -> None:
    before = list(plan.kv_cache_tensors)
    assert not pack_layers(plan, backend, kernel_blocks)
    assert plan.kv_cache_tensors == before


def test_engines_whose_blocks_lie_differently_do_not_agree() -> None:
    together, apart = ({"enable_cross_layers_blocks": value} for value in ("True", "False"))
    assert layout_factors(together, cache_of(1)) != layout_factors(apart, cache_of(1))
    assert layout_factors(apart, cache_of(1)) == layout_factors({}, cache_of(1))
    packed = SimpleNamespace(kv_cache_groups=[object()], kv_cache_layout="BHLNC")
    assert layout_factors({}, packed) != layout_factors({}, cache_of(1))


def test_quarantine_lets_blocks_go_when_every_rank_has_ended() -> None:
    pool = FakePool(10)
    quarantine = Quarantine(pool, ranks=2)
    quarantine.keep(1, (3, 4))
    quarantine.keep(2, (5,))
    quarantine.ended({1: 1, 9: 2})
    assert quarantine.blocks == 3
    quarantine.ended({1: 1, 2: 2})
    assert (quarantine.blocks, pool.freed) == (0, [4, 3, 5])


def test_only_notes_of_our_pins_are_left_out() -> None:
    wrapper = SimpleNamespace(get_new_notifs=lambda: {"a": [b"kvlease-x:1", b"HB:r1", b"r1:2"], "b": []})
    drop_own_notifications(wrapper)
    assert wrapper.get_new_notifs() == {"a": [b"HB:r1", b"r1:2"], "b": []}


def test_the_root_names_the_adapter_its_path_and_the_salt() -> None:
    lora = SimpleNamespace(lora_name="l", lora_path="/l")
    root = request_root(request(lora_request=lora, cache_salt="s"), "t", "m", "w")
    assert root == ChainRoot("t", "m", "w", "l", "/l", "s")


def test_an_image_changes_the_digest_of_every_block_it_reaches_into_and_those_after() -> None:
    plain = request_chain(request(16), ROOT, 16, 4).digests
    shown = request_chain(request(16, mm_features=[image(5, 4, "cat")]), ROOT, 16, 4).digests
    other = request_chain(request(16, mm_features=[image(5, 4, "dog")]), ROOT, 16, 4).digests
    assert plain[:16] == shown[:16] == other[:16]
    assert len({plain[16:32], shown[16:32], other[16:32]}) == 3


def test_a_chain_goes_on_from_what_is_known_of_it_also_within_an_image() -> None:
    shown = request(18, mm_features=[image(5, 8, "cat")])
    known = request_chain(shown, ROOT, 10, 4).digests
    assert request_chain(shown, ROOT, 18, 4, known) == request_chain(shown, ROOT, 18, 4)
    assert request_chain(shown, ROOT, 7, 4, known) == request_chain(shown, ROOT, 7, 4)


def test_the_same_image_in_another_place_has_another_digest() -> None:
    one = request_chain(request(8, mm_features=[image(4, 2, "cat")]), ROOT, 8, 4)
    two = request_chain(request(8, mm_features=[image(5, 2, "cat")]), ROOT, 8, 4)
    assert one.digests[:16] == two.digests[:16]
    assert one.digests != two.digests


def test_a_prompt_of_embeddings_cannot_be_verified() -> None:
    assert can_verify(request())
    assert not can_verify(request(prompt_token_ids=None))
    assert not can_verify(request(prompt_embeds=object()))


def test_an_adapter_that_is_loaded_in_place_cannot_be_verified() -> None:
    assert can_verify(request(lora_request=SimpleNamespace(load_inplace=False)))
    assert not can_verify(request(lora_request=SimpleNamespace(load_inplace=True)))
