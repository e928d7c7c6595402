"""What the connector asks of vLLM is there, and a difference is refused with its name."""

import inspect

import pytest
import torch
from engine_harness import make_config
from vllm import __version__
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

from kvlease_vllm.connector import KvleaseConnector
from kvlease_vllm.seams import UnsupportedEngineError, check_connector, check_worker


def test_this_vllm_has_every_seam() -> None:
    check_connector(NixlConnector, BlockPool, __version__)


def test_a_method_with_another_parameter_is_refused_by_name() -> None:
    class Renamed(NixlConnector):
        def get_num_new_matched_tokens(self, request, computed):  # type: ignore[no-untyped-def]
            return 0, False

    with pytest.raises(UnsupportedEngineError, match=r"Renamed\.get_num_new_matched_tokens takes .*computed"):
        check_connector(Renamed, BlockPool, "9.9")


def test_a_missing_method_of_the_block_pool_is_refused_by_name() -> None:
    class Bare:
        def touch(self, blocks): ...  # type: ignore[no-untyped-def]

    with pytest.raises(UnsupportedEngineError, match=r"Bare\.free_blocks is missing.*Versions shown to work"):
        check_connector(NixlConnector, Bare, "9.9")


def test_a_worker_without_its_tables_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedEngineError, match="_recving_metadata"):
        check_worker(object(), "9.9")


def test_vllms_connector_of_several_is_refused() -> None:
    config = make_config()
    alone = config.kv_transfer_config
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_producer",
        kv_connector_extra_config={
            "connectors": [
                {
                    "kv_connector": alone.kv_connector,
                    "kv_connector_module_path": alone.kv_connector_module_path,
                    "kv_role": "kv_producer",
                    "kv_connector_extra_config": alone.kv_connector_extra_config,
                }
            ]
        },
    )
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    with set_current_vllm_config(config), pytest.raises(UnsupportedEngineError, match="MultiConnector"):
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)


def test_the_reading_seam_of_the_worker_takes_a_request_and_its_metadata() -> None:
    assert tuple(inspect.signature(NixlPullConnectorWorker._read_blocks_for_req).parameters) == (
        "self",
        "req_id",
        "meta",
    )


def test_the_connector_overrides_only_what_vllm_has() -> None:
    # The second is 0.26's.
    own = {"scheduler_half_class", "register_cross_layers_kv_cache"}
    public = {name for name in vars(KvleaseConnector) if not name.startswith("_")} - own
    assert public <= set(dir(NixlConnector))
