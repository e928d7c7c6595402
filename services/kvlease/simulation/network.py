"""A network between simulated processes that delays, loses, repeats, reorders and parts one way. All by seed.

Calls travel on their own, so that they overtake each other. A connection keeps its order, and breaks when a message
of it is lost; each end learns of that in its own time.
"""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from random import Random
from typing import Any, TypeVar

from kvlease.core.errors import HolderUnreachable, KvleaseError
from kvlease.simulation.loop import CURRENT, Process, VirtualLoop

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """How bad the network is. Delays are seconds.

    Attributes:
        slow_share: messages that take up to `slow_s`.
        loss: calls and answers that are lost.
        repeats: calls that arrive a second time, up to `repeated_s` later.
        noticed_s: after this long at most an end of a broken connection knows.
    """

    delay_s: float = 0.004
    slow_s: float = 0.3
    slow_share: float = 0.02
    loss: float = 0.005
    repeats: float = 0.01
    repeated_s: float = 4.0
    noticed_s: float = 2.0


class SimNetwork:
    """The processes that run, and the messages between them.

    Attributes:
        processes: those that run, by name.
        crashes: tasks that ended with an exception; each is a bug.
        slowed: processes to and from which every message is slow.
        closed: nothing is carried any more.
    """

    def __init__(self, loop: VirtualLoop, random: Random, settings: NetworkSettings) -> None:
        self.loop = loop
        self.processes: dict[str, Process] = {}
        self.crashes: list[str] = []
        self.slowed: set[str] = set()
        self._random = random
        self._settings = settings
        self._blocked: set[tuple[str, str]] = set()
        self._connections: dict[Connection, None] = {}
        self._started: list[Process] = []
        self._happened_s = array("d")
        self._happenings: list[str] = []
        self.closed = False

    # --- processes ----------------------------------------------------------------------------------------

    def start(self, name: str) -> Process:
        """Starts a process with a clock of its own, up to 10 % too slow or too fast, and often just that."""
        random = self._random
        rate = random.choice((0.9, 1.1, random.uniform(0.9, 1.1)))
        process = Process(self.loop, name, random.uniform(0, 1e4), rate)
        self.processes[name] = process
        self._started.append(process)
        self.note(f"start {name}")
        return process

    def kill(self, name: str) -> None:
        """Kills a process: its connections break, and the other ends are told by its machine."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        process.kill()
        self.note(f"kill {name}")
        for connection in [one for one in self._connections if process in one.ends]:
            connection.close(process)

    def spawn(self, process: Process, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Starts a task of a process whose failure is a bug."""
        task = process.spawn(work)
        task.add_done_callback(self._ended)
        return task

    def note(self, happening: str) -> None:
        """Adds to the log of everything that happened."""
        self._happened_s.append(self.loop.virtual_s)
        self._happenings.append(happening)

    def digest(self) -> str:
        """Of the log: two runs of one seed are equal."""
        digest = blake2b(self._happened_s.tobytes(), digest_size=16)
        digest.update("\n".join(self._happenings).encode())
        return digest.hexdigest()

    def close(self) -> None:
        """Nothing is carried any more, and dead processes may clear away what they left."""
        self.closed = True
        for process in self._started:
            process.bury()

    # --- faults -------------------------------------------------------------------------------------------

    def block(self, source: str, target: str) -> None:
        """Loses everything from one process to another, not the other way."""
        self._blocked.add((source, target))

    def unblock(self, source: str, target: str) -> None:
        """Heals what `block` did."""
        self._blocked.discard((source, target))

    def heal(self) -> None:
        """Ends every partition, every pause and every slowness."""
        self._blocked.clear()
        self.slowed.clear()
        for process in self.processes.values():
            process.resume()

    # --- calls --------------------------------------------------------------------------------------------

    async def call(
        self, target: str, serve: Callable[[], Awaitable[Answer]], deadline_s: float, *, repeats: bool = False
    ) -> Answer:
        """Runs `serve` at the target, in a task of its own as servers do. It may run although its answer is lost.

        Args:
            repeats: it may also run twice; the first answer counts.

        Raises:
            HolderUnreachable: nobody is there, or no answer came within `deadline_s`.
            KvleaseError: as `serve` raised it.
        """
        caller, random = current(), self._random
        answer: asyncio.Future[Answer] = self.loop.create_future()

        def arrive() -> None:
            self._serve(caller, target, serve, answer)

        self._send(caller.name, target, arrive)
        if repeats and random.random() < self._settings.repeats:
            self.loop.call_in_world(random.uniform(0.0, self._settings.repeated_s), arrive)
        return await answered(answer, target, deadline_s)

    def _serve(
        self,
        caller: Process,
        target: str,
        serve: Callable[[], Awaitable[Answer]],
        answer: "asyncio.Future[Answer]",
    ) -> None:
        if self.closed:
            return
        process = self.processes.get(target)
        if process is None:
            self._answer(caller, target, answer, HolderUnreachable(f"{target} is down"))
            return

        async def work() -> None:
            try:
                result = await serve()
            except KvleaseError as error:
                self._answer(caller, target, answer, error)
            else:
                self._answer(caller, target, answer, result)

        self.spawn(process, work())

    def _answer(
        self, caller: Process, target: str, answer: "asyncio.Future[Answer]", result: Answer | KvleaseError
    ) -> None:
        def settle() -> None:
            if answer.done():
                return
            if isinstance(result, KvleaseError):
                answer.set_exception(result)
                answer.exception()
            else:
                answer.set_result(result)

        self._send(target, caller.name, lambda: None if caller.dead else caller.deliver(settle))

    def _send(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        lost = self._random.random() < self._settings.loss

        def carry() -> None:
            if not (lost or self.closed or (source, target) in self._blocked):
                self.note(f"{source} {target}")
                arrive()

        if not self.closed:
            self.loop.call_in_world(self.delay_s(source, target), carry)

    # --- connections --------------------------------------------------------------------------------------

    async def connect(self, target: str) -> "Connection":
        """A connection from the current process.

        Raises:
            HolderUnreachable: nobody answers there.
        """
        source = current()
        await asyncio.sleep(self.delay_s(source.name, target))
        process = self.processes.get(target)
        blocked = self.is_blocked(source.name, target) or self.is_blocked(target, source.name)
        if process is None or blocked or self.closed:
            raise HolderUnreachable(f"{target} cannot be reached from {source.name}")
        connection = Connection(self, (source, process))
        self._connections[connection] = None
        return connection

    def forget(self, connection: "Connection") -> None:
        """A connection has ended."""
        self._connections.pop(connection, None)

    # --- for connections ----------------------------------------------------------------------------------

    def is_blocked(self, source: str, target: str) -> bool:
        """Whether messages from one process to another are lost."""
        return self.closed or (source, target) in self._blocked

    def delay_s(self, source: str, target: str) -> float:
        """How long a message travels."""
        settings, random = self._settings, self._random
        slow = source in self.slowed or target in self.slowed or random.random() < settings.slow_share
        return random.random() * (settings.slow_s if slow else settings.delay_s)

    def notice_s(self) -> float:
        """How long an end takes to learn that its connection broke."""
        return self._random.uniform(0.0, self._settings.noticed_s)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            where = getattr(task.get_coro(), "__qualname__", "a task")
            self.crashes.append(f"{where} ended with {error!r}")


class Connection:
    """An ordered connection of two processes. Each end has a callback for its end, called once, in its process."""

    def __init__(self, network: SimNetwork, ends: tuple[Process, Process]) -> None:
        self.ends = ends
        self._network = network
        self._last_s = dict.fromkeys(ends, 0.0)
        self._open = dict.fromkeys(ends, True)
        self._broken = False
        self._closed: dict[Process, Callable[[], object]] = {}

    def on_close(self, end: Process, closed: Callable[[], object]) -> None:
        """Sets what an end does when it learns that the connection has ended."""
        self._closed[end] = closed
        if not self._open[end]:
            end.post(closed)

    def is_open(self, end: Process) -> bool:
        """Whether an end believes in the connection."""
        return self._open[end]

    def other(self, end: Process) -> Process:
        """The other end."""
        return self.ends[1] if end is self.ends[0] else self.ends[0]

    def send(self, source: Process, deliver: Callable[[], object]) -> None:
        """Runs `deliver` at the other end, after all that was sent before."""
        if not self._open[source]:
            return
        network, target = self._network, self.other(source)
        now_s = network.loop.virtual_s
        here, there = source.name, target.name
        arrives_s = max(self._last_s[source], now_s + network.delay_s(here, there))
        self._last_s[source] = arrives_s

        def arrive() -> None:
            if self._broken or network.is_blocked(here, there):
                self._break()
            elif self._open[target]:
                network.note(f"{here} {there}")
                target.deliver(deliver if not target.stopped else late)

        def late() -> object:
            return deliver() if self._open[target] else None

        network.loop.call_in_world(arrives_s - now_s, arrive)

    def close(self, by: Process) -> None:
        """Ends it from one end; the other learns of it after what was sent before, unless that is lost."""
        if not self._open[by]:
            return
        self._end(by)
        network, target = self._network, self.other(by)
        now_s = network.loop.virtual_s
        if network.is_blocked(by.name, target.name):
            network.loop.call_in_world(network.notice_s(), lambda: self._end(target))
        else:
            arrives_s = max(self._last_s[by], now_s + network.delay_s(by.name, target.name))
            network.loop.call_in_world(arrives_s - now_s, lambda: self._end(target))

    def _break(self) -> None:
        """A message was lost: nothing comes after it, and each end notices in its own time."""
        if self._broken:
            return
        self._broken = True
        for end in self.ends:
            self._network.loop.call_in_world(self._network.notice_s(), partial(self._end, end))

    def _end(self, end: Process) -> None:
        if not self._open[end]:
            return
        self._open[end] = False
        closed = self._closed.get(end)
        if closed is not None and not end.dead:
            end.post(closed)
        if not any(self._open.values()):
            self._network.forget(self)


def current() -> Process:
    """The process that runs."""
    process = CURRENT.get()
    if process is None:
        raise RuntimeError("no simulated process runs here")
    return process


async def answered(answer: "asyncio.Future[Answer]", who: str, deadline_s: float) -> Answer:
    """An answer that comes in time.

    Raises:
        HolderUnreachable: it did not come within `deadline_s`, by the clock of the current process.
    """
    loop = answer.get_loop()

    def give_up() -> None:
        if not answer.done():
            answer.set_exception(HolderUnreachable(f"{who} did not answer within {deadline_s:g} s"))
            answer.exception()

    timer = loop.call_at(loop.time() + deadline_s, give_up)
    try:
        return await answer
    finally:
        timer.cancel()
