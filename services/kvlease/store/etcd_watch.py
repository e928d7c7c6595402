"""Follows everything below one prefix of etcd, through restarts, silence, compaction and bursts.

The position is the last event's revision plus one. The header of a progress reply is no position: servers
before 3.5.8 can send it ahead of events.

Fragments are not asked for: etcd cuts them in quadratic time. The end of a session with 50,000 records comes as
one message of 2.3 MB, which needs no cutting.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc.aio

from kvlease.core.errors import StoreUnavailable
from kvlease.etcd import etcd_pb2
from kvlease.store.etcd_client import EtcdClient, WatchCall, is_about_token, prefix_end, unavailable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchTimes:
    """Bounds of a watch, in seconds.

    Attributes:
        idle_s: silence after which etcd is asked for progress.
        answer_s: an answer must come within this, or the watch is built anew at the next endpoint.
        retry_s: pause before a watch is built anew.
    """

    idle_s: float = 2.0
    answer_s: float = 2.0
    retry_s: float = 0.2


class _HistoryLostError(Exception):
    """The server cannot tell what happened since our position: compacted, or another history."""


class PrefixWatch:
    """Calls `replace` with all there is, first and whenever history was lost, and `apply` per revision.

    Neither may raise. Keys below the prefix only; all of one revision come in one call of `apply`.
    """

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        replace: Callable[[Iterable[etcd_pb2.KeyValue]], None],
        apply: Callable[[Iterable[etcd_pb2.Event]], None],
        times: WatchTimes,
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._replace = replace
        self._apply = apply
        self._times = times
        self._position = 0
        self._cluster_id = 0
        self._broken = False

    async def run(self) -> None:
        """Follows until cancelled; while etcd is away, what is known stays."""
        while True:
            endpoint = self._client.endpoint
            try:
                if self._position == 0:
                    await self._load()
                await self._follow(endpoint)
            except _HistoryLostError as error:
                _log.info("the watch begins anew", extra={"prefix": self._prefix, "reason": str(error)})
                self._position = 0
                continue
            except (StoreUnavailable, grpc.aio.AioRpcError) as error:
                self._client.leave(endpoint)
                self._tell_broken(error)
            except Exception:
                # Watchers would wait for ever while everything else goes on.
                _log.exception("a watch failed")
            await asyncio.sleep(self._times.retry_s)

    async def _load(self) -> None:
        kvs, header = await self._client.list_prefix(self._prefix)
        self._replace(kvs)
        self._position = header.revision + 1
        self._cluster_id = header.cluster_id

    async def _follow(self, endpoint: str) -> None:
        call = await self._client.open_watch(endpoint)
        create = etcd_pb2.WatchCreateRequest(
            key=self._prefix.encode(),
            range_end=prefix_end(self._prefix),
            start_revision=self._position,
        )
        try:
            await self._write(call, etcd_pb2.WatchRequest(create_request=create))
            while True:
                self._take(await self._read(call))
        finally:
            call.cancel()

    def _take(self, response: etcd_pb2.WatchResponse) -> None:
        if response.canceled:
            if response.compact_revision > 0:
                raise _HistoryLostError(f"compacted up to revision {response.compact_revision}")
            if is_about_token(response.cancel_reason):
                self._client.forget_token()
            raise StoreUnavailable(f"etcd ended the watch: {response.cancel_reason}")
        if response.created:
            self._begin(response.header)
        for revision, events in itertools.groupby(response.events, lambda event: event.kv.mod_revision):
            self._apply(events)
            self._position = revision + 1

    def _begin(self, header: etcd_pb2.ResponseHeader) -> None:
        if header.cluster_id != self._cluster_id or header.revision + 1 < self._position:
            raise _HistoryLostError("etcd was restored or replaced")
        if self._broken:
            self._broken = False
            _log.info("the watch goes on", extra={"prefix": self._prefix})

    async def _read(self, call: WatchCall) -> etcd_pb2.WatchResponse:
        """The next message; asks for one when there is none.

        Raises:
            StoreUnavailable: etcd is silent, or ended the stream.
        """
        # A cancelled read ends the whole call: so it is waited for, and asked beside.
        reading = asyncio.ensure_future(call.read())
        try:
            done, _ = await asyncio.wait((reading,), timeout=self._times.idle_s)
            if not done:
                request = etcd_pb2.WatchRequest(progress_request=etcd_pb2.WatchProgressRequest())
                await self._write(call, request)
                done, _ = await asyncio.wait((reading,), timeout=self._times.answer_s)
            if not done:
                raise StoreUnavailable(f"etcd's watch is silent for {self._times.answer_s:g} s")
            response = reading.result()
        finally:
            reading.cancel()
        if not isinstance(response, etcd_pb2.WatchResponse):
            raise StoreUnavailable("etcd ended the watch")
        return response

    async def _write(self, call: WatchCall, request: etcd_pb2.WatchRequest) -> None:
        try:
            async with asyncio.timeout(self._times.answer_s):
                await call.write(request)
        except TimeoutError as error:
            raise StoreUnavailable(f"etcd took no request for {self._times.answer_s:g} s") from error

    def _tell_broken(self, error: StoreUnavailable | grpc.aio.AioRpcError) -> None:
        if isinstance(error, grpc.aio.AioRpcError):
            error = unavailable(error)
        if not self._broken:
            self._broken = True
            _log.warning("the watch broke", extra={"prefix": self._prefix, "reason": str(error)})
