"""What a certificate says its owner is, and what each owner may call."""

import pytest

from kvlease.core.errors import NotAllowed
from kvlease.runtime.identity import ALLOWED, AUDITED, Identity, authorize, identities_of
from kvlease.v1 import registry_pb2, routing_pb2, sidecar_pb2

PACKAGES = (registry_pb2, sidecar_pb2, routing_pb2)
METHODS = {
    f"{service.full_name}/{method.name}"
    for package in PACKAGES
    for service in package.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def may_call(identity: Identity, method: str) -> bool:
    try:
        authorize(method, frozenset({identity}))
    except NotAllowed:
        return False
    return True


def test_the_table_has_a_row_for_every_method_served_over_tcp() -> None:
    assert set(ALLOWED) == METHODS
    assert AUDITED <= METHODS


@pytest.mark.parametrize(
    "name",
    ["kvlease-router", "spiffe://cluster.local/ns/serving/sa/kvlease-router", "spiffe://a/kvlease-router"],
)
def test_a_certificate_names_its_process_as_a_host_or_at_the_end_of_a_spiffe_uri(name: str) -> None:
    assert identities_of(["10.0.0.1", name, "router-0.pods"]) == {Identity.ROUTER}


@pytest.mark.parametrize(
    "name",
    [
        "kvlease-router.example.org",
        "https://example.org/kvlease-router",
        "kvlease-routers",
        "spiffe://a/",
        "",
    ],
)
def test_names_that_only_resemble_an_identity_are_none(name: str) -> None:
    assert identities_of([name]) == frozenset()


def test_a_router_renews_and_pins_but_never_reaches_past_the_registry() -> None:
    assert may_call(Identity.ROUTER, "kvlease.v1.RegistryService/RenewLeases")
    assert may_call(Identity.ROUTER, "kvlease.v1.RegistryService/PinLease")
    assert not any(may_call(Identity.ROUTER, method) for method in METHODS if "SidecarService" in method)
    assert not may_call(Identity.ROUTER, "kvlease.v1.RegistryService/DrainEngine")


def test_a_sidecar_only_takes_and_ends_pins_at_other_sidecars() -> None:
    allowed = {method for method in METHODS if may_call(Identity.SIDECAR, method)}
    assert allowed == {"kvlease.v1.SidecarService/Pin", "kvlease.v1.SidecarService/Unpin"}


def test_what_is_not_in_the_table_and_who_has_no_identity_are_refused_by_name() -> None:
    with pytest.raises(NotAllowed, match=r"kvlease-operator may not call kvlease\.v1\.RegistryService/Grant"):
        authorize("kvlease.v1.RegistryService/Grant", frozenset({Identity.OPERATOR}))
    with pytest.raises(NotAllowed, match="without identity may not call"):
        authorize("kvlease.v1.RegistryService/ListEngines", frozenset())
