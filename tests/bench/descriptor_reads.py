"""READs between two NIXL agents without an engine; runs in the engine environment, prints JSON lines.

    python tests/bench/descriptor_reads.py BLOCK_BYTES REGIONS BLOCKS,BLOCKS,... REPEATS

Memory lies as in vLLM: one region per layer's keys and values, each of blocks. A READ of n blocks is made in two
ways, from vLLM's prepared lists of a descriptor per block and region, and from lists that are made for it with one
per run of blocks; of blocks that lie in a run, named from its beginning or from its end, and of scattered ones.
"""

import json
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

MEMORY = "DRAM"


class Pool:
    """Registered memory: `regions` arrays of `blocks` blocks."""

    def __init__(self, name: str, regions: int, blocks: int, block_bytes: int, fill: int) -> None:
        self.agent: Any = nixl_agent(name, nixl_agent_config(backends=["UCX"], capture_telemetry=True))
        self.arrays = [np.full(blocks * block_bytes, fill, np.uint8) for _ in range(regions)]
        self.bases = [array.ctypes.data for array in self.arrays]
        spans = [(base, blocks * block_bytes, 0, "") for base in self.bases]
        self.agent.register_memory(self.agent.get_reg_descs(spans, MEMORY))


def descriptors(
    bases: Sequence[int], runs: Sequence[tuple[int, int]], block_bytes: int
) -> list[tuple[int, int, int]]:
    """(address, bytes, device) of every run of blocks in every region."""
    return [(base + first * block_bytes, count * block_bytes, 0) for base in bases for first, count in runs]


def hold(pipe: Connection, regions: int, blocks: int, block_bytes: int) -> None:
    """The peer whose memory is read, until the pipe says so."""
    pool = Pool("holder", regions, blocks, block_bytes, fill=7)
    pipe.send((pool.agent.get_agent_metadata(), pool.bases))
    pipe.recv()


class Reader:
    """READs from the peer."""

    def __init__(self, pipe: Connection, regions: int, blocks: int, block_bytes: int) -> None:
        self._pool = Pool("reader", regions, blocks, block_bytes, fill=0)
        self._agent = self._pool.agent
        metadata, self._remote = pipe.recv()
        self._peer = self._agent.add_remote_agent(metadata)
        self._blocks, self._bytes = blocks, block_bytes
        every = [(block, 1) for block in range(blocks)]
        self._local_list = self._prepared("NIXL_INIT_AGENT", self._pool.bases, every)
        self._remote_list = self._prepared(self._peer, self._remote, every)

    def _prepared(self, agent: str, bases: Sequence[int], runs: Sequence[tuple[int, int]]) -> Any:
        spans = self._agent.get_xfer_descs(descriptors(bases, runs, self._bytes), MEMORY)
        return self._agent.prep_xfer_dlist(agent, spans)

    def per_block(self, ids: Sequence[int]) -> Any:
        """A handle as vLLM makes it."""
        offsets = np.arange(len(self._remote))[:, None] * self._blocks
        wanted = (offsets + np.asarray(ids)[None, :]).ravel().astype(np.int32)
        return self._agent.make_prepped_xfer("READ", self._local_list, wanted, self._remote_list, wanted)

    def per_run(self, ids: Sequence[int]) -> Any:
        """A handle with one descriptor per run and region."""
        runs: list[tuple[int, int]] = []
        for block in ids:
            if runs and block == sum(runs[-1]):
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((block, 1))
        local, remote = (
            self._agent.get_xfer_descs(descriptors(bases, runs, self._bytes), MEMORY)
            for bases in (self._pool.bases, self._remote)
        )
        return self._agent.initialize_xfer("READ", local, remote, self._peer)

    def timed(self, make: Callable[[Sequence[int]], Any], ids: Sequence[int]) -> dict[str, float]:
        """Milliseconds of one READ by part, and the descriptors that NIXL says it used."""
        begun_s = time.perf_counter()
        handle = make(ids)
        made_s = time.perf_counter()
        self._agent.transfer(handle)
        posted_s = time.perf_counter()
        while self._agent.check_xfer_state(handle) == "PROC":
            time.sleep(0)
        ended_s = time.perf_counter()
        count = self._agent.get_xfer_telemetry(handle).descCount
        self._agent.release_xfer_handle(handle)
        parts = {"make": made_s - begun_s, "post": posted_s - made_s, "transfer": ended_s - posted_s}
        return {f"{name}_ms": took * 1e3 for name, took in parts.items()} | {
            "total_ms": (ended_s - begun_s) * 1e3,
            "descriptors": count,
        }

    def check(self, ids: Sequence[int]) -> None:
        """Every block that was read has the peer's content, in every region."""
        for array in self._pool.arrays:
            rows = array.reshape(self._blocks, self._bytes)
            assert (rows[list(ids)] == 7).all()
            array.fill(0)


def measure(block_bytes: int, regions: int, counts: Sequence[int], repeats: int) -> None:
    """Prints a line per number of blocks and way: medians of the repeats, the ways in turn."""
    blocks = 2 * max(counts)
    here, there = multiprocessing.Pipe()
    peer = multiprocessing.Process(target=hold, args=(there, regions, blocks, block_bytes), daemon=True)
    peer.start()
    reader = Reader(here, regions, blocks, block_bytes)
    for count in counts:
        run = list(range(count))
        scattered = [2 * block for block in random.Random(0).sample(range(blocks // 2), count)]
        ways: dict[str, tuple[Callable[[Sequence[int]], Any], Sequence[int]]] = {
            "a run, per block": (reader.per_block, run),
            "a run from its end, per block": (reader.per_block, run[::-1]),
            "a run, per run": (reader.per_run, run),
            "scattered, per block": (reader.per_block, scattered),
            "scattered, per run": (reader.per_run, scattered),
        }
        taken: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(repeats + 1):
            for name, (make, ids) in ways.items():
                taken[name].append(reader.timed(make, ids))
                reader.check(ids)
        for name, rows in taken.items():
            medians = {key: round(median(row[key] for row in rows[1:]), 3) for key in rows[0]}
            print(json.dumps({"blocks": count, "way": name, **medians}), flush=True)
    here.send(None)
    peer.join()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    measure(
        int(sys.argv[1]), int(sys.argv[2]), [int(part) for part in sys.argv[3].split(",")], int(sys.argv[4])
    )
