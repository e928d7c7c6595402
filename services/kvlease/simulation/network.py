"""A network that delays, loses, reorders, partitions one way, and holds messages for paused nodes. All by seed."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from kvlease.core.errors import HolderUnreachable, KvleaseError

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """How bad the network is. Delays are seconds; a few messages take `slow_s`."""

    delay_s: float = 0.002
    slow_s: float = 0.3
    slow_share: float = 0.02
    loss: float = 0.005


class SimNetwork:
    """Carries messages between named nodes. Calls run at the target in tasks of their own, as servers do.

    Attributes:
        crashes: tasks that ended with an exception; each is a bug.
    """

    def __init__(self, random: Random, settings: NetworkSettings) -> None:
        self._random = random
        self._settings = settings
        self._blocked: set[tuple[str, str]] = set()
        self._awake: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.crashes: list[str] = []

    # --- faults -------------------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        """Loses everything from one node to another, not the other way."""
        self._blocked.add((source, target))

    def unblock(self, source: str, target: str) -> None:
        """Heals what `block` did."""
        self._blocked.discard((source, target))

    def is_blocked(self, source: str, target: str) -> bool:
        """Whether messages from one node to another are lost."""
        return (source, target) in self._blocked

    def pause(self, node: str) -> None:
        """The node does nothing until it is resumed; what is sent to it waits."""
        self._awake.setdefault(node, asyncio.Event()).clear()

    def resume(self, node: str) -> None:
        """The node goes on."""
        self._awake.setdefault(node, asyncio.Event()).set()

    def heal(self) -> None:
        """Ends every partition and every pause."""
        self._blocked.clear()
        for awake in self._awake.values():
            awake.set()

    # --- messages -----------------------------------------------------------------------------------------

    async def awake(self, node: str) -> None:
        """Waits until the node is not paused."""
        awake = self._awake.get(node)
        if awake is not None:
            await awake.wait()

    async def carry(self, source: str, target: str, *, lossy: bool = True) -> bool:
        """Waits as long as a message takes. False when it is lost."""
        settings, random = self._settings, self._random
        slow = random.random() < settings.slow_share
        await self.awake(source)
        await asyncio.sleep(random.uniform(0, settings.slow_s if slow else settings.delay_s))
        await self.awake(target)
        lost = lossy and random.random() < settings.loss
        return not lost and not self.is_blocked(source, target)

    async def call(
        self, source: str, target: str, serve: Callable[[], Awaitable[Answer]], deadline_s: float
    ) -> Answer:
        """Runs `serve` at the target. It may run although its answer is lost.

        Raises:
            HolderUnreachable: no answer within `deadline_s`.
            KvleaseError: as `serve` raised it.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.spawn(self._serve(source, target, serve, answer))
        try:
            async with asyncio.timeout(deadline_s):
                return await answer
        except TimeoutError as error:
            raise HolderUnreachable(f"{target} did not answer {source} within {deadline_s:g} s") from error

    async def _serve(
        self,
        source: str,
        target: str,
        serve: Callable[[], Awaitable[Answer]],
        answer: "asyncio.Future[Answer]",
    ) -> None:
        if not await self.carry(source, target):
            return
        try:
            result = await serve()
        except KvleaseError as error:
            if await self.carry(target, source) and not answer.done():
                answer.set_exception(error)
            return
        if await self.carry(target, source) and not answer.done():
            answer.set_result(result)

    # --- tasks --------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs something that ends with the simulation at the latest."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.crashes.append(f"{task.get_coro()} ended with {task.exception()!r}")

    async def close(self) -> None:
        """Ends every task."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Pipe:
    """An ordered stream from one node to another. A lost message breaks it, as a connection would."""

    def __init__(self, network: SimNetwork, source: str, target: str, broken: Callable[[], None]) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._broken = broken
        self._queue: asyncio.Queue[Callable[[], None]] = asyncio.Queue(10_000)
        self._closed = False
        self._task = network.spawn(self._run())

    def send(self, deliver: Callable[[], None]) -> None:
        """Runs `deliver` at the target, after all that was sent before."""
        if not self._closed:
            self._queue.put_nowait(deliver)

    def close(self) -> None:
        """Nothing more is delivered."""
        self._closed = True
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            deliver = await self._queue.get()
            if not await self._network.carry(self._source, self._target, lossy=False):
                self._closed = True
                self._broken()
                return
            deliver()
