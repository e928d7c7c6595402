"""`kvlease bench router` measures what it says, without a word on how fast that is."""

import asyncio
import json
import sys
from dataclasses import replace

from kvlease.bench.router import Result, judge

RESULT = Result("kvlease", 1, 2, True, 0.1, 0.2, 100.0, 80.0, 4.0, 0.3, 60.0, 1000, 0)


async def test_our_router_is_measured_over_fakes_without_a_failure() -> None:
    options = ("--duration", "0.05", "--known", "10", "--output", "json")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvlease.cli", "bench", "router", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(100):
        output, log = await process.communicate()
    assert process.returncode == 0, log.decode()
    results = json.loads(output)["results"]
    kinds = {(one["concurrency"], one["prompt_kb"], one["stream"]) for one in results}
    assert len(kinds) == len(results) == 8
    for one in results:
        assert one["failed"] == 0
        assert one["requests"] > 0
        assert one["rss_mib"] > 1
        assert (one["cpu_us_per_event"] is None) == (not one["stream"])


def test_a_goal_is_met_where_ours_is_not_above_the_rivals() -> None:
    rival = replace(RESULT, name="vllm-router", added_p50_ms=0.05)
    goals = {str(goal["figure"]): goal["met"] for goal in judge([RESULT, rival])}
    assert goals == {"added_p50_ms": False, "cpu_us_per_request": True, "cpu_us_per_event": True}


async def test_a_peer_that_is_not_known_is_told() -> None:
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "kvlease.cli",
            "bench",
            "router",
            "--against",
            "nobody",
            "--duration",
            "0.01",
        ),
        *("--known", "0"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(100):
        _, log = await process.communicate()
    assert process.returncode == 2
    assert b"nobody" in log
