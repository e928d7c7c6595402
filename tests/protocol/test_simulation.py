"""The production code of every part in virtual time, over a faulty network, seed by seed."""

import asyncio
import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from functools import partial
from random import Random

import pytest

from kvlease.simulation.loop import Process, SimulationStuckError, VirtualLoop
from kvlease.simulation.main import add_arguments, replay_command, run
from kvlease.simulation.network import NetworkSettings, SimNetwork
from kvlease.simulation.run import simulate
from kvlease.simulation.world import WorldSettings

pytestmark = pytest.mark.simulation

SEEDS = 200
SEEDS_A_TEST = 10


@pytest.mark.parametrize("first", range(1, SEEDS + 1, SEEDS_A_TEST))
def test_every_promise_is_kept(first: int) -> None:
    for seed in range(first, first + SEEDS_A_TEST):
        settings = WorldSettings(seed)
        result = simulate(settings)
        assert result.ok, f"seed {seed}: {result.problems}; again: {replay_command(settings)}"
        assert result.turns > 5


def test_without_faults_no_client_sees_an_error_and_turns_are_reused() -> None:
    result = simulate(WorldSettings(7, duration_s=40.0, faults=False))
    assert result.ok, result.problems
    assert result.errors == 0
    assert result.used_reads > 10


def test_a_seed_takes_the_same_way_in_another_process_whatever_the_hash_seed() -> None:
    command = [sys.executable, "-m", "kvlease.cli", "sim", "--seeds", "2", "--from", "3", "--output", "json"]
    outputs = [
        subprocess.run(
            command,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            timeout=100,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert json.loads(outputs[0])["steps"] > 1000


def test_a_seed_takes_the_same_way_twice_in_one_process_and_two_seeds_do_not() -> None:
    first, again, other = simulate(WorldSettings(3)), simulate(WorldSettings(3)), simulate(WorldSettings(4))
    assert first == again
    assert first.digest != other.digest


def test_the_command_counts_seeds_steps_and_violations(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    arguments = ["--seeds", "2", "--from", "5", "--duration-s", "3", "--output", "json"]
    assert run(parser.parse_args(arguments)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["seeds"] == 2
    assert document["steps"] > 1000
    assert document["violations"] == 0
    assert document["first_seed"] is None


def test_seeds_are_the_same_in_processes_of_their_own() -> None:
    command = [
        sys.executable,
        "-m",
        "kvlease.cli",
        "sim",
        "--seeds",
        "4",
        "--duration-s",
        "3",
        "--output",
        "json",
    ]
    alone, shared = (
        subprocess.run([*command, "--jobs", jobs], check=True, capture_output=True, timeout=100).stdout
        for jobs in ("1", "3")
    )
    assert alone == shared


@pytest.mark.parametrize(
    "arguments", [["--seeds", "0"], ["--from", "-1"], ["--duration-s", "nan"], ["--routers", "none"]]
)
def test_a_number_that_makes_no_sense_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(arguments)
    assert arguments[0] in capsys.readouterr().err


# --- virtual time and processes ---------------------------------------------------------------------------


def test_virtual_time_jumps_to_the_next_timer_in_order() -> None:
    async def sleepers() -> list[tuple[str, float]]:
        loop, seen = asyncio.get_running_loop(), []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, round(loop.time(), 6)))

        async with asyncio.TaskGroup() as group:
            group.create_task(sleeper("late", 3600.0))
            group.create_task(sleeper("early", 0.5))
        return seen

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(sleepers()) == [("early", 0.5), ("late", 3600.0)]


def test_waiting_for_what_never_comes_is_said_and_not_waited_for() -> None:
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    loop = VirtualLoop()
    task = loop.create_task(forever())
    with pytest.raises(SimulationStuckError):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_a_process_sleeps_and_counts_by_its_own_clock() -> None:
    async def measure(loop: VirtualLoop) -> tuple[float, float]:
        process = Process(loop, "fast", origin_s=100.0, rate=1.25)

        async def sleep() -> float:
            before_s = process.now_s()
            await asyncio.sleep(10.0)
            return process.now_s() - before_s

        return await process.spawn(sleep()), loop.virtual_s

    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(measure(loop)) == (pytest.approx(10.0), pytest.approx(8.0))


def test_nothing_of_a_stopped_process_runs_until_it_goes_on() -> None:
    async def stop(loop: VirtualLoop) -> list[float]:
        process, ticks = Process(loop, "stopped"), []

        async def tick() -> None:
            while True:
                await asyncio.sleep(1.0)
                ticks.append(loop.virtual_s)

        task = process.spawn(tick())
        await asyncio.sleep(2.5)
        process.stop()
        process.post(lambda: ticks.append(-1.0))
        await asyncio.sleep(10.0)
        assert ticks == [1.0, 2.0]
        process.resume()
        await asyncio.sleep(0.1)
        task.cancel()
        return ticks

    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(stop(loop)) == [1.0, 2.0, -1.0, 12.5]


def test_a_killed_process_clears_nothing_away() -> None:
    async def kill(loop: VirtualLoop) -> list[str]:
        process, done = Process(loop, "killed"), []

        async def work() -> None:
            try:
                await asyncio.sleep(1.0)
            finally:
                done.append("cleared away")

        task = process.spawn(work())
        await asyncio.sleep(0.5)
        process.kill()
        process.post(task.cancel)
        process.resume()
        await asyncio.sleep(10.0)
        seen = list(done)
        process.bury()
        return seen

    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(kill(loop)) == []


# --- the network ------------------------------------------------------------------------------------------


def test_nothing_arrives_on_a_connection_after_a_message_that_was_lost() -> None:
    async def converse(loop: VirtualLoop) -> tuple[list[int], list[str]]:
        network = SimNetwork(loop, Random(1), NetworkSettings())
        source, target = network.start("source"), network.start("target")
        connection = await source.spawn(network.connect("target"))
        arrived: list[int] = []
        noticed: list[str] = []
        for end in (source, target):
            connection.on_close(end, partial(noticed.append, end.name))
        for number in range(3):
            if number == 1:
                network.block("source", "target")
            connection.send(source, partial(arrived.append, number))
            await asyncio.sleep(0.4)
            network.unblock("source", "target")
        await asyncio.sleep(5.0)
        network.close()
        return arrived, sorted(noticed)

    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(converse(loop)) == ([0], ["source", "target"])
