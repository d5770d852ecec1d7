"""An asyncio loop whose clock jumps to the next timer, and the lives of the processes that share it.

Nothing here waits: when no callback is ready, the clock advances to the next timer. Every callback and task belongs to
the `Life` in whose context it was created; those of a dead life are never called again, which simulates a crash. Relies
on asyncio's tasks and handles; knows nothing of nodes, networks or disks.
"""

from __future__ import annotations

import asyncio
import heapq
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from math import inf
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")

STEPS_MAX: Final = 500_000
"""Number of callbacks at one moment after which the loop is considered stuck."""

CANCELLED_MAX: Final = 1000
"""Number of cancelled timers that may remain in the queue before it is cleaned."""

CLOSE_ATTEMPTS_MAX: Final = 20
"""How often a dropped coroutine is closed; some continue after the first time."""

LIFE: Final[ContextVar[Life | None]] = ContextVar("life", default=None)


class Died(BaseException):
    """The process was killed during this call; nothing may catch this error."""


class NothingWillHappen(AssertionError):
    """A task waits, but no timer is set and no callback is ready."""


class TimeStandsStill(AssertionError):
    """A task loops without waiting."""


class NeverEnds(AssertionError):
    """The scenario still runs at the end of its virtual time."""


class Life:
    """A process from start to end. Everything that runs in `context` belongs to it, including what that starts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_frozen = False
        """True while the process is suspended, as after SIGSTOP: its callbacks run when it is thawed."""
        self.held: list[Handle] = []
        """The suspended callbacks."""
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Its unfinished tasks. Referenced here, because a task that is garbage-collected logs an error."""
        self.context = copy_context()
        self.context.run(LIFE.set, self)

    def __repr__(self) -> str:
        return f"<{self.name}{', dead' if self.is_dead else ''}>"


class Handle:
    """A scheduled callback or timer: the part of `asyncio.Handle` that asyncio uses."""

    __slots__ = ("_loop", "args", "callback", "context", "is_cancelled", "life")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, timers_of: VirtualLoop | None
    ) -> None:
        """`timers_of` is the loop to notify of a cancellation."""
        self.callback = callback
        self.args = args
        self.context = context
        self.life = context.get(LIFE)
        self.is_cancelled = False
        self._loop = timers_of

    def cancel(self) -> None:
        if not self.is_cancelled:
            self.is_cancelled = True
            if self._loop is not None:
                self._loop.timer_cancelled()

    def cancelled(self) -> bool:
        return self.is_cancelled

    def passed(self) -> None:
        """Mark the callback as ready: its time has come."""
        self._loop = None

    def __repr__(self) -> str:
        return f"<{self.callback} of {self.life}>"


