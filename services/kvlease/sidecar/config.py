"""Configuration of a sidecar."""

import ipaddress
from dataclasses import dataclass

from kvlease.core.records import EngineRole
from kvlease.runtime.addresses import is_base_url
from kvlease.runtime.admin import AdminSettings
from kvlease.runtime.config import ConfigError, require, require_host_port, setting
from kvlease.runtime.logging import LogFormat, LogLevel
from kvlease.runtime.telemetry import TracingSettings
from kvlease.store.port import StoreKind
from kvlease.store.settings import StoreSettings


@dataclass(frozen=True)
class SidecarConfig(StoreSettings, TracingSettings, AdminSettings):
    """Settings of one sidecar. All durations are seconds."""

    listen: str = setting("127.0.0.1:0", "host:port that serves the registry and other sidecars")
    advertise: str = setting("", "host:port under which they reach it; empty: where it listens")
    allow_loopback: bool = setting(False, "accept a loopback advertise address: everything is on one machine")
    socket_dir: str = setting("/run/kvlease", "directory of the unix socket for connectors, mode 0700")
    role: EngineRole = setting(EngineRole.DECODE, "what the engines beside it are for")
    engine_url: str = setting("http://127.0.0.1:8000", "base URL of the OpenAI API, as routers reach it")
    engine_ttl_s: float = setting(10.0, "after this long without its sidecar an engine's records vanish")
    pin_call_s: float = setting(0.2, "bound of a pin's way to the connector; a turn waits for it")
    holder_call_s: float = setting(1.0, "bound of any other question to the connector")
    peer_call_s: float = setting(0.3, "bound of a question to another sidecar, its pin call included")
    wait_for_offer_max_s: float = setting(0.1, "longest that a pin waits for a lease not offered yet")
    warm_handshakes: bool = setting(True, "engines shake hands with peers that join, before a turn needs it")
    handshake_s: float = setting(60.0, "such a handshake is given up by then; the first READ tries again")
    hello_s: float = setting(5.0, "an attached connector must have said who it is within this")
    stop_grace_s: float = setting(5.0, "calls in flight get this long to end when the sidecar stops")
    log_level: LogLevel = setting(LogLevel.INFO, "debug, info, warning or error")
    log_format: LogFormat = setting(LogFormat.JSON, "json, or text for a terminal")

    def validate(self) -> None:
        """Checks relations between settings.

        Raises:
            ConfigError: one is broken.
        """
        self.validate_store()
        self.validate_tracing()
        self.validate_admin()
        require(
            self.pin_call_s < self.peer_call_s,
            f"pin_call_s ({self.pin_call_s:g}) must be below peer_call_s ({self.peer_call_s:g})",
        )
        require(
            3 * self.store_call_s <= self.engine_ttl_s,
            f"3 * store_call_s ({self.store_call_s:g}) must not exceed engine_ttl_s ({self.engine_ttl_s:g})",
        )
        require(
            self.engine_ttl_s >= 2.0 or self.store is StoreKind.MEMORY,
            f"engine_ttl_s ({self.engine_ttl_s:g}) must be at least 2 with store {self.store.value}: "
            "etcd's leases are no shorter",
        )
        require(
            0 < self.handshake_s < 3600,
            f"handshake_s ({self.handshake_s:g}) must be above 0 and below an hour",
        )
        for name, value in (("listen", self.listen), ("advertise", self.advertise or self.listen)):
            require_host_port(name, value)
        require(
            is_base_url(self.engine_url),
            f"engine_url is {self.engine_url!r}, but must be a URL as http://127.0.0.1:8000 is",
        )
        check_advertised(self.advertise or self.listen, allow_loopback=self.allow_loopback)


def check_advertised(address: str, *, allow_loopback: bool) -> None:
    """Refuses an address that other machines cannot reach.

    Raises:
        ConfigError: it is a wildcard, or loopback without `allow_loopback`.
    """
    host = address.rpartition(":")[0].strip("[]")
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        parsed = None
    if host == "" or (parsed is not None and parsed.is_unspecified):
        raise ConfigError(f"advertise: nobody can reach {address!r}; name the host that others see")
    if not allow_loopback and (host == "localhost" or (parsed is not None and parsed.is_loopback)):
        raise ConfigError(
            f"advertise: {address!r} is reachable on this machine only; name the host that others see, "
            "or set allow_loopback"
        )
