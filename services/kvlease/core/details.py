"""Keys of what an engine tells of itself for people and `kvlease doctor`; no process decides by it.

Beside these an engine may tell anything else, by a name that explains itself.
"""

CONNECTOR_VERSION = "connector_version"
DEVICE = "device"
"""`cuda` or `cpu`, as vLLM names its platform."""

NIXL_VERSION = "nixl_version"
NIXL_BACKENDS = "nixl_backends"
"""Names with commas, as `kv_connector_extra_config.backends` has them."""

KV_BUFFER_DEVICE = "kv_buffer_device"
CACHE_DTYPE = "cache_dtype"
MODEL_LENGTH_MAX = "model_length_max"
SEQUENCES_MAX = "sequences_max"
RETENTION_BUDGET = "retention_budget"
"""Share of the blocks that leases may keep."""

READING_CAP = "reading_cap"
"""Share of the blocks that may be pinned at once."""

FABRIC_HANDLES = "fabric_handles"
"""Counter among an engine's gauges: RDMA devices that its processes have open. Told where NIXL uses LIBFABRIC."""
