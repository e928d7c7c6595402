"""CPU of an idle decode engine that retains conversations, beside one that retains none, and beside stock vLLM.

    python -m tests.bench.idle_decode --conversations 8 --seconds 20 --output docs/benchmarks/DATE-idle-decode.json

Cores are CPU seconds of all threads of the engine's process group per second of wall time. NIXL's progress thread
spins in either engine, so the figure that counts is the difference to the same engine retaining nothing.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.engine.pair import MODEL, Pair, PairPlan, eventually

from kvlease.core.records import EngineRole
from kvlease.dev.check import FIRST, SYSTEM
from kvlease.dev.engine_env import ensure_engine_environment
from kvlease.dev.engine_process import ConnectorChoice, EngineProcess, EngineSpec, free_ports
from kvlease.dev.engine_process import EngineRole as ProcessRole
from kvlease.dev.tiny_model import ensure_tiny_model

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True)
class IdleFigure:
    """Cores that an idle decode engine uses.

    Attributes:
        retained_blocks: blocks that the engine keeps, -1 where it does not say.
    """

    engine: str
    conversations: int
    retained_blocks: int
    cores: float


def group_cpu_s(group: int) -> float:
    """CPU seconds that every process of a process group has used so far."""
    total = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


async def idle_cores(group: int, seconds: float) -> float:
    """Cores that a process group uses over `seconds`, after it has settled."""
    await asyncio.sleep(SETTLE_S)
    before, began_s = group_cpu_s(group), time.monotonic()
    await asyncio.sleep(seconds)
    return round((group_cpu_s(group) - before) / (time.monotonic() - began_s), 3)


def conversation(number: int) -> list[dict[str, Any]]:
    """A first request that no other shares."""
    return [{"role": "system", "content": f"{number}. {SYSTEM}"}, {"role": "user", "content": FIRST}]


async def measure_kvlease(pair: Pair, conversations: int, seconds: float) -> list[IdleFigure]:
    """The decode engine of a running pair, before and after it retains conversations."""
    group = pair.engine(EngineRole.DECODE).pid
    await pair.poke(EngineRole.DECODE)
    nothing = await idle_cores(group, seconds)
    for number in range(conversations):
        await pair.turn(conversation(number), f"idle-{number}")

    async def retained() -> bool:
        return (await pair.gauges(EngineRole.DECODE)).held_blocks > 0

    await eventually(retained, "the decode engine retains nothing")
    held = (await pair.gauges(EngineRole.DECODE)).held_blocks
    cores = await idle_cores(group, seconds)
    return [
        IdleFigure("kvlease", 0, 0, nothing),
        IdleFigure("kvlease", conversations, held, cores),
    ]


async def measure_stock(directory: Path, conversations: int, seconds: float) -> list[IdleFigure]:
    """A decode engine with vLLM's own connector, before and after it retains conversations."""
    port, side_channel_port = free_ports(2)
    spec = EngineSpec(
        role=ProcessRole.DECODE,
        python=ensure_engine_environment(),
        model=ensure_tiny_model(),
        log_file=directory / "stock.log",
        port=port,
        side_channel_port=side_channel_port,
        connector=ConnectorChoice.STOCK,
    )
    engine = EngineProcess(spec)
    await engine.start()
    try:
        await engine.wait_ready()
        async with aiohttp.ClientSession() as session:
            nothing = await idle_cores(engine.pid, seconds)
            for number in range(conversations):
                body = {
                    "model": MODEL,
                    "messages": conversation(number),
                    "max_tokens": 24,
                    "kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": False},
                }
                async with session.post(f"{engine.base_url}/v1/chat/completions", json=body) as response:
                    response.raise_for_status()
                    answer = await response.json()
                    if not (answer.get("kv_transfer_params") or {}).get("remote_block_ids"):
                        raise RuntimeError("stock vLLM retained nothing: there is nothing to compare with")
            cores = await idle_cores(engine.pid, seconds)
    finally:
        await engine.stop()
    return [
        IdleFigure("stock", 0, -1, nothing),
        IdleFigure("stock", conversations, -1, cores),
    ]


async def _run(conversations: int, seconds: float) -> list[IdleFigure]:
    stack = Pair.make_stack(PairPlan())
    await stack.start()
    try:
        async with aiohttp.ClientSession() as session:
            figures = await measure_kvlease(Pair(stack, session), conversations, seconds)
    finally:
        await stack.stop()
    stack.directory.mkdir(exist_ok=True)
    return figures + await measure_stock(stack.directory, conversations, seconds)


def main() -> None:
    """Measures, prints the document, and writes it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    figures = asyncio.run(_run(arguments.conversations, arguments.seconds))
    by_engine = {
        engine: [figure.cores for figure in figures if figure.engine == engine]
        for engine in ("kvlease", "stock")
    }
    commit = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False
    ).stdout.strip()
    document = {
        "what": "cores of an idle decode engine",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "commit": commit,
        "seconds": arguments.seconds,
        "figures": [asdict(figure) for figure in figures],
        "added_cores": {engine: round(cores[1] - cores[0], 3) for engine, cores in by_engine.items()},
    }
    text = json.dumps(document, indent=2)
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
