"""The router's configuration: relations are refused with both values."""

from dataclasses import replace

import pytest

from kvlease.router.config import RouterConfig
from kvlease.runtime.config import ConfigError


def test_the_defaults_are_valid_and_become_the_policy() -> None:
    config = RouterConfig()
    config.validate()
    assert (config.renewal_policy().interval_s, config.renewal_policy().duration_s) == (5.0, 20.0)
    assert config.turn_limits().plan.append_tokens_max == 512


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"heartbeat_interval_s": 8.0}, ("3 * heartbeat_interval_s (8)", "lease_duration_s (20)")),
        ({"prefill_timeout_s": 1800.0}, ("1800", "1800")),
        ({"wait_for_offer_s": 0.5}, ("0.5", "0.5")),
        ({"gap_floor_s": 601.0}, ("601", "600")),
        ({"body_bytes_max": 0}, ("0",)),
        ({"body_idle_s": 0}, ("body_idle_s", "0")),
        ({"body_idle_s": 300.0}, ("body_idle_s (300)", "body_timeout_s (300)")),
        ({"append_tokens_max": -1}, ("-1",)),
        ({"listen": "nowhere"}, ("nowhere",)),
    ],
)
def test_values_that_do_not_fit_are_refused(changes: dict[str, object], values: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(RouterConfig(), **changes).validate()
    assert all(value in str(refused.value) for value in values)


def test_registries_are_listed_with_commas() -> None:
    assert RouterConfig(registry="a:1, [::1]:2,").registries() == ("a:1", "[::1]:2")


@pytest.mark.parametrize("listed", ["", " , ", "a:1,b"])
def test_a_list_of_registries_that_names_none_or_no_port_is_refused(listed: str) -> None:
    with pytest.raises(ConfigError, match="registry"):
        RouterConfig(registry=listed).validate()
