"""Keeping a table in step with a watch of the registry's, whatever becomes of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvlease.core.errors import HolderUnreachable
from kvlease.core.records import Engine
from kvlease.router import watch as watch_module
from kvlease.router.watch import follow
from kvlease.store.port import Batch
from stubs.waiting import eventually


@pytest.mark.parametrize("error", [HolderUnreachable("away"), RuntimeError("a bug")])
async def test_a_watch_that_fails_is_opened_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "RECONNECT_S", 0.0)
    opened = 0
    applied: list[Batch[Engine]] = []

    async def batches() -> AsyncIterator[Batch[Engine]]:
        yield Batch((), snapshot=True)
        if opened == 1:
            raise error
        await asyncio.Event().wait()

    @asynccontextmanager
    async def watch() -> AsyncIterator[AsyncIterator[Batch[Engine]]]:
        nonlocal opened
        opened += 1
        yield batches()

    task = asyncio.create_task(follow("engines", watch, applied.append))
    await eventually(lambda: len(applied) == 2 or task.done())
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
