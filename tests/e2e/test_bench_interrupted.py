"""A benchmark that is told to stop leaves no engine behind."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from stubs.waiting import eventually, is_alive

# An engine that never serves, with a child that does not end with it, as an engine core.
ENGINE = """#!/bin/sh
sleep 600 &
echo $! > {directory}/$$.child
wait
"""

IN_THE_BACKGROUND = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")
"""As a shell without job control starts what `&` follows."""


@pytest.mark.parametrize(
    ("started", "number"),
    [((), signal.SIGTERM), ((), signal.SIGINT), (IN_THE_BACKGROUND, signal.SIGTERM)],
    ids=["SIGTERM", "SIGINT", "SIGTERM in the background"],
)
async def test_a_benchmark_that_is_stopped_ends_its_engines_and_their_children_first(
    tmp_path: Path, started: tuple[str, ...], number: signal.Signals
) -> None:
    engine, model = tmp_path / "python", tmp_path / "model"
    engine.write_text(ENGINE.format(directory=tmp_path))
    engine.chmod(0o755)
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 256}))
    options = ("--modes", "stock", "--device", "cuda", "--engine-python", str(engine), "--model", str(model))
    process = await asyncio.create_subprocess_exec(
        *(*started, sys.executable, "-m", "kvlease.cli", "bench", "multiturn", *options),
        stderr=asyncio.subprocess.PIPE,
    )

    def pids() -> list[int]:
        texts = [path.read_text() for path in tmp_path.glob("*.child")]
        return [int(text) for text in texts if text.endswith("\n")]

    try:
        await eventually(lambda: len(pids()) == 2)
        process.send_signal(number)
        async with asyncio.timeout(60):
            _, said = await process.communicate()
        assert process.returncode == 130
        assert b"Traceback" not in said
        # Each was killed before; how soon it is gone is the machine's.
        await eventually(lambda: not any(map(is_alive, pids())))
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
        for pid in filter(is_alive, pids()):
            os.kill(pid, signal.SIGKILL)
