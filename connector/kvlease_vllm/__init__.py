"""The kvlease connector: vLLM's NIXL connector with verified reuse and renewable leases.

Load it with `--kv-transfer-config` and `{"kv_connector": "KvleaseConnector", "kv_connector_module_path":
"kvlease_vllm.connector", "kv_role": "kv_both", "kv_connector_extra_config": {"kvlease": {"socket_dir": "..."}}}`.
"""
