"""One pair of engines at a time: a pair lives as long as the module that uses it.

A module says `pytestmark = pytest.mark.asyncio(loop_scope="module")`: its tests share the pair's event loop.
"""

import fcntl
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from tests.engine.pair import Pair, PairPlan

REQUEST_TIMEOUT_S = 300.0
TEST_TIMEOUT_S = 1200.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs real engines."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.engine)
            # The first test of a module also waits for its engines, and for those of another test run.
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))


@pytest.fixture(scope="module")
def engines_lock() -> Iterator[None]:
    """Keeps a second pair of engines off this machine, also one of another test run."""
    with (Path(tempfile.gettempdir()) / "kvlease-engines.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def pair_plan() -> PairPlan:
    """What the module's pair looks like; a module overrides it."""
    return PairPlan()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(engines_lock: None, pair_plan: PairPlan) -> AsyncIterator[Pair]:
    """A running pair behind a router."""
    stack = Pair.make_stack(pair_plan)
    await stack.start()
    try:
        # A connection of its own for each request: an engine ends idle ones whenever it likes.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            yield Pair(stack, session)
    finally:
        await stack.stop()
