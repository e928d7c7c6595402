"""The operations and comparisons of etcd's transactions, in words."""

from kvlease.etcd import etcd_pb2

OPERATIONS_MAX = 128
"""etcd's default of `--max-txn-ops`."""


def put(key: str, value: bytes, lease: int) -> etcd_pb2.RequestOp:
    """Stores a value that vanishes with a lease."""
    return etcd_pb2.RequestOp(request_put=etcd_pb2.PutRequest(key=key.encode(), value=value, lease=lease))


def get(key: str) -> etcd_pb2.RequestOp:
    """Reads a key."""
    return etcd_pb2.RequestOp(request_range=etcd_pb2.RangeRequest(key=key.encode()))


def delete(key: str, *, prev_kv: bool = False) -> etcd_pb2.RequestOp:
    """Deletes a key, and answers what it was."""
    return etcd_pb2.RequestOp(
        request_delete_range=etcd_pb2.DeleteRangeRequest(key=key.encode(), prev_kv=prev_kv)
    )


def nested(request: etcd_pb2.TxnRequest) -> etcd_pb2.RequestOp:
    """A transaction within a transaction."""
    return etcd_pb2.RequestOp(request_txn=request)


def unchanged(key: str, mod_revision: int) -> etcd_pb2.Compare:
    """Whether a key was last changed in a revision; 0: does not exist."""
    return etcd_pb2.Compare(
        result=etcd_pb2.Compare.EQUAL,
        target=etcd_pb2.Compare.MOD,
        key=key.encode(),
        mod_revision=mod_revision,
    )


def has_lease(key: str, lease: int) -> etcd_pb2.Compare:
    """Whether a key exists and vanishes with a lease."""
    return etcd_pb2.Compare(
        result=etcd_pb2.Compare.EQUAL, target=etcd_pb2.Compare.LEASE, key=key.encode(), lease=lease
    )


def found(response: etcd_pb2.ResponseOp) -> etcd_pb2.KeyValue | None:
    """What a `get` found."""
    kvs = response.response_range.kvs
    return kvs[0] if kvs else None
