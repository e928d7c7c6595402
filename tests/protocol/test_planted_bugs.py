"""Bugs planted in the fleet, which the simulation must catch: one that passes them checks nothing."""

from dataclasses import replace

import pytest
from tests.protocol.planted import PLANTS, REPEATED, SCARCE, SEEDS_MAX, first_catch

from kvlease.simulation.run import simulate
from kvlease.simulation.world import WorldSettings

pytestmark = pytest.mark.simulation


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_caught(name: str) -> None:
    """The recorded seed comes first; as the code changes another one may catch it, within the first 200."""
    plant = PLANTS[name]
    seed, found = first_catch(plant, [plant.seed, *range(1, SEEDS_MAX + 1)])
    assert seed, f"{name}: {found} in {SEEDS_MAX} seeds"


@pytest.mark.parametrize("world", [SCARCE, REPEATED], ids=["scarce", "repeated"])
def test_without_a_planted_bug_the_same_worlds_keep_every_promise(world: WorldSettings) -> None:
    for seed in range(1, 6):
        result = simulate(replace(world, seed=seed))
        assert result.ok, (seed, result.problems)
