"""Ends everything that a conversation, or a whole tenant, keeps in the engines."""

import asyncio

from kvlease.router.conversation import Conversation
from kvlease.router.turn import TurnServices

RELEASES_AT_ONCE = 64
"""Releases in flight: a purge of many leases must not hold up the pins of others at the registry."""


async def release_conversation(services: TurnServices, conversation: Conversation) -> bool:
    """Releases the leases of all that goes under a conversation's id; whether one of them was held until then."""
    table, released = services.conversations, False
    leases = [table.release(leaf) for leaf in table.leaves(conversation)]
    for lease in leases:
        if lease is not None:
            engine_id = lease.holder.engine_id
            miss = await services.registry.release(lease.lease_id, engine_id, conversation.tenant)
            released = released or miss is None
    return released


async def release_tenant(services: TurnServices, tenant: str) -> int:
    """Releases every lease of a tenant that this router or the registry's watch knows of; how many ended.

    A lease that another router grants meanwhile is not among them. Each call has its own deadline; a lease
    whose holder does not answer ends by its own.
    """
    gate = asyncio.Semaphore(RELEASES_AT_ONCE)

    async def release(lease_id: int, engine_id: str) -> bool:
        async with gate:
            return await services.registry.release(lease_id, engine_id, tenant) is None

    services.responses.forget_tenant(tenant)
    leases = services.conversations.release_tenant(tenant)
    released = await asyncio.gather(*(release(lease_id, engine_id) for lease_id, engine_id in leases))
    return sum(released)
