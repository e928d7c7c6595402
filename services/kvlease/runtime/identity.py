"""Which process may call what: identities out of certificates, and one table of what each of them may do.

A certificate names its process as one of its DNS names (`kvlease-router`) or as the last part of a SPIFFE URI
(`spiffe://cluster.local/ns/serving/sa/kvlease-router`). Who may sign certificates decides who may be what; the
trust domain of a URI is not looked at. Connectors have no identity: they attach through a socket that only the
sidecar's own user can open, and what an engine holds is granted there and nowhere else.
"""

from collections.abc import Iterable
from enum import Enum

from kvlease.core.errors import NotAllowed


class Identity(Enum):
    """What a process is, as its certificate says it."""

    ROUTER = "kvlease-router"
    REGISTRY = "kvlease-registry"
    SIDECAR = "kvlease-sidecar"
    OPERATOR = "kvlease-operator"


_ROUTER, _REGISTRY, _SIDECAR, _OPERATOR = (frozenset({identity}) for identity in Identity)

ALLOWED: dict[str, frozenset[Identity]] = {
    "kvlease.v1.RegistryService/ListEngines": _ROUTER | _OPERATOR,
    "kvlease.v1.RegistryService/WatchEngines": _ROUTER | _OPERATOR,
    "kvlease.v1.RegistryService/GetLease": _ROUTER | _OPERATOR,
    "kvlease.v1.RegistryService/ListLeases": _ROUTER | _OPERATOR,
    "kvlease.v1.RegistryService/WatchLeases": _ROUTER | _OPERATOR,
    "kvlease.v1.RegistryService/PinLease": _ROUTER,
    "kvlease.v1.RegistryService/UnpinLease": _ROUTER,
    "kvlease.v1.RegistryService/RenewLeases": _ROUTER,
    "kvlease.v1.RegistryService/ReleaseLease": _ROUTER | _OPERATOR,
    "kvlease.v1.RegistryService/DrainEngine": _OPERATOR,
    # A reader's sidecar takes the pin of its own turn again, under the id that the router drew.
    "kvlease.v1.SidecarService/Pin": _REGISTRY | _SIDECAR,
    "kvlease.v1.SidecarService/Unpin": _REGISTRY | _SIDECAR,
    "kvlease.v1.SidecarService/Renew": _REGISTRY,
    "kvlease.v1.SidecarService/Release": _REGISTRY,
    "kvlease.v1.SidecarService/Drain": _REGISTRY,
    "kvlease.v1.SidecarService/ReadGauges": _REGISTRY | _OPERATOR,
    "kvlease.v1.RoutingService/GetConversation": _OPERATOR,
    "kvlease.v1.RoutingService/RenewConversation": _OPERATOR,
    "kvlease.v1.RoutingService/ReleaseConversation": _OPERATOR,
    "kvlease.v1.RoutingService/ReleaseTenant": _OPERATOR,
}
"""Every method that is served over TCP, and who may call it."""

AUDITED = frozenset(
    {
        "kvlease.v1.RegistryService/ReleaseLease",
        "kvlease.v1.RegistryService/DrainEngine",
        "kvlease.v1.RoutingService/ReleaseConversation",
        "kvlease.v1.RoutingService/ReleaseTenant",
    }
)
"""What changes the fleet on somebody's word: each such call leaves a line in the log."""

OPEN_SERVICES = frozenset(
    {
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "grpc.reflection.v1.ServerReflection",
    }
)
"""What answers every peer whose certificate the authority signed."""


def identities_of(names: Iterable[str]) -> frozenset[Identity]:
    """What a certificate with these subject alternative names is; usually one, and empty for a stranger's."""
    last_parts = {name.rpartition("/")[2] if name.startswith("spiffe://") else name for name in names if name}
    return frozenset(identity for identity in Identity if identity.value in last_parts)


def authorize(method: str, callers: frozenset[Identity]) -> None:
    """Lets a caller pass who may call a method, `package.Service/Method`.

    Raises:
        NotAllowed: with the identity and the method.
    """
    if callers & ALLOWED.get(method, frozenset()):
        return
    named = ", ".join(sorted(identity.value for identity in callers)) or "a certificate without identity"
    raise NotAllowed(f"{named} may not call {method}")
