"""One process's copy of everything below a prefix, for as long as somebody in it watches."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Generic

from kvlease.core.errors import InvalidArgument
from kvlease.etcd import etcd_pb2
from kvlease.store.etcd_client import EtcdClient
from kvlease.store.etcd_watch import PrefixWatch, WatchTimes
from kvlease.store.feed import Feed
from kvlease.store.port import Batch, Change, Item

_log = logging.getLogger(__name__)


class EtcdMirror(Generic[Item]):
    """Shares one watch of etcd among any number of watchers.

    The copy tells what a deleted key was, which etcd's events do not, and what changed while history was lost.

    Args:
        parse: the item of a key and value; `InvalidArgument` for what another version wrote.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        parse: Callable[[etcd_pb2.KeyValue], Item],
        queue_max: int,
        times: WatchTimes,
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._parse: Callable[[etcd_pb2.KeyValue], Item] = parse
        self._queue_max = queue_max
        self._times = times
        self._watchers = 0
        self._items: dict[bytes, Item] = {}
        self._loaded = asyncio.Event()
        self._feed: Feed[Item] = self._new_feed()
        self._follower: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[AsyncIterator[Batch[Item]], None]:
        """First a snapshot, as soon as etcd answers, then every change, until the context is left."""
        self._watchers += 1
        try:
            if self._follower is None:
                self._begin()
            await self._loaded.wait()
            with self._feed.watch() as batches:
                yield batches
        finally:
            self._watchers -= 1
            if self._watchers == 0:
                await self._end()

    def _begin(self) -> None:
        watch = PrefixWatch(self._client, self._prefix, self._on_all, self._on_revision, self._times)
        self._follower = asyncio.create_task(watch.run())

    async def _end(self) -> None:
        follower, self._follower = self._follower, None
        self._items, self._loaded, self._feed = {}, asyncio.Event(), self._new_feed()
        if follower is not None:
            follower.cancel()
            await asyncio.wait((follower,))

    def _new_feed(self) -> Feed[Item]:
        return Feed[Item](lambda: iter(self._items.values()), self._queue_max)

    def _on_all(self, kvs: Iterable[etcd_pb2.KeyValue]) -> None:
        before = self._items
        self._items = {kv.key: item for kv in kvs if (item := self._parsed(kv)) is not None}
        if not self._loaded.is_set():
            self._loaded.set()
            return
        changes: list[Change[Item]] = [
            Change(item) for key, item in self._items.items() if before.get(key) != item
        ]
        gone: list[Change[Item]] = [
            Change(item, gone=True) for key, item in before.items() if key not in self._items
        ]
        self._feed.publish(tuple(changes + gone))

    def _on_revision(self, events: Iterable[etcd_pb2.Event]) -> None:
        changes: list[Change[Item]] = []
        for event in events:
            item = self._parsed(event.kv) if event.type == etcd_pb2.Event.PUT else None
            if item is not None:
                self._items[event.kv.key] = item
                changes.append(Change(item))
            elif (last := self._items.pop(event.kv.key, None)) is not None:
                changes.append(Change(last, gone=True))
        self._feed.publish(tuple(changes))

    def _parsed(self, kv: etcd_pb2.KeyValue) -> Item | None:
        try:
            return self._parse(kv)
        except InvalidArgument as error:
            _log.warning("a record was left out", extra={"prefix": self._prefix, "reason": str(error)})
            return None
