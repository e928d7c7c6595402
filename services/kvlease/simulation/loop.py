"""An event loop whose time is virtual: when nothing is ready it jumps to the next timer. No I/O, no threads.

What runs belongs to a simulated process, by its context. A process has a clock of its own, which all of its timers
go by too. Like one of an operating system it can be stopped, go on, and be killed: then nothing of it runs, no
`finally` either.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, TypeVar, TypeVarTuple, Unpack

TIMER_LEAST_S = 1e-6
"""No timer is shorter: what is due in less than clocks can tell would be waited for again and again, and for ever."""

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class SimulationStuckError(RuntimeError):
    """Nothing is ready and no timer is set: everything waits for something that never comes."""


class _Handle(asyncio.TimerHandle):
    """A callback that will run in its context, at once or in time.

    A simulation makes many of these: no more is set than `VirtualLoop` needs.

    Attributes:
        process: whose it is, by its context.
    """

    __slots__ = ("process",)

    _source_traceback = None

    def __init__(
        self,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
        virtual_s: float,
    ) -> None:
        if context is None:
            context = copy_context()
        self.process: Process | None = context.get(CURRENT)
        self._callback = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self._when = virtual_s

    def cancel(self) -> None:
        """It will not run. One that is a timer leaves the loop when its time comes."""
        self._cancelled = True


class Process:
    """A simulated process. Its clock began somewhere and runs at its own rate: it is a `Clock`.

    Args:
        origin_s: what its clock shows at virtual time 0.

    Attributes:
        rate: seconds of its clock per virtual second.
        stopped: nothing of it runs for now.
        dead: nothing of it runs any more.
    """

    def __init__(self, loop: "VirtualLoop", name: str, origin_s: float = 0.0, rate: float = 1.0) -> None:
        self.name = name
        self.stopped = False
        self.dead = False
        self.held: deque[_Handle] = deque()
        self.died = asyncio.Event()
        self._loop = loop
        self._origin_s = origin_s
        self.rate = rate
        self._context = Context()
        self._context.run(CURRENT.set, self)

    def now_s(self) -> float:
        """Seconds on its clock."""
        return self._origin_s + self.rate * self._loop.virtual_s

    def local_s(self, virtual_s: float) -> float:
        """What its clock shows at a virtual time."""
        return self._origin_s + self.rate * virtual_s

    def virtual_s(self, local_s: float) -> float:
        """The virtual time at which its clock shows `local_s`."""
        return (local_s - self._origin_s) / self.rate

    def post(self, callback: Callable[[], object]) -> None:
        """Runs a callback in the process, once it is its turn."""
        self._loop.call_soon(callback, context=self._context)

    def deliver(self, callback: Callable[[], object]) -> None:
        """Runs a callback in the process at once, or when it goes on. Called from outside of every process."""
        if self.stopped:
            self.post(callback)
        else:
            self._context.run(callback)

    def run(self, callback: Callable[[], None]) -> None:
        """Runs a callback in the process at once."""
        self._context.copy().run(callback)

    def spawn(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Starts a task of the process."""
        return self._loop.create_task(work, context=self._context.copy())

    def stop(self) -> None:
        """Nothing of it runs until `resume`; its clock goes on."""
        self.stopped = True

    def resume(self) -> None:
        """Goes on with what it could not do meanwhile; a dead process does not."""
        if not self.dead:
            self._let_go()

    def kill(self) -> None:
        """Ends it where it stands."""
        self.stopped = self.dead = True
        self.died.set()

    def bury(self) -> None:
        """Lets what a dead process left be cleared away, once the simulation is over."""
        self._let_go()

    def _let_go(self) -> None:
        self.stopped = False
        held, self.held = self.held, deque()
        self._loop.put_back(held)


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process that runs; None for the world around the processes."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A deterministic loop: the same callbacks at the same virtual times, whatever the machine does.

    Attributes:
        virtual_s: seconds since the loop was made.
        steps: callbacks that became due.
    """

    def __init__(self) -> None:
        super().__init__()
        self.virtual_s = 0.0
        self.steps = 0
        self._due: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._timers_set = 0
        # asyncio refers weakly to tasks: what stands still for ever would be collected, and its `finally` run.
        # Those that are done leave the list whenever it has grown to twice what was left of it.
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_max = 64
        self._world = Context()

    def time(self) -> float:
        """Seconds on the clock of whoever asks."""
        process = CURRENT.get()
        return self.virtual_s if process is None else process.local_s(self.virtual_s)

    def call_soon(
        self,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """Runs a callback next, in its context's process."""
        handle = _Handle(callback, args, context, self.virtual_s)
        self._due.append(handle)
        return handle

    def call_soon_threadsafe(
        self,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.Handle:
        """There is one thread."""
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Runs a callback at a time on the clock of whoever asks."""
        process = CURRENT.get()
        virtual_s = when if process is None else process.virtual_s(when)
        return self._push(virtual_s, callback, args, context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Arguments]], object],
        *args: *Arguments,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Runs a callback after seconds on the clock of whoever asks."""
        process = CURRENT.get()
        virtual_s = self.virtual_s + (delay if process is None else delay / process.rate)
        return self._push(virtual_s, callback, args, context)

    def call_in_world(self, seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Runs a callback outside of every process, after virtual seconds."""
        return self._push(self.virtual_s + seconds, callback, (), self._world)

    def spawn_in_world(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Starts a task outside of every process."""
        return self.create_task(work, context=self._world.copy())

    def create_task(
        self,
        coro: Generator[Any, None, Result] | Coroutine[Any, Any, Result],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> "asyncio.Task[Result]":
        """Starts a task, in its context's process."""
        task = asyncio.Task(coro, loop=self, name=None if name is None else str(name), context=context)
        self._tasks.append(task)
        if len(self._tasks) >= self._tasks_max:
            self._tasks = [known for known in self._tasks if not known.done()]
            self._tasks_max = 2 * len(self._tasks) + 64
        return task

    def put_back(self, handles: "deque[_Handle]") -> None:
        """Runs what a process could not run while it was stopped."""
        self._due.extend(handles)

    # --- inside -------------------------------------------------------------------------------------------

    def _push(
        self,
        virtual_s: float,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> asyncio.TimerHandle:
        least_s = self.virtual_s + TIMER_LEAST_S
        if virtual_s < least_s:
            virtual_s = least_s
        timer = _Handle(callback, args, context, virtual_s)
        self._timers_set += 1
        heappush(self._timers, (virtual_s, self._timers_set, timer))
        return timer

    def _run_once(self) -> None:
        """Runs all that is due, moment after moment, until the loop is to stop."""
        due = self._due
        while not self._stopping:  # type: ignore[attr-defined]
            if not due:
                self._jump()
            self.steps += 1
            handle = due.popleft()
            process = handle.process
            if handle._cancelled:
                continue
            if process is not None and process.stopped:
                process.held.append(handle)
                continue
            try:
                handle._context.run(handle._callback, *handle._args)  # pyright: ignore[reportPrivateUsage]
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                context = {"message": "a callback failed", "exception": error, "handle": handle}
                self.call_exception_handler(context)

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heappop(timers)
        if not timers:
            raise SimulationStuckError("nothing is ready and no timer is set")
        now_s, _, timer = heappop(timers)
        self.virtual_s = now_s
        self._due.append(timer)
        while timers and timers[0][0] <= now_s:
            self._due.append(heappop(timers)[2])
