"""What lies under the keys in etcd: the messages of `protos/kvlease/v1`, serialized."""

from dataclasses import replace

from google.protobuf.message import DecodeError

from kvlease.core.errors import InvalidArgument
from kvlease.core.records import Engine, LeaseRecord
from kvlease.etcd import etcd_pb2
from kvlease.v1 import lease_pb2, registry_pb2, store_pb2
from kvlease.wire.engines import engine_from_wire, engine_to_wire
from kvlease.wire.leases import lease_from_wire, lease_to_wire


def engine_value(engine: Engine) -> bytes:
    """The bytes of a registration."""
    return engine_to_wire(engine).SerializeToString()


def engine_of(kv: etcd_pb2.KeyValue) -> Engine:
    """The registration under a key.

    Raises:
        InvalidArgument: it is none that this version knows.
    """
    try:
        return engine_from_wire(registry_pb2.Engine.FromString(kv.value))
    except DecodeError as error:
        raise InvalidArgument("the bytes are no registration") from error


def lease_value(record: LeaseRecord) -> bytes:
    """The bytes of a record. Its generation is the revision in which the key was made, so it is not inside."""
    return lease_to_wire(replace(record, generation=0)).SerializeToString()


def lease_of(kv: etcd_pb2.KeyValue) -> LeaseRecord:
    """The record under a key.

    Raises:
        InvalidArgument: it is none that this version knows.
    """
    try:
        record = lease_from_wire(lease_pb2.Lease.FromString(kv.value))
    except DecodeError as error:
        raise InvalidArgument("the bytes are no lease record") from error
    return replace(record, generation=kv.create_revision)


def conversation_value(lease_id: int, predecessors: tuple[int, ...]) -> bytes:
    """The bytes that name a conversation's one lease."""
    return store_pb2.ConversationLease(lease_id=lease_id, predecessors=predecessors).SerializeToString()


def conversation_of(kv: etcd_pb2.KeyValue | None) -> tuple[int, tuple[int, ...]]:
    """A conversation's lease and its predecessors; 0 and none when there is no key, or it is not readable."""
    if kv is None:
        return 0, ()
    try:
        message = store_pb2.ConversationLease.FromString(kv.value)
    except DecodeError:
        return 0, ()
    return message.lease_id, tuple(message.predecessors)
