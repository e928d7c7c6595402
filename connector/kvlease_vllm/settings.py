"""The connector's settings: `kv_connector_extra_config.kvlease` of vLLM's `--kv-transfer-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvlease.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Settings of one engine's connector.

    Attributes:
        socket_dir: directory of the sidecar's unix socket; the connector waits for the socket to appear.
        weights_version: the operator's version of the weights; it roots every digest: change it with them.
        retention_budget: fraction of the engine's blocks that retained conversations may keep.
        tenant_share: fraction of that budget that the conversations of one tenant may keep.
        tenant_leases_max: conversations of one tenant that are retained at once.
        reading_cap: fraction of the blocks that may be pinned at once; pinned blocks cannot be evicted.
        lifetime_max_s: a lease ends this long after its grant.
        recompute_threshold_tokens: fewer verified tokens than this are recomputed: a READ would cost more.
        read_part_s: how long a pin's read part lasts; the fence accepts a READ within 0.8 of it.
        first_read_part_s: the same before the pair's first handshake, which may take long on a busy machine.
        pin_wait_s: how long a request waits for its pin before it recomputes.
        outbox_max: messages that wait for the sidecar; beyond it the newest hold is given back at once.
        switch_interval_s: on GPUs, how long one thread of the engine's process keeps Python's interpreter while
            another waits for it. Pins are answered and tokens sent by other threads than the one that launches kernels;
            Python's own 0.005 makes each of them wait so long, several times a turn. An engine that computes on CPUs
            keeps Python's own: its threads have no cores to go on at once.
    """

    socket_dir: str
    weights_version: str = ""
    retention_budget: float = 0.5
    tenant_share: float = 1.0
    tenant_leases_max: int = 10_000
    reading_cap: float = 0.25
    lifetime_max_s: float = 1800.0
    recompute_threshold_tokens: int = 64
    read_part_s: float = 10.0
    first_read_part_s: float = 60.0
    pin_wait_s: float = 2.0
    outbox_max: int = 4096
    switch_interval_s: float = 0.0005

    def __post_init__(self) -> None:
        for name in ("retention_budget", "tenant_share", "reading_cap"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise InvalidArgument(f"kvlease.{name} is a fraction above 0 and at most 1, not {value}")
        for name in ("lifetime_max_s", "read_part_s", "first_read_part_s", "pin_wait_s", "switch_interval_s"):
            value = getattr(self, name)
            if not value > 0:
                raise InvalidArgument(f"kvlease.{name} is a number of seconds above 0, not {value}")
        if self.first_read_part_s < self.read_part_s:
            raise InvalidArgument(
                f"kvlease.first_read_part_s ({self.first_read_part_s}) must be at least "
                f"read_part_s ({self.read_part_s})"
            )
        for name, least in (("recompute_threshold_tokens", 0), ("outbox_max", 1), ("tenant_leases_max", 1)):
            value = getattr(self, name)
            if value < least:
                raise InvalidArgument(f"kvlease.{name} is at least {least}, not {value}")

    @staticmethod
    def from_extra_config(extra: Mapping[str, Any]) -> "ConnectorSettings":
        """Reads the `kvlease` object of vLLM's extra config.

        Raises:
            InvalidArgument: a key is unknown, missing or out of range; the message names it.
        """
        body = extra.get("kvlease")
        if not isinstance(body, Mapping) or not body.get("socket_dir"):
            raise InvalidArgument(
                "kv_connector_extra_config.kvlease.socket_dir must name the sidecar's directory"
            )
        known = {field.name for field in fields(ConnectorSettings)}
        unknown = sorted(set(body) - known)
        if unknown:
            raise InvalidArgument(f"kv_connector_extra_config.kvlease has unknown keys: {', '.join(unknown)}")
        return ConnectorSettings(**body)
