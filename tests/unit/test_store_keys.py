"""Keys hold whatever names others choose, and keep what differs apart."""

import pytest

from kvlease.store import keys


@pytest.mark.parametrize("name", ["", "a/b", "../../x", "\x00", "ä" * 4000])
def test_a_key_is_short_and_plain_whatever_the_name_contains(name: str) -> None:
    for key in (keys.engine_key(name), keys.boot_key(name), keys.conversation_key(name, name.encode())):
        assert key.startswith(keys.ROOT)
        assert key.isascii()
        assert len(key) < 100
        assert key.count("/") == 4


def test_tenant_and_conversation_are_not_run_together() -> None:
    assert keys.conversation_key("ab", b"c") != keys.conversation_key("a", b"bc")


def test_a_lease_key_ends_in_its_id() -> None:
    assert keys.lease_key(255) == "/kvlease/v1/leases/00000000000000ff"
