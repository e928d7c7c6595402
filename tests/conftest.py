"""Settings shared by every test."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Commands that a test runs in this process set up logging; the next test finds it as it was."""
    root, ours = logging.getLogger(), logging.getLogger("kvlease")
    levels, handlers = (root.level, ours.level), (root.handlers[:], ours.handlers[:])
    yield
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    root.handlers[:], ours.handlers[:] = handlers
