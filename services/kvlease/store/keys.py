"""The keys under which a store keeps things. Names that others choose are hashed: they may contain anything.

/kvlease/v1/engines/<digest of engine id>                    registration, in its session
/kvlease/v1/boots/<digest of engine id>                      boot id last seen, outlives sessions
/kvlease/v1/leases/<lease id in hex>                         lease record, in its engine's session
/kvlease/v1/conversations/<digest of tenant and conversation>  the conversation's lease, in the same session
"""

import struct
from hashlib import blake2b

from kvlease.core.ids import lease_id_from_hex, lease_id_to_hex

ROOT = "/kvlease/v1"
ENGINES = f"{ROOT}/engines/"
BOOTS = f"{ROOT}/boots/"
LEASES = f"{ROOT}/leases/"
CONVERSATIONS = f"{ROOT}/conversations/"


def engine_key(engine_id: str) -> str:
    """Where an engine's registration lies."""
    return ENGINES + _digest(engine_id.encode())


def boot_key(engine_id: str) -> str:
    """Where the boot id lies under which an engine id was seen."""
    return BOOTS + _digest(engine_id.encode())


def lease_key(lease_id: int) -> str:
    """Where a lease's record lies."""
    return LEASES + lease_id_to_hex(lease_id)


def lease_of_key(key: str) -> int | None:
    """The lease whose record lies under a key, None for another key."""
    return lease_id_from_hex(key.removeprefix(LEASES)) if key.startswith(LEASES) else None


def conversation_key(tenant: str, conversation: bytes) -> str:
    """Where a conversation's one lease is named. Two tenants never meet."""
    return CONVERSATIONS + _digest(tenant.encode(), conversation)


def _digest(*parts: bytes) -> str:
    digest = blake2b(digest_size=16, person=b"kvlease-key")
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)
    return digest.hexdigest()
