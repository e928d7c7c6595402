"""What tests do to a real etcd besides what the store does."""

from kvlease.etcd import etcd_pb2
from kvlease.store.etcd_client import EtcdClient, EtcdOptions, prefix_end
from kvlease.store.keys import ROOT


async def remove_everything(options: EtcdOptions) -> None:
    """Deletes every key of the store; the leases of earlier sessions go on, without keys."""
    client = EtcdClient(options)
    delete = etcd_pb2.DeleteRangeRequest(key=ROOT.encode(), range_end=prefix_end(ROOT))
    await client.transact(etcd_pb2.TxnRequest(success=[etcd_pb2.RequestOp(request_delete_range=delete)]))
    await client.close()
