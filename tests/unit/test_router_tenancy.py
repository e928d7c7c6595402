"""Whom a request belongs to."""

from hashlib import blake2b, sha256

import pytest

from kvlease.core.conversation import tenant_digest
from kvlease.core.errors import InvalidArgument, NotOwner
from kvlease.router.tenancy import (
    Allowance,
    TenancyByCredential,
    TenancyByGateway,
    TenancyByKeyFile,
    parse_key_file,
    parse_networks,
)

KEY = "sk-one-very-secret"
SHA = "sha256:" + sha256(KEY.encode()).hexdigest()
BLAKE = "blake2b:" + blake2b(b"sk-two", digest_size=32).hexdigest()
FILE = f"""
[tenants.acme]
key_hashes = ["{SHA}", "{BLAKE}"]
weight = 2
running_max = 8
admin = true

[tenants."team-b.eu"]
key_hashes = ["sha256:{"0" * 64}"]
"""


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_of_the_file_is_its_tenants_by_either_hash() -> None:
    tenancy = TenancyByKeyFile(parse_key_file(FILE))
    assert tenancy.tenant(bearer(KEY), "") == "acme"
    assert tenancy.tenant(bearer("sk-two"), "") == "acme"
    assert tenancy.tenant({"x-api-key": KEY}, "") == "acme"
    assert tenancy.allowance("acme") == Allowance(2.0, 8, admin=True)
    assert tenancy.allowance("team-b.eu") == Allowance()


@pytest.mark.parametrize(
    "headers", [{}, bearer("sk-other"), bearer(KEY + " x"), bearer(SHA), {"Authorization": f"Basic {KEY}"}]
)
def test_any_other_key_is_refused_without_a_word_of_it(headers: dict[str, str]) -> None:
    with pytest.raises(NotOwner) as refused:
        TenancyByKeyFile(parse_key_file(FILE)).tenant(headers, "")
    assert "sk-" not in str(refused.value)


def test_keys_that_are_loaded_replace_those_before() -> None:
    tenancy = TenancyByKeyFile(parse_key_file(FILE))
    tenancy.load(parse_key_file(f'[tenants.other]\nkey_hashes = ["{SHA}"]'))
    assert tenancy.tenant(bearer(KEY), "") == "other"
    with pytest.raises(NotOwner):
        tenancy.tenant(bearer("sk-two"), "")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("not toml " + KEY, "TOML"),
        ("[keys]", "keys"),
        ("tenants = 1", "tenants"),
        ("tenants.acme = 1", "acme"),
        ('[tenants."a/b"]\nkey_hashes = []', "a/b"),
        ("[tenants.acme]", "key_hashes"),
        (f'[tenants.acme]\nkey_hashes = ["{KEY}"]', "key_hashes"),
        ('[tenants.acme]\nkey_hashes = ["sha256:12"]', "key_hashes"),
        (f'[tenants.acme]\nkey_hashes = ["{SHA}"]\nweight = 0', "weight"),
        (f'[tenants.acme]\nkey_hashes = ["{SHA}"]\nweight = true', "weight"),
        (f'[tenants.acme]\nkey_hashes = ["{SHA}"]\nrunning_max = -1', "running_max"),
        (f'[tenants.acme]\nkey_hashes = ["{SHA}"]\nadmin = 1', "admin"),
        (f'[tenants.acme]\nkey_hashes = ["{SHA}"]\nwait = 1', "wait"),
        (f'[tenants.a]\nkey_hashes = ["{SHA}"]\n[tenants.b]\nkey_hashes = ["{SHA}"]', "same key"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_with_the_place_and_without_a_key(
    text: str, named: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_key_file(text)
    assert named in str(refused.value)
    assert KEY not in str(refused.value)


def test_without_keys_every_credential_is_a_tenant_of_its_own() -> None:
    tenancy = TenancyByCredential()
    assert tenancy.tenant(bearer("a"), "") == tenant_digest("a")
    assert tenancy.tenant({}, "") == tenant_digest("anonymous")
    assert tenancy.tenant({"x-api-key": "a"}, "") == tenant_digest("a")


@pytest.mark.parametrize("peer", ["10.1.2.3", "::ffff:10.1.2.3", "fd00::1", "fd00::1%eth0"])
def test_a_gateway_is_believed_from_its_networks(peer: str) -> None:
    tenancy = TenancyByGateway("X-Tenant", parse_networks("10.0.0.0/8, fd00::/8"))
    assert tenancy.tenant({"X-Tenant": "acme"}, peer) == "acme"


@pytest.mark.parametrize(
    ("peer", "name"),
    [("192.0.2.1", "acme"), ("", "acme"), ("/run/socket", "acme"), ("10.0.0.1", ""), ("10.0.0.1", "a b")],
)
def test_nobody_else_names_a_tenant_and_a_gateway_names_a_proper_one(peer: str, name: str) -> None:
    with pytest.raises(NotOwner):
        TenancyByGateway("X-Tenant", parse_networks("10.0.0.0/8")).tenant({"X-Tenant": name}, peer)


def test_a_network_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        parse_networks("10.0.0.0/8,somewhere")
