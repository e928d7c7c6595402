"""A store in etcd: what any number of sidecars and registries share.

A session is an etcd lease, to which a registration and its records are attached. Each transaction of a
session compares the lease of the engine's key, so that the session which registered an engine last is the
only one that writes for it.
"""

import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from kvlease.core.errors import EngineIdReused, InvalidArgument
from kvlease.core.records import Engine, LeaseRecord
from kvlease.etcd import etcd_pb2
from kvlease.store.etcd_client import EtcdClient, EtcdOptions
from kvlease.store.etcd_mirror import EtcdMirror
from kvlease.store.etcd_operations import found, get, put, unchanged
from kvlease.store.etcd_session import BOOT_TTL_S, EtcdSession
from kvlease.store.etcd_values import engine_of, engine_value, lease_of
from kvlease.store.etcd_watch import WatchTimes
from kvlease.store.keys import ENGINES, LEASES, boot_key, engine_key, lease_key
from kvlease.store.port import WATCH_QUEUE_MAX, Batch, Item

_log = logging.getLogger(__name__)


class EtcdStore:
    """A `Store` in etcd. Calls answer within `options.call_s`, or a few of them where one needs several."""

    def __init__(
        self,
        options: EtcdOptions,
        watch_queue_max: int = WATCH_QUEUE_MAX,
        watch_times: WatchTimes | None = None,
    ) -> None:
        times = watch_times or WatchTimes()
        self._client = EtcdClient(options)
        self._engines = EtcdMirror[Engine](self._client, ENGINES, engine_of, watch_queue_max, times)
        self._leases = EtcdMirror[LeaseRecord](self._client, LEASES, lease_of, watch_queue_max, times)

    async def close(self) -> None:
        """Closes the way to etcd; watches are left before."""
        await self._client.close()

    async def open_session(self, engine: Engine, ttl_s: float) -> EtcdSession:
        """Registers an engine in a session that ends `ttl_s` (whole seconds, rounded up) after its last renewal.

        Raises:
            EngineIdReused: the engine id was seen under another boot id within `BOOT_TTL_S`.
        """
        engine_id = engine.holder.engine_id
        boot = _same_boot(engine, await self._client.get(boot_key(engine_id)))
        lease = await self._client.grant(math.ceil(ttl_s))
        while True:
            boot_lease = await self._boot_lease(boot)
            request = etcd_pb2.TxnRequest(
                compare=[unchanged(boot_key(engine_id), 0 if boot is None else boot.mod_revision)],
                success=[
                    put(boot_key(engine_id), engine.holder.boot_id.encode(), boot_lease),
                    put(engine_key(engine_id), engine_value(engine), lease),
                ],
                failure=[get(boot_key(engine_id))],
            )
            response = await self._client.transact(request)
            if response.succeeded:
                return EtcdSession(self._client, engine_id, lease, boot_lease)
            boot = _same_boot(engine, found(response.responses[0]))

    async def get_engine(self, engine_id: str) -> Engine | None:
        """The engine that is registered under an id."""
        kv = await self._client.get(engine_key(engine_id))
        return None if kv is None else _known(engine_of, kv)

    async def list_engines(self) -> tuple[Engine, ...]:
        """Every registered engine."""
        kvs, _ = await self._client.list_prefix(ENGINES)
        return tuple(engine for kv in kvs if (engine := _known(engine_of, kv)) is not None)

    async def get_lease(self, lease_id: int) -> LeaseRecord | None:
        """The record of a lease."""
        kv = await self._client.get(lease_key(lease_id))
        return None if kv is None else _known(lease_of, kv)

    async def list_leases(self, engine_id: str = "", tenant: str = "") -> tuple[LeaseRecord, ...]:
        """Every recorded lease of an engine and of a tenant; empty: of any."""
        kvs, _ = await self._client.list_prefix(LEASES)
        records = (record for kv in kvs if (record := _known(lease_of, kv)) is not None)
        return tuple(
            record
            for record in records
            if engine_id in ("", record.holder.engine_id) and tenant in ("", record.tenant)
        )

    def watch_engines(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[Engine]]]:
        """First a snapshot, then every change; waits for etcd instead of raising."""
        return self._engines.watch()

    def watch_leases(self) -> AbstractAsyncContextManager[AsyncIterator[Batch[LeaseRecord]]]:
        """First a snapshot, then every change; waits for etcd instead of raising."""
        return self._leases.watch()

    async def _boot_lease(self, boot: etcd_pb2.KeyValue | None) -> int:
        """The lease of an engine's boot id: the one that stands, or another one."""
        if boot is not None and boot.lease and await self._client.keep_alive(boot.lease):
            return boot.lease
        return await self._client.grant(BOOT_TTL_S)


def _same_boot(engine: Engine, boot: etcd_pb2.KeyValue | None) -> etcd_pb2.KeyValue | None:
    """What is remembered of an engine id.

    Raises:
        EngineIdReused: another boot id.
    """
    if boot is not None and boot.value != engine.holder.boot_id.encode():
        raise EngineIdReused(
            f"engine id {engine.holder.engine_id} was seen under another boot id: leave `engine_id` out of "
            "kv_transfer_config, so that each start of the engine draws its own"
        )
    return boot


def _known(parse: Callable[[etcd_pb2.KeyValue], Item], kv: etcd_pb2.KeyValue) -> Item | None:
    try:
        return parse(kv)
    except InvalidArgument as error:
        _log.warning("a record was left out", extra={"key": kv.key.decode(), "reason": str(error)})
        return None
