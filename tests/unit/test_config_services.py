"""Settings of the services that cannot work, alone or together, are refused with their values."""

from typing import Any

import pytest

from kvlease.registry.config import RegistryConfig
from kvlease.router.config import RouterConfig
from kvlease.runtime.config import ConfigError
from kvlease.sidecar.config import SidecarConfig


def test_the_defaults_of_a_registry_work_together() -> None:
    RegistryConfig().validate()


def test_a_heartbeat_must_fit_three_times_into_a_lease() -> None:
    with pytest.raises(ConfigError, match=r"3 \* heartbeat_interval_s \(8\) .* lease_duration_s \(20\)"):
        RegistryConfig(heartbeat_interval_s=8.0).validate()


def test_a_renewal_must_be_over_before_the_next_heartbeat() -> None:
    with pytest.raises(ConfigError, match=r"renew_call_s \(5\) must be below heartbeat_interval_s \(5\)"):
        RegistryConfig(renew_call_s=5.0).validate()


@pytest.mark.parametrize("address", ["0.0.0.0:7000", "[::]:7000", ":7000"])
def test_an_address_that_nobody_can_reach_is_never_advertised(address: str) -> None:
    with pytest.raises(ConfigError, match="nobody can reach"):
        SidecarConfig(listen="0.0.0.0:7000", advertise=address, allow_loopback=True).validate()
    with pytest.raises(ConfigError, match="nobody can reach"):
        SidecarConfig(listen=address, allow_loopback=True).validate()


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "localhost:7000", "[::1]:7000"])
def test_loopback_is_advertised_only_when_allowed(address: str) -> None:
    with pytest.raises(ConfigError, match="allow_loopback"):
        SidecarConfig(listen="0.0.0.0:7000", advertise=address).validate()
    SidecarConfig(listen="0.0.0.0:7000", advertise=address, allow_loopback=True).validate()


def test_a_host_that_others_see_is_advertised() -> None:
    SidecarConfig(listen="0.0.0.0:7000", advertise="decode-7.pods:7000").validate()


def test_a_pin_must_fit_into_the_question_of_a_peer() -> None:
    with pytest.raises(ConfigError, match=r"pin_call_s \(0.4\) must be below peer_call_s \(0.3\)"):
        SidecarConfig(allow_loopback=True, pin_call_s=0.4).validate()
    with pytest.raises(ConfigError, match=r"handshake_s \(0\) must be above 0"):
        SidecarConfig(allow_loopback=True, handshake_s=0.0).validate()


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (RegistryConfig, {"listen": "http://127.0.0.1:7700"}),
        (RegistryConfig, {"admin_listen": "127.0.0.1:70000"}),
        (RouterConfig, {"registry": "127.0.0.1:7700,http://127.0.0.1:7701"}),
        (RouterConfig, {"grpc_listen": "7710"}),
        (SidecarConfig, {"advertise": "http://sidecar:7720"}),
    ],
)
def test_what_is_no_host_and_port_is_refused(config: type[Any], settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="must be host:port"):
        config(**settings).validate()


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "http://", "http://host:port", "http://host:0", "http://h/?a=b"]
)
def test_an_engine_is_reached_at_a_url(url: str) -> None:
    with pytest.raises(ConfigError, match=r"engine_url .* but must be a URL"):
        SidecarConfig(allow_loopback=True, engine_url=url).validate()
