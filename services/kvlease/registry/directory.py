"""The registered engines as the store's watch tells them."""

import asyncio
import logging

from kvlease.core.errors import StoreUnavailable
from kvlease.core.records import Engine
from kvlease.store.port import Batch, Store

RETRY_S = 0.5

_log = logging.getLogger(__name__)


class EngineDirectory:
    """Finds engines without asking the store, also while it is away: what it knew then stays.

    An engine that moved meanwhile is not found where it was: that is a miss, as if its sidecar were away.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engines: dict[str, Engine] = {}
        self._told = asyncio.Event()

    def get(self, engine_id: str) -> Engine | None:
        """The engine that is registered under an id, if the watch has told so."""
        return self._engines.get(engine_id)

    def all(self) -> tuple[Engine, ...]:
        """Every engine that the watch has told of."""
        return tuple(self._engines.values())

    async def told(self) -> None:
        """Waits until the store has told of its engines for the first time."""
        await self._told.wait()

    async def follow(self) -> None:
        """Keeps in step with the store until cancelled."""
        while True:
            try:
                async with self._store.watch_engines() as batches:
                    async for batch in batches:
                        self._apply(batch)
            except StoreUnavailable as error:
                _log.warning("the watch of engines broke", extra={"reason": str(error)})
            await asyncio.sleep(RETRY_S)

    def _apply(self, batch: Batch[Engine]) -> None:
        if batch.snapshot:
            self._engines.clear()
        for change in batch.changes:
            if change.gone:
                self._engines.pop(change.item.holder.engine_id, None)
            else:
                self._engines[change.item.holder.engine_id] = change.item
        self._told.set()
