"""Settings shared by every test."""

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is. Every run tries the same examples, so that what it says is
# about the change; `pytest --hypothesis-profile=explore` looks for new ones.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", PATIENT)
settings.register_profile("kvlease", PATIENT, derandomize=True)
settings.load_profile("kvlease")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that a test runs in this process set up logging; the next test finds it as it was."""
    root, ours = logging.getLogger(), logging.getLogger("kvlease")
    levels, handlers = (root.level, ours.level), (root.handlers[:], ours.handlers[:])
    yield
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    root.handlers[:], ours.handlers[:] = handlers