class VirtualLoop:
    """Runs a coroutine, and all tasks that it starts, to completion: `run_until_complete`.

    To asyncio it is an event loop, limited to what needs no operating system: timers, tasks and futures.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._as_loop = cast(asyncio.AbstractEventLoop, self)
        self._time = start
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """Tasks without a life."""
        self._timer_count = 0
        self._cancelled_count = 0
        self._steps = 0
        self._is_running = False
        self._is_closed = False
        self._running_life: Life | None = None
        self.deadline = inf
        """Virtual time after which a running scenario counts as endless."""
        self.before_jump: list[Callable[[], None]] = []
        """Called when no callback is ready; they may schedule some."""
        self.on_failure: Callable[[dict[str, Any]], None] = lambda context: None
        """Called with asyncio's context of an unhandled exception."""

    # --- interface to asyncio ---

    def time(self) -> float:
        return self._time

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context, None)
        if not self._is_closed:
            self._ready.append(handle)
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        return self.call_at(self._time + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        handle = Handle(callback, args, copy_context() if context is None else context, self)
        if not self._is_closed:
            self._timer_count += 1  # of two timers for one moment the earlier one runs first
            heapq.heappush(self._timers, (when, self._timer_count, handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        raise AssertionError("threads are not available in a simulation: a seed could not reproduce their timing")

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self._as_loop)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T] | Generator[Any, None, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        life = LIFE.get() if context is None else context.get(LIFE)
        if self._is_closed:
            coro.close()
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self._as_loop, name=name, context=context)
        if self._is_closed:
            _silence(task)
        else:
            tasks = self._tasks if life is None else life.tasks
            tasks[task] = None
            # Without a life: a process that dies before it is done must still find it here.
            task.add_done_callback(lambda task: tasks.pop(task, None), context=Context())
        return task

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return self._is_running

    def is_closed(self) -> bool:
        return self._is_closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        is_dead = self._running_life is not None and self._running_life.is_dead
        if not is_dead and not self._is_closed and not isinstance(context.get("exception"), Died):
            self.on_failure(context)

    def timer_cancelled(self) -> None:
        """Called by a cancelled timer: it stays in the queue until there are many."""
        self._cancelled_count += 1
        if self._cancelled_count > CANCELLED_MAX and self._cancelled_count * 2 > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer[2].is_cancelled]
            heapq.heapify(self._timers)
            self._cancelled_count = 0

    # --- running ---

    def run_until_complete(self, future: Coroutine[Any, Any, T]) -> T:
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._finalize)
        asyncio._set_running_loop(self._as_loop)
        self._is_running = True
        task = self.create_task(future)
        try:
            while not task.done():
                self._step()
        except BaseException:
            _silence(task)
            raise
        finally:
            self._is_running = False
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        return task.result()

    def timers_of(self, life: Life) -> list[Handle]:
        """Return the pending timers of a life."""
        return [handle for _, _, handle in self._timers if handle.life is life and not handle.is_cancelled]

    def thaw(self, life: Life) -> None:
        """Resume a suspended life, with all timers that have expired."""
        life.is_frozen = False
        self._ready.extend(life.held)
        life.held.clear()

    def bury(self, lives: list[Life]) -> None:
        """End the loop and close the dropped coroutines; their output is discarded."""
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
        asyncio._set_running_loop(self._as_loop)
        # A coroutine that awaits while being closed is left to the interpreter.
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            for tasks in (self._tasks, *(life.tasks for life in lives)):
                for task in list(tasks):
                    _silence(task)
                    for _ in range(CLOSE_ATTEMPTS_MAX):
                        with suppress(BaseException):
                            task.get_coro().close()
                            break
                tasks.clear()
        finally:
            sys.unraisablehook = hook
            asyncio._set_running_loop(None)

    def _step(self) -> None:
        """Call the callbacks that are ready now, but not those that they make ready."""
        if not self._ready:
            self._jump()
        count = len(self._ready)
        self._steps += count
        if self._steps > STEPS_MAX:
            raise TimeStandsStill(f"{STEPS_MAX} callbacks at {self._time}, the next is {self._ready[0]}")
        take, run = self._ready.popleft, self._run
        for _ in range(count):
            handle = take()
            if not handle.is_cancelled:
                run(handle)
        self._running_life = None

    def _run(self, handle: Handle) -> None:
        self._running_life = life = handle.life
        if life is not None:
            if life.is_dead:
                return
            if life.is_frozen:
                life.held.append(handle)
                return
        try:
            handle.context.run(handle.callback, *handle.args)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self.call_exception_handler({"message": f"Exception in {handle!r}", "exception": error})

    def _jump(self) -> None:
        for look in self.before_jump:
            look()
        if self._ready:
            return
        timers = self._timers
        while timers and _is_void(timers[0][2]):
            heapq.heappop(timers)
        if not timers:
            raise NothingWillHappen(f"deadlock at {self._time}: no callback is ready, and no timer is set")
        if timers[0][0] > self.deadline:
            raise NeverEnds(f"the scenario still waits after {self._time:.0f} virtual seconds: {self._waiting()}")
        if timers[0][0] > self._time:
            self._time = timers[0][0]
            self._steps = 0
        while timers and timers[0][0] <= self._time:
            handle = heapq.heappop(timers)[2]
            handle.passed()
            self._ready.append(handle)

    def _waiting(self) -> str:
        """Return where each task of the scenario itself waits, outermost call first."""
        return "; ".join(" > ".join(_calls(task)) for task in self._tasks if not task.done())

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._is_closed:
            self.create_task(generator.aclose())


def _calls(task: asyncio.Task[Any]) -> Iterator[str]:
    """Yield the coroutines that a task is in, each as `function:line`. `get_stack` knows only the outermost."""
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield f"{frame.f_code.co_name}:{frame.f_lineno}"
        coroutine = coroutine.cr_await


def _is_void(timer: Handle) -> bool:
    return timer.is_cancelled or (timer.life is not None and timer.life.is_dead)


def _silence(task: asyncio.Task[Any]) -> None:
    """Suppress the warning about a task that is dropped on purpose."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
