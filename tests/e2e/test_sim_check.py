"""`kvlease dev --engine sim --check`: every part as a real process or server, the engines simulated."""

import asyncio
import json
import sys

import pytest


@pytest.mark.parametrize("store", ["memory", "etcd"])
async def test_the_check_over_simulated_engines_passes_on_every_path(store: str) -> None:
    options = ("--engine", "sim", "--store", store, "--check", "--output", "json")
    command = (sys.executable, "-m", "kvlease.cli", "dev", *options)
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(100):
        output, log = await process.communicate()
    assert process.returncode == 0, log.decode()
    result = json.loads(output)
    assert result["ok"]
    paths = [turn["path"] for turn in result["turns"]]
    assert paths == ["recompute", "append", "readback", "readback"]
    assert all(turn["equals_cold"] for turn in result["turns"])
    assert [turn["read_bytes"] > 0 for turn in result["turns"]] == [True, False, True, True]
