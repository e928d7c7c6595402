"""Configuration of a registry."""

from dataclasses import dataclass

from kvlease.runtime.admin import AdminSettings
from kvlease.runtime.config import require, require_host_port, setting
from kvlease.runtime.logging import LogFormat, LogLevel
from kvlease.runtime.telemetry import TracingSettings
from kvlease.store.settings import StoreSettings


@dataclass(frozen=True)
class RegistryConfig(StoreSettings, TracingSettings, AdminSettings):
    """Settings of one registry. All durations are seconds."""

    listen: str = setting(
        "127.0.0.1:7700", "host:port that serves routers and operators; port 0: any free one"
    )
    sidecar_call_s: float = setting(
        0.3, "bound of a pin at a sidecar, which asks its connector for 0.2 at most"
    )
    renew_call_s: float = setting(2.0, "bound of one renewal at a sidecar")
    renewal_spacing_s: float = setting(0.25, "renewals of one engine that come closer are sent as one")
    heartbeat_interval_s: float = setting(5.0, "how often routers renew")
    lease_duration_s: float = setting(20.0, "what a heartbeat renews a lease for")
    wait_for_offer_max_s: float = setting(0.1, "longest that a pin waits for a lease not offered yet")
    session_ids_max: int = setting(100_000, "leases and pins that one router's session may renew")
    stop_grace_s: float = setting(5.0, "calls in flight get this long to end when the registry stops")
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
            3 * self.heartbeat_interval_s <= self.lease_duration_s,
            f"3 * heartbeat_interval_s ({self.heartbeat_interval_s:g}) must not exceed lease_duration_s "
            f"({self.lease_duration_s:g})",
        )
        require(
            self.renewal_spacing_s + self.renew_call_s < self.heartbeat_interval_s,
            f"renewal_spacing_s ({self.renewal_spacing_s:g}) plus renew_call_s ({self.renew_call_s:g}) must "
            f"be below heartbeat_interval_s ({self.heartbeat_interval_s:g})",
        )
        require(self.session_ids_max > 0, f"session_ids_max ({self.session_ids_max}) must be above 0")
        require_host_port("listen", self.listen)
