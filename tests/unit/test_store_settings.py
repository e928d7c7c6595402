"""Settings of the store: what cannot work is refused with its values, before anything starts."""

import pytest

from kvlease.core.errors import InvalidArgument
from kvlease.registry.config import RegistryConfig
from kvlease.runtime.config import ConfigError
from kvlease.sidecar.config import SidecarConfig
from kvlease.store.etcd import EtcdStore
from kvlease.store.etcd_client import parse_endpoints, prefix_end
from kvlease.store.memory import MemoryStore
from kvlease.store.port import StoreKind
from kvlease.store.settings import StoreSettings, make_store


def test_endpoints_are_separated_by_commas_and_may_have_schemes() -> None:
    text = "etcd-0:2379, http://10.0.0.1:2379/,https://[::1]:2379"
    assert parse_endpoints(text) == ("etcd-0:2379", "10.0.0.1:2379", "[::1]:2379")


@pytest.mark.parametrize("text", ["etcd", "etcd:", ":2379", "etcd:client", "a:1,b"])
def test_an_endpoint_without_host_or_port_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="host:port"):
        parse_endpoints(text)
    with pytest.raises(ConfigError, match="etcd_endpoints"):
        RegistryConfig(etcd_endpoints=text).validate()


def test_no_endpoint_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        RegistryConfig(etcd_endpoints=" , ").validate()


@pytest.mark.parametrize(
    "settings",
    [
        {"etcd_user": "kvlease"},
        {"etcd_password_file": "password"},
        {"etcd_ca_file": "ca.pem", "etcd_certificate_file": "own.pem"},
        {"etcd_ca_file": "ca.pem", "etcd_key_file": "own.key"},
    ],
)
def test_settings_that_belong_together_are_refused_alone(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="belong together"):
        RegistryConfig(**settings).validate()


def test_an_own_certificate_needs_the_ones_to_check_against() -> None:
    with pytest.raises(ConfigError, match="needs etcd_ca_file"):
        RegistryConfig(etcd_certificate_file="own.pem", etcd_key_file="own.key").validate()


def test_a_session_in_etcd_is_no_shorter_than_etcd_allows() -> None:
    short = {"allow_loopback": True, "engine_ttl_s": 1.5, "store_call_s": 0.5}
    SidecarConfig(**short, store=StoreKind.MEMORY).validate()
    with pytest.raises(ConfigError, match=r"engine_ttl_s \(1.5\) must be at least 2"):
        SidecarConfig(**short).validate()


async def test_the_settings_name_the_store() -> None:
    assert isinstance(make_store(StoreSettings(store=StoreKind.MEMORY)), MemoryStore)
    store = make_store(StoreSettings())
    assert isinstance(store, EtcdStore)
    await store.close()


def test_the_end_of_a_prefix_lies_after_all_its_keys_and_before_others() -> None:
    end = prefix_end("/kvlease/v1/leases/")
    assert b"/kvlease/v1/leases/\xff" < end <= b"/kvlease/v1/leases0"


def test_https_endpoints_need_certificates_to_check_them_against() -> None:
    with pytest.raises(ConfigError, match="needs etcd_ca_file"):
        RegistryConfig(etcd_endpoints="https://etcd-0:2379").validate()
    RegistryConfig(etcd_endpoints="https://etcd-0:2379", tls_dir="/certificates").validate()
