"""Stock etcd3, which needs another protobuf than ours, reads and watches what the store writes."""

import asyncio
import fcntl
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.dev.engine_env import cache_root, find_uv, python_of
from kvlease.store.etcd import EtcdStore
from kvlease.store.keys import LEASES, ROOT, conversation_key, lease_key
from kvlease.v1 import lease_pb2, store_pb2
from kvlease.wire.leases import lease_from_wire
from stubs.etcd import options_of
from stubs.records import engine, lease

REQUIREMENTS = ("etcd3==0.12.0", "protobuf<4", "setuptools<81")
SCRIPT = Path(__file__).with_name("stock_etcd3.py")


@pytest.fixture(scope="module")
def stock_python() -> Path:
    """The interpreter of an environment with stock etcd3, in the user cache; built once, in seconds."""
    target = cache_root() / f"etcd3-0.12.0-py{sys.version_info.major}.{sys.version_info.minor}"
    target.parent.mkdir(parents=True, exist_ok=True)
    done = target / "done"
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            run = [find_uv(), "venv", "--quiet", "--clear", "--python", sys.executable, str(target)]
            subprocess.run(run, check=True)
            python = ["--python", str(python_of(target))]
            subprocess.run([find_uv(), "pip", "install", "--quiet", *python, *REQUIREMENTS], check=True)
            done.touch()
    return python_of(target)


@pytest.fixture
async def etcd() -> AsyncIterator[EmbeddedEtcd]:
    etcd = EmbeddedEtcd()
    await etcd.start()
    yield etcd
    await etcd.stop()


async def line_of(process: asyncio.subprocess.Process) -> Any:
    assert process.stdout is not None
    return json.loads(await asyncio.wait_for(process.stdout.readline(), 60))


async def test_stock_etcd3_reads_and_watches_engines_and_leases(
    etcd: EmbeddedEtcd, stock_python: Path
) -> None:
    store = EtcdStore(options_of(etcd))
    session = await store.open_session(engine(), 600.0)
    await session.record_lease(lease(1), 0)
    host, _, port = etcd.endpoint.rpartition(":")
    command = (str(stock_python), str(SCRIPT), host, port, f"{ROOT}/", "5")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        read = {key: bytes.fromhex(value) for key, value in (await line_of(process))["read"]}
        assert len(read) == 4  # the engine, its boot id, a lease and its conversation
        written = lease_from_wire(lease_pb2.Lease.FromString(read[lease_key(1)]))
        assert written == lease(1)
        leaf = conversation_key("t", b"c")
        assert store_pb2.ConversationLease.FromString(read[leaf]).lease_id == 1

        await session.record_lease(lease(2), 1)
        await session.remove_leases((2,))
        seen = [await line_of(process) for _ in range(5)]
        assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await store.close()
    kinds = sorted((event["kind"], event["key"].removeprefix(LEASES)) for event in seen)
    assert kinds == sorted(
        [
            ("PutEvent", lease_key(2).removeprefix(LEASES)),
            ("PutEvent", leaf),
            ("DeleteEvent", lease_key(1).removeprefix(LEASES)),
            ("DeleteEvent", lease_key(2).removeprefix(LEASES)),
            ("DeleteEvent", leaf),
        ]
    )
