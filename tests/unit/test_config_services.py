"""Settings of registry and sidecar that cannot work together are refused with both values."""

import pytest

from kvlease.registry.config import RegistryConfig
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
