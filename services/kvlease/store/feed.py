"""Carries what one process knows of a store's changes to any number of watchers in it."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Generic

from kvlease.store.port import Batch, Change, Item


class Feed(Generic[Item]):
    """Carries changes to any number of watchers, each with a bounded queue."""

    def __init__(self, snapshot: Callable[[], Iterator[Item]], queue_max: int) -> None:
        self._snapshot: Callable[[], Iterator[Item]] = snapshot
        self._queue_max = queue_max
        self._watchers: dict[_Watcher[Item], None] = {}  # in order, so that a simulation repeats

    def publish(self, changes: tuple[Change[Item], ...]) -> None:
        """Hands one transaction's changes to every watcher."""
        if changes:
            for watcher in self._watchers:
                watcher.add(Batch(changes), self._queue_max)

    @contextmanager
    def watch(self) -> Generator[AsyncIterator[Batch[Item]], None, None]:
        """A watcher for as long as the context lasts."""
        watcher = _Watcher(self.snapshot)
        self._watchers[watcher] = None
        try:
            yield watcher
        finally:
            self._watchers.pop(watcher, None)

    def snapshot(self) -> Batch[Item]:
        """All there is."""
        return Batch(tuple(Change(item) for item in self._snapshot()), snapshot=True)


class _Watcher(AsyncIterator[Batch[Item]]):
    def __init__(self, snapshot: Callable[[], Batch[Item]]) -> None:
        self._snapshot: Callable[[], Batch[Item]] = snapshot
        self._needs_snapshot = True
        self._waiting: deque[Batch[Item]] = deque()
        self._filled = asyncio.Event()
        self._filled.set()

    def add(self, batch: Batch[Item], queue_max: int) -> None:
        if not self._needs_snapshot:
            self._waiting.append(batch)
            if len(self._waiting) > queue_max:
                self._waiting.clear()
                self._needs_snapshot = True
        self._filled.set()

    async def __anext__(self) -> Batch[Item]:
        await self._filled.wait()
        if self._needs_snapshot:
            self._needs_snapshot = False
            batch = self._snapshot()
        else:
            batch = self._waiting.popleft()
        if not self._waiting:
            self._filled.clear()
        return batch
