"""An event loop whose time is virtual: when nothing is ready it jumps to the next timer. No I/O, no threads.

What runs belongs to a simulated process, by its context. A process has a clock of its own, which all of its timers
go by too. Like one of an operating system it can be stopped, go on, and be killed: then nothing of it runs, no
`finally` either.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar, TypeVarTuple, Unpack

TIMER_LEAST_S = 1e-6
"""No timer is shorter: what is due in less than clocks can tell would be waited for again and again, and for ever."""

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")


class SimulationStuckError(RuntimeError):
    """Nothing is ready and no timer is set: everything waits for something that never comes."""


class Process:
    """A simulated process. Its clock began somewhere and runs at its own rate: it is a `Clock`.

    Args:
        origin_s: what its clock shows at virtual time 0.
        rate: seconds of its clock per virtual second.

    Attributes:
        stopped: nothing of it runs for now.
        dead: nothing of it runs any more.
    """

    def __init__(self, loop: "VirtualLoop", name: str, origin_s: float = 0.0, rate: float = 1.0) -> None:
        self.name = name
        self.stopped = False
        self.dead = False
        self.held: deque[asyncio.Handle] = deque()
        self.died = asyncio.Event()
        self._loop = loop
        self._origin_s = origin_s
        self._rate = rate
        self._context = Context()
        self._context.run(CURRENT.set, self)

    def now_s(self) -> float:
        """Seconds on its clock."""
        return self.local_s(self._loop.virtual_s)

    def local_s(self, virtual_s: float) -> float:
        """What its clock shows at a virtual time."""
        return self._origin_s + self._rate * virtual_s

    def virtual_s(self, local_s: float) -> float:
        """The virtual time at which its clock shows `local_s`."""
        return (local_s - self._origin_s) / self._rate

    def post(self, callback: Callable[[], object]) -> None:
        """Runs a callback in the process, once it is its turn."""
        self._loop.call_soon(callback, context=self._context)

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
        self._loop.put_back(held, self)


CURRENT: ContextVar[Process | None] = ContextVar("process", default=None)
"""The process that runs; None for the world around the processes."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A deterministic loop: the same callbacks at the same virtual times, whatever the machine does.

    Attributes:
        virtual_s: seconds since the loop was made.
        steps: callbacks that became due.
        before_jump: called whenever all that could happen at one moment has happened.
    """

    def __init__(self) -> None:
        super().__init__()
        self.virtual_s = 0.0
        self.steps = 0
        self.before_jump: Callable[[], None] = lambda: None
        self._due: deque[tuple[asyncio.Handle, Process | None]] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle, Process | None]] = []
        self._timers_set = 0
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
        context = copy_context() if context is None else context
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append((handle, context.get(CURRENT)))
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
        return self._set_timer(virtual_s, callback, args, copy_context() if context is None else context)

    def call_in_world(self, seconds: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        """Runs a callback outside of every process, after virtual seconds."""
        return self._set_timer(self.virtual_s + seconds, callback, (), self._world)

    def spawn_in_world(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        """Starts a task outside of every process."""
        return self.create_task(work, context=self._world.copy())

    def put_back(self, handles: "deque[asyncio.Handle]", process: Process) -> None:
        """Runs what a process could not run while it was stopped."""
        self._due.extend((handle, process) for handle in handles)

    # --- inside -------------------------------------------------------------------------------------------

    def _set_timer(
        self, virtual_s: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context
    ) -> asyncio.TimerHandle:
        virtual_s = max(virtual_s, self.virtual_s + TIMER_LEAST_S)
        timer = asyncio.TimerHandle(virtual_s, callback, args, self, context)
        self._timers_set += 1
        heapq.heappush(self._timers, (virtual_s, self._timers_set, timer, context.get(CURRENT)))
        return timer

    def _run_once(self) -> None:
        """Runs all that is due now; when nothing is, jumps to the next timer first."""
        due = self._due
        if not due and not self._stopping:  # type: ignore[attr-defined]
            self.before_jump()
            if not due:
                self._jump()
        self.steps += len(due)
        for _ in range(len(due)):
            handle, process = due.popleft()
            if handle.cancelled():
                continue
            if process is not None and process.stopped:
                process.held.append(handle)
            else:
                handle._run()  # pyright: ignore[reportPrivateUsage]

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise SimulationStuckError("nothing is ready and no timer is set")
        self.virtual_s = max(self.virtual_s, timers[0][0])
        while timers and timers[0][0] <= self.virtual_s:
            _, _, timer, process = heapq.heappop(timers)
            self._due.append((timer, process))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Cancelled timers leave when their time comes."""
