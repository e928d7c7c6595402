"""Which engines neither retain nor READ, and what they say of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvlease_vllm.engine_facts import retain_refusal


def refusal(*, host_buffer: bool = False, sleep_mode: bool = False, **cache: Any) -> str:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config: Any = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(enable_sleep_mode=sleep_mode),
        cache_config=SimpleNamespace(**cache),
    )
    groups = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return retain_refusal(config, groups, SimpleNamespace(use_host_buffer=host_buffer))


def test_an_engine_whose_memory_is_what_nixl_reads_retains() -> None:
    assert refusal() == ""


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"host_buffer": True}, "kv_buffer_device"),
        ({"sleep_mode": True}, "enable_sleep_mode"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales"),
    ],
)
def test_where_nixl_would_read_other_kv_nothing_is_retained_or_read(facts: Any, named: str) -> None:
    assert named in refusal(**facts)
