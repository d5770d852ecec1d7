"""An asyncio loop whose clock jumps to the next timer, and the lives of the processes that share it.

Nothing here waits: when nobody can go on at this moment, the next moment is now. Every callback and task belongs to the
`Life` in whose context it was made; those of a dead life are never called again, which is what a crash is. Relies on
asyncio's tasks and handles; knows nothing of nodes, networks or disks.
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
"""Callbacks at one moment, after which time is held to stand still for ever."""

CANCELLED_MAX: Final = 1000
"""Cancelled timers that may lie in the queue before it is cleared of them."""

CLOSE_ATTEMPTS_MAX: Final = 20
"""How often a dropped coroutine is told to end; some go on in spite of it."""

LIFE: Final[ContextVar[Life | None]] = ContextVar("life", default=None)


class Died(BaseException):
    """The process was killed in the middle of this call; nobody may catch it."""


class NothingWillHappen(AssertionError):
    """Somebody waits, no timer is set, and nobody can go on."""


class TimeStandsStill(AssertionError):
    """Somebody goes round in circles without waiting."""


class NeverEnds(AssertionError):
    """The scenario still runs at the end of the virtual time that it may take."""


class Life:
    """A process from its start to its end. What is done in `context` is done by it, with all that follows from it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.is_frozen = False
        """It stands still, as after SIGSTOP: what it would have done is done when it is thawed."""
        self.held: list[Handle] = []
        """What it would have done."""
        self.tasks: dict[asyncio.Task[Any], None] = {}
        """Those that are not done. Held here, for a task that is collected says goodbye."""
        self.context = copy_context()
        self.context.run(LIFE.set, self)

    def __repr__(self) -> str:
        return f"<{self.name}{', dead' if self.is_dead else ''}>"


class Handle:
    """A callback that waits for its turn, or for its moment: what asyncio has of `asyncio.Handle`, and no more."""

    __slots__ = ("_loop", "args", "callback", "context", "is_cancelled", "life")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, timers_of: VirtualLoop | None
    ) -> None:
        """`timers_of` is the loop that wants to hear when it is cancelled."""
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
        """Its moment has come: it waits for its turn like others."""
        self._loop = None

    def __repr__(self) -> str:
        return f"<{self.callback} of {self.life}>"


class VirtualLoop:
    """Runs a coroutine, and whatever that starts, until it is done: `run_until_complete`.

    To asyncio it is a loop like others, of which it has what needs no world: timers, tasks and futures.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._as_loop = cast(asyncio.AbstractEventLoop, self)
        self._time = start
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}
        """Those of no life."""
        self._timer_count = 0
        self._cancelled_count = 0
        self._steps = 0
        self._is_running = False
        self._is_closed = False
        self._running_life: Life | None = None
        self.deadline = inf
        """Virtual time after which a scenario that still runs is held to run for ever."""
        self.before_jump: list[Callable[[], None]] = []
        """Called when nothing is left to do at this moment; they may find something."""
        self.on_failure: Callable[[dict[str, Any]], None] = lambda context: None
        """Called with what asyncio says of an exception that nobody has caught."""

    # --- what asyncio calls ---

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
            self._timer_count += 1  # of two timers for one moment the one that was set first comes first
            heapq.heappush(self._timers, (when, self._timer_count, handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        raise AssertionError("a thread in a simulation: no seed could repeat what it does")

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
            # Without a life of its own: whoever dies before it is done must still find it here.
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
        """Told by a timer: it stays in the queue, but not for long if it is one of many."""
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
        """Those that it has set and whose moment is to come."""
        return [handle for _, _, handle in self._timers if handle.life is life and not handle.is_cancelled]

    def thaw(self, life: Life) -> None:
        """Lets a life go on that was frozen, with all timers that have passed meanwhile."""
        life.is_frozen = False
        self._ready.extend(life.held)
        life.held.clear()

    def bury(self, lives: list[Life]) -> None:
        """Ends the loop, and the coroutines that were dropped: what they say now nobody hears."""
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()
        asyncio._set_running_loop(self._as_loop)
        # One coroutine that waits while it is closed is left to the interpreter by the one that waited for it.
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
        """Calls what is ready now, but not what that makes ready."""
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
            raise NothingWillHappen(f"at {self._time} nobody can go on, and no timer is set")
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
    """A task that is dropped on purpose needs no warning."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
