"""A registry and two sidecars as processes over a real etcd, and engines that hold leases in this process."""

import asyncio
import os
import sys
import tempfile
import urllib.request
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from kvlease.core.attachment import EngineFacts
from kvlease.core.clock import Clock
from kvlease.core.digests import ChainRoot, chain
from kvlease.core.errors import HolderUnreachable
from kvlease.core.holding import Grant
from kvlease.core.ids import Holder
from kvlease.core.lease import LeaseKind
from kvlease.core.records import KvLayout, KvLocation
from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.dev.engine_process import free_ports
from kvlease.runtime.child_process import tied_to_this_process
from kvlease.testing.connector import FakeConnector
from kvlease.v1 import connector_pb2

BLOCK_TOKENS = 32
TENANT = "tenant"
GRANT_S = 600.0
"""Provisional time of a grant here: long enough to confirm all of them in one heartbeat."""

START_S = 60.0
ETCD_QUOTA_BYTES = 2 << 30

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_DIGESTS = chain(ChainRoot(TENANT, "bench"), list(range(BLOCK_TOKENS)), BLOCK_TOKENS).digests


class TimedEngine(FakeConnector):
    """An engine that notes when its table has applied each renewal."""

    def __init__(self, number: int, clock: Clock) -> None:
        layout = KvLayout(BLOCK_TOKENS, "bfloat16", 1, 1, BLOCK_TOKENS * (256 << 10), "bench")
        holder = Holder(f"bench-{number}", "boot", 1)
        facts = EngineFacts(holder, "bench", layout, KvLocation("127.0.0.1", 1), total_blocks=1 << 20)
        super().__init__(facts, clock)
        self._time = clock
        self.lease_ids: tuple[int, ...] = ()
        self.renewed_s: list[float] = []

    def hold(self, lease_ids: Iterable[int]) -> None:
        """Grants one lease of one block for each id."""
        before = len(self.lease_ids)
        self.lease_ids += tuple(lease_ids)
        for number, lease_id in enumerate(self.lease_ids[before:], start=before):
            self.grant(
                Grant(
                    lease_id=lease_id,
                    kind=LeaseKind.CONVERSATION,
                    block_ids=(number,),
                    digests=_DIGESTS,
                    tokens=BLOCK_TOKENS,
                    block_size=BLOCK_TOKENS,
                    tenant=TENANT,
                    conversation_key=lease_id.to_bytes(8, "big"),
                    chain_keys=(lease_id,),
                    model="bench",
                ),
                GRANT_S,
            )

    def _on_renew(self, command: connector_pb2.RenewCommand) -> connector_pb2.AttachRequest:
        answer = super()._on_renew(command)
        self.renewed_s.append(self._time.now_s())
        return answer


class LeaseFleet:
    """What `kvlease bench leases` measures."""

    def __init__(self, directory: Path, etcd: EmbeddedEtcd, stack: AsyncExitStack) -> None:
        self.etcd = etcd
        self.registry_address = f"127.0.0.1:{free_ports(1)[0]}"
        self.engines: list[TimedEngine] = []
        self._socket_dirs = (directory / "s0", directory / "s1")
        self._log = directory / "log"
        self._stack = stack
        self._registry: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the registry and the sidecars."""
        self._registry = await self._process("registry", "--listen", self.registry_address)
        for socket_dir in self._socket_dirs:
            await self._process("sidecar", "--allow-loopback", "--socket-dir", str(socket_dir))

    async def attach(self, engine: TimedEngine, sidecar: int) -> None:
        """Attaches an engine to the sidecar with that number, which may still be starting.

        Raises:
            HolderUnreachable: it did not start.
        """
        socket = self._socket_dirs[sidecar] / "sidecar.sock"
        try:
            async with asyncio.timeout(START_S):
                while not socket.exists():  # noqa: ASYNC110 - another process makes it
                    await asyncio.sleep(0.05)
        except TimeoutError as error:
            raise HolderUnreachable(f"the sidecar did not start: {self._log.read_text()}") from error
        await engine.attach(socket)
        self._stack.push_async_callback(engine.detach)
        self.engines.append(engine)

    def registry_cpu_s(self) -> float:
        """CPU time that the registry has used so far, in seconds."""
        if self._registry is None:
            raise RuntimeError("the registry was not started")
        fields = Path(f"/proc/{self._registry.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    async def etcd_writes(self) -> int:
        """Everything that etcd has written so far: proposals that its members agreed on."""
        return await asyncio.to_thread(_metric, self.etcd.endpoint, "etcd_server_proposals_committed_total")

    async def _process(self, *arguments: str) -> asyncio.subprocess.Process:
        etcd = ("--etcd-endpoints", self.etcd.endpoint, "--etcd-accept-old", "--log-level", "warning")
        command = (sys.executable, "-m", "kvlease.cli", *arguments, *etcd)
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(*tied_to_this_process(command), stderr=log)
        self._stack.push_async_callback(_ended, process)
        return process


@asynccontextmanager
async def lease_fleet() -> AsyncGenerator[LeaseFleet, None]:
    """A fleet that is started, and ended with the context."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvlease-bench-")))
        etcd = EmbeddedEtcd(("--quota-backend-bytes", str(ETCD_QUOTA_BYTES)))
        stack.push_async_callback(etcd.stop)
        await etcd.start()
        fleet = LeaseFleet(directory, etcd, stack)
        await fleet.start()
        yield fleet


def share(lease_ids: Sequence[int], engines: int) -> list[Sequence[int]]:
    """The lease ids of each engine, as equal in number as can be."""
    return [lease_ids[number::engines] for number in range(engines)]


def _metric(endpoint: str, name: str) -> int:
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return int(float(next(line.split()[1] for line in lines if line.startswith(name + " "))))


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
