"""Keeps a table in step with one of the registry's watches."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from kvlease.core.errors import HolderUnreachable, KvleaseError
from kvlease.core.records import Engine, LeaseRecord
from kvlease.store.port import Batch

RECONNECT_S = 0.5

log = logging.getLogger(__name__)
Item = TypeVar("Item", Engine, LeaseRecord)


def why_broken(error: KvleaseError) -> str:
    """What the log says of a stream of a registry's: of one that is away, all that is known is how it was asked."""
    return f"the registry does not answer: {error}" if isinstance(error, HolderUnreachable) else str(error)


async def follow(
    name: str,
    watch: Callable[[], AbstractAsyncContextManager[AsyncIterator[Batch[Item]]]],
    apply: Callable[[Batch[Item]], None],
) -> None:
    """Applies every batch until cancelled; while the registry is away, what is known stays."""
    told = False
    while True:
        try:
            async with watch() as batches:
                async for batch in batches:
                    told = False
                    apply(batch)
        except KvleaseError as error:
            if not told:
                log.warning("watch broke", extra={"watch": name, "reason": why_broken(error)})
            told = True
        except Exception:
            # Without this task the router would go on with the engines and leases of this moment for ever.
            if not told:
                log.exception("watch failed", extra={"watch": name})
            told = True
        await asyncio.sleep(RECONNECT_S)
