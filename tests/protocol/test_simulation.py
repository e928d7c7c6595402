"""The production code of every part in virtual time, over a faulty network, for 20 seeds."""

import asyncio
from argparse import ArgumentParser

import pytest

from kvlease.simulation.loop import DriftingClock, SimulationStuckError, VirtualLoop
from kvlease.simulation.main import add_arguments, replay_command, run
from kvlease.simulation.run import simulate
from kvlease.simulation.world import WorldSettings

pytestmark = pytest.mark.simulation


@pytest.mark.parametrize("seed", range(1, 21))
def test_every_promise_is_kept(seed: int) -> None:
    settings = WorldSettings(seed, duration_s=40.0)
    result = simulate(settings)
    assert result.ok, f"seed {seed}: {result.problems}; again: {replay_command(settings)}"
    assert result.turns > 10


def test_without_faults_no_client_sees_an_error_and_turns_are_reused() -> None:
    result = simulate(WorldSettings(7, duration_s=60.0, faults=False))
    assert result.ok, result.problems
    assert result.errors == 0
    assert result.used_reads > 10


def test_a_seed_always_takes_the_same_way() -> None:
    settings = WorldSettings(3, duration_s=30.0)
    assert simulate(settings) == simulate(settings)


def test_the_command_prints_every_seed_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_arguments(parser)
    assert (
        run(parser.parse_args(["--seeds", "1", "--from", "5", "--duration-s", "5", "--output", "json"])) == 0
    )
    assert '"seed": 5' in capsys.readouterr().out


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


def test_a_drifting_clock_runs_at_its_own_rate() -> None:
    async def measure() -> float:
        clock = DriftingClock(asyncio.get_running_loop(), 100.0, 1.1)
        before_s = clock.now_s()
        await asyncio.sleep(10.0)
        return clock.now_s() - before_s

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(measure()) == pytest.approx(11.0)
