"""Whom a request belongs to: a tenant of the keys file, the one that a trusted gateway names, or the key itself.

A keys file names tenants, the hashes of their keys, and what each may take:

    [tenants.acme]
    key_hashes = ["sha256:9f86d0...", "blake2b:..."]
    weight = 2.0
    running_max = 64
    admin = true

The hashes are of the bare key in UTF-8: `printf %s "$KEY" | sha256sum`, or BLAKE2b with 32 bytes. Nothing in
here logs or repeats a key, and an error names a tenant or a place in the file only.
"""

import ipaddress
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from typing import Any, Protocol, cast

from kvlease.core.conversation import tenant_digest
from kvlease.core.errors import InvalidArgument, NotOwner
from kvlease.router.headers import bearer_token

TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
HASH = re.compile(r"(sha256|blake2b):([0-9a-f]{64})")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a tenant may take.

    Attributes:
        weight: its share of the engines beside that of others, when turns have to wait.
        running_max: its turns in flight at one router; 0: as many as there is room for.
        admin: it may also act on other tenants.
    """

    weight: float = 1.0
    running_max: int = 0
    admin: bool = False


DEFAULT_ALLOWANCE = Allowance()


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A keys file as it was read."""

    tenant_of_hash: Mapping[str, str] = field(default_factory=dict[str, str])
    allowances: Mapping[str, Allowance] = field(default_factory=dict[str, Allowance])


class Tenancy(Protocol):
    """Decides whom a request belongs to."""

    def tenant(self, headers: Mapping[str, str], peer: str) -> str:
        """The tenant of a request.

        Args:
            headers: the request's, without regard to case.
            peer: the address at the other end of the connection, empty when it is not known.

        Raises:
            NotOwner: nobody that is served here.
        """
        ...

    def allowance(self, tenant: str) -> Allowance:
        """What a tenant may take; the default for one without an entry."""
        ...


class TenancyByCredential:
    """Every credential is a tenant of its own; without one a request is `anonymous`'s."""

    def tenant(self, headers: Mapping[str, str], peer: str) -> str:
        """The digest of the credential."""
        return tenant_digest(credential(headers))

    def allowance(self, tenant: str) -> Allowance:
        """Everybody's."""
        return DEFAULT_ALLOWANCE


class TenancyByKeyFile:
    """Only the keys of a file are served, each for its tenant. `load` replaces them at once."""

    def __init__(self, keys: KeyFile) -> None:
        self._keys = keys

    def load(self, keys: KeyFile) -> None:
        """From here on these keys count."""
        self._keys = keys

    def tenant(self, headers: Mapping[str, str], peer: str) -> str:
        """The tenant whose key came with the request."""
        key = credential(headers).encode(errors="surrogateescape")
        known = self._keys.tenant_of_hash
        # What is looked up is a digest: how long a miss takes says nothing of the keys.
        tenant = known.get(_sha256(key)) or known.get(_blake2b(key))
        if tenant is None:
            raise NotOwner("the API key is not known here")
        return tenant

    def allowance(self, tenant: str) -> Allowance:
        """The entry of the file."""
        return self._keys.allowances.get(tenant, DEFAULT_ALLOWANCE)


class TenancyByGateway:
    """A gateway in front has checked the caller and names the tenant; it is believed from its networks only."""

    def __init__(self, header: str, networks: tuple[Network, ...]) -> None:
        self._header = header
        self._networks = networks

    def tenant(self, headers: Mapping[str, str], peer: str) -> str:
        """The tenant that the gateway names."""
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            raise NotOwner("requests are taken from the gateway only") from None
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if not any(address in network for network in self._networks):
            raise NotOwner("requests are taken from the gateway only")
        name = headers.get(self._header, "")
        if not TENANT_NAME.fullmatch(name):
            raise NotOwner(f"the gateway names no tenant in {self._header}")
        return name

    def allowance(self, tenant: str) -> Allowance:
        """Everybody's: the gateway has its own limits."""
        return DEFAULT_ALLOWANCE


def credential(headers: Mapping[str, str]) -> str:
    """What stands for the caller: the bearer's token, else Anthropic's key header; `anonymous` without either."""
    return bearer_token(headers.get("Authorization") or headers.get("x-api-key"))


def parse_key_file(text: str) -> KeyFile:
    """Reads a keys file.

    Raises:
        InvalidArgument: it makes no sense; the message names the place, and nothing of a key.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        # The decoder's own message may quote a line of the file.
        raise InvalidArgument("the keys file is not valid TOML") from None
    unknown = sorted(set(document) - {"tenants"})
    if unknown:
        raise InvalidArgument(f"unknown table {unknown[0]!r}; known is tenants")
    tenants: object = document.get("tenants", {})
    if not isinstance(tenants, dict):
        raise InvalidArgument("tenants must be a table")
    tenant_of_hash: dict[str, str] = {}
    allowances: dict[str, Allowance] = {}
    for name, entry in cast("dict[str, object]", tenants).items():
        if not TENANT_NAME.fullmatch(name):
            raise InvalidArgument(f"tenant {name!r} must be 1 to 63 letters, digits, '.', '_' or '-'")
        hashes, allowances[name] = _entry(name, entry)
        for one in hashes:
            if tenant_of_hash.setdefault(one, name) != name:
                raise InvalidArgument(f"tenants {tenant_of_hash[one]} and {name} have the same key")
    return KeyFile(tenant_of_hash, allowances)


def parse_networks(text: str) -> tuple[Network, ...]:
    """Networks in CIDR notation with commas between.

    Raises:
        InvalidArgument: one is none.
    """
    try:
        return tuple(ipaddress.ip_network(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise InvalidArgument(f"no network: {error}") from error


def _entry(name: str, entry: object) -> tuple[list[str], Allowance]:
    if not isinstance(entry, dict):
        raise InvalidArgument(f"tenant {name} must be a table")
    fields = cast("dict[str, Any]", entry)
    unknown = sorted(set(fields) - {"key_hashes", "weight", "running_max", "admin"})
    if unknown:
        raise InvalidArgument(
            f"tenant {name}: unknown {unknown[0]!r}; known are key_hashes, weight, running_max, admin"
        )
    hashes: object = fields.get("key_hashes")
    if not isinstance(hashes, list) or not all(
        isinstance(one, str) and HASH.fullmatch(one) for one in cast("list[object]", hashes)
    ):
        raise InvalidArgument(
            f"tenant {name}: key_hashes must be a list of sha256:<64 hex> or blake2b:<64 hex>"
        )
    weight, running_max, admin = (
        fields.get("weight", 1.0),
        fields.get("running_max", 0),
        fields.get("admin", False),
    )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise InvalidArgument(f"tenant {name}: weight must be a number above 0")
    if type(running_max) is not int or running_max < 0:
        raise InvalidArgument(f"tenant {name}: running_max must be a whole number, 0 for no bound")
    if not isinstance(admin, bool):
        raise InvalidArgument(f"tenant {name}: admin must be true or false")
    return cast("list[str]", hashes), Allowance(float(weight), running_max, admin)


def _sha256(key: bytes) -> str:
    return f"sha256:{sha256(key).hexdigest()}"


def _blake2b(key: bytes) -> str:
    return f"blake2b:{blake2b(key, digest_size=32).hexdigest()}"
