"""A connector that can shake hands only before a turn needs it: a READ that meets a stranger fails."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvlease_vllm import connector


class KvleaseConnector(connector.KvleaseConnector):
    """kvlease's connector, whose READs begin no handshake."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        worker = self.connector_worker
        if role == KVConnectorRole.WORKER:
            worker._background_nixl_handshake = lambda request_id, *_: worker._failed_recv_reqs.put(
                request_id
            )
