"""One engine's registration and records in etcd, attached to one lease of etcd."""

import asyncio
from collections.abc import Sequence

from kvlease.core.errors import InvalidArgument, StoreUnavailable
from kvlease.core.records import Engine, LeaseRecord
from kvlease.etcd import etcd_pb2
from kvlease.store.etcd_client import EtcdClient
from kvlease.store.etcd_operations import delete, found, get, has_lease, nested, put, unchanged
from kvlease.store.etcd_values import conversation_of, conversation_value, engine_value, lease_of, lease_value
from kvlease.store.keys import conversation_key, engine_key, lease_key, lease_of_key
from kvlease.store.port import Recorded, predecessors_of

BOOT_TTL_S = 24 * 3600
"""How long an engine id is remembered after its last session; etcd keeps one small key for each meanwhile."""

REMOVED_MAX = 50
"""Leases of one transaction: two operations each, of the 128 that etcd allows by default."""


class EtcdSession:
    """A `Session` of an `EtcdStore`."""

    def __init__(self, client: EtcdClient, engine_id: str, lease: int, boot_lease: int) -> None:
        self._client = client
        self._engine_id = engine_id
        self._engine_key = engine_key(engine_id)
        self._lease = lease
        self._boot_lease = boot_lease
        self._boot_due_s = asyncio.get_running_loop().time() + BOOT_TTL_S / 4
        self._ended = False
        self._conversation_keys: dict[int, str] = {}

    async def renew(self) -> bool:
        """Keeps the session for another time to live. False when it is over."""
        if self._ended or not await self._client.keep_alive(self._lease):
            return False
        await self._renew_boot()
        registered = await self._client.get(self._engine_key)
        return registered is not None and registered.lease == self._lease

    async def put_engine(self, engine: Engine) -> None:
        """Replaces the registration, for a new epoch of the same engine process."""
        if engine.holder.engine_id != self._engine_id:
            raise InvalidArgument("a session registers one engine")
        await self._transact([], [put(self._engine_key, engine_value(engine), self._lease)], [])

    async def record_lease(self, record: LeaseRecord, supersedes: int) -> Recorded:
        """Records a confirmed lease and makes it its conversation's only one, by compare and swap."""
        leaf = conversation_key(record.tenant, record.conversation_key) if record.conversation_key else ""
        self._conversation_keys[record.lease_id] = leaf
        standing: etcd_pb2.KeyValue | None = None
        while True:
            standing_id, before = conversation_of(standing)
            if record.lease_id in before:
                del self._conversation_keys[record.lease_id]
                return Recorded(0)
            known = predecessors_of(record.lease_id, supersedes, standing_id, before)
            writes = [
                put(lease_key(record.lease_id), lease_value(record), self._lease),
                get(lease_key(record.lease_id)),
            ]
            if standing_id not in (0, record.lease_id):
                writes.append(delete(lease_key(standing_id), prev_kv=True))
            if leaf:
                writes.append(put(leaf, conversation_value(record.lease_id, known), self._lease))
            response = await self._transact(
                [unchanged(leaf, 0 if standing is None else standing.mod_revision)] if leaf else [],
                writes,
                [get(leaf)] if leaf else [],
            )
            if response.succeeded:
                return _recorded(response)
            standing = found(response.responses[1])

    async def remove_leases(self, lease_ids: Sequence[int]) -> None:
        """Removes those records that the session owns, and frees their conversations."""
        await self._transact([], [], [])
        owned = [lease_id for lease_id in lease_ids if lease_id in self._conversation_keys]
        for start in range(0, len(owned), REMOVED_MAX):
            await self._remove(owned[start : start + REMOVED_MAX])

    async def list_recorded(self) -> frozenset[int]:
        """Leases whose records etcd has in this session."""
        await self._transact([], [], [])
        keys = await self._client.attached_keys(self._lease)
        recorded = frozenset(lease_id for key in keys if (lease_id := lease_of_key(key)) is not None)
        for lease_id in recorded - self._conversation_keys.keys():
            kv = await self._client.get(lease_key(lease_id))
            record = None if kv is None else lease_of(kv)
            named = record is not None and record.conversation_key
            self._conversation_keys[lease_id] = (
                conversation_key(record.tenant, record.conversation_key) if record and named else ""
            )
        return recorded

    async def end(self) -> None:
        """Removes the registration and every record of the session in one revision."""
        self._ended = True
        self._conversation_keys.clear()
        await self._client.revoke(self._lease)

    # --- inside -------------------------------------------------------------------------------------------

    async def _transact(
        self,
        compare: list[etcd_pb2.Compare],
        success: list[etcd_pb2.RequestOp],
        failure: list[etcd_pb2.RequestOp],
    ) -> etcd_pb2.TxnResponse:
        """A transaction of the session that still owns its engine; the first response of a failure is not for us.

        Raises:
            StoreUnavailable: the session is over.
        """
        if self._ended:
            raise StoreUnavailable(f"the session of engine {self._engine_id} is over")
        owns = has_lease(self._engine_key, self._lease)
        response = await self._client.transact(
            etcd_pb2.TxnRequest(
                compare=[owns, *compare], success=success, failure=[get(self._engine_key), *failure]
            )
        )
        if not response.succeeded:
            registered = found(response.responses[0])
            if registered is None or registered.lease != self._lease:
                raise StoreUnavailable(f"the session of engine {self._engine_id} is over")
        return response

    async def _remove(self, lease_ids: Sequence[int]) -> None:
        """Removes at most `REMOVED_MAX` records, each with its conversation if that still names it."""
        leaves = [leaf for lease_id in lease_ids if (leaf := self._conversation_keys[lease_id])]
        read = await self._client.transact(etcd_pb2.TxnRequest(success=[get(leaf) for leaf in leaves]))
        standing = dict(zip(leaves, map(found, read.responses), strict=True))
        writes: list[etcd_pb2.RequestOp] = []
        for lease_id in lease_ids:
            writes.append(delete(lease_key(lease_id)))
            leaf = self._conversation_keys[lease_id]
            kv = standing.get(leaf)
            if kv is not None and conversation_of(kv)[0] == lease_id:
                freed = etcd_pb2.TxnRequest(
                    compare=[unchanged(leaf, kv.mod_revision)], success=[delete(leaf)]
                )
                writes.append(nested(freed))
        await self._transact([], writes, [])
        for lease_id in lease_ids:
            self._conversation_keys.pop(lease_id, None)

    async def _renew_boot(self) -> None:
        """Keeps the engine's boot id remembered for as long as the session lasts."""
        now_s = asyncio.get_running_loop().time()
        if now_s >= self._boot_due_s and await self._client.keep_alive(self._boot_lease):
            self._boot_due_s = now_s + BOOT_TTL_S / 4


def _recorded(response: etcd_pb2.TxnResponse) -> Recorded:
    """What a transaction of `record_lease` did."""
    written = found(response.responses[1])
    assert written is not None
    superseded: LeaseRecord | None = None
    for one in response.responses:
        for kv in one.response_delete_range.prev_kvs:
            superseded = lease_of(kv)
    return Recorded(written.create_revision, superseded)
