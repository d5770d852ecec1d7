"""A LuaJIT state with limits on memory and on the time between two waits.

User code sees only what the `.lua` files of this package give it: no Python object, no file, no library of C. Python
functions take and return strings, numbers and booleans only. A state whose memory is nearly used up by values that user
code keeps is replaced by a new one (`LuaState.is_full`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.resources import files
from typing import Any, Final

from flowstone.errors import FlowstoneError
from flowstone.outside import Clock

LOG = logging.getLogger("flowstone.node")

MEMORY_MAX: Final = 256 * 1024 * 1024
"""Bytes at which LuaJIT cannot allocate more."""

MEMORY_OF_REQUESTS_MAX: Final = 192 * 1024 * 1024
"""Bytes at which a running request is stopped."""

HEADROOM: Final = 1024 * 1024
"""Bytes that are always free when a value crosses from Python to Lua: LuaJIT ends the process if that fails."""

SLICE_SECONDS: Final = 0.5
"""Time after which a request that does not wait is stopped. Heartbeats are sent between slices, each second."""

SLICE_EXCEEDED: Final = b"fiber slice is exceeded"
MEMORY_EXCEEDED: Final = b"not enough memory"

_SOURCES: Final = ("kernel", "pattern", "codec", "tuple", "space", "box", "modules")

DONE, FAILED, WAITING = range(3)
"""States of a request after a slice."""


class LuaMissing(FlowstoneError):
    """The extra for Lua is not installed."""


class LuaState:
    """One LuaJIT state. `functions` are the Python functions that Lua may call, by name."""

    def __init__(self, clock: Clock, functions: dict[str, Callable[..., Any]]) -> None:
        try:
            from lupa import luajit21
        except ImportError:
            raise LuaMissing("Lua needs lupa, which is not installed", hint="pip install 'flowstone[lua]'") from None
        self._error: type[Exception] = luajit21.LuaError
        self._monotonic = clock.monotonic
        self._deadline = 0.0
        self._reason = SLICE_EXCEEDED
        self._memory_max = MEMORY_MAX
        self._lua: Any = luajit21.LuaRuntime(
            encoding=None,
            unpack_returned_tuples=True,
            register_eval=False,
            register_builtins=False,
            attribute_filter=_no_attribute,
            max_memory=MEMORY_MAX,
        )
        self._lua.set_max_memory(MEMORY_MAX, total=True)
        self.has_run_out = False
        """True if a request met the memory limit since the last collection."""
        offered = dict(functions) | {"exceeded": self._exceeded, "reason": lambda: self._reason}
        kernel = self._load(offered)
        self._start, self._resume, self._drop = kernel["start"], kernel["resume"], kernel["drop"]
        self._eval, self._compile, self._find = kernel["eval"], kernel["compile"], kernel["find"]

    def _load(self, functions: dict[str, Callable[..., Any]]) -> dict[str, Any]:
        """Run the sources, and return the functions of the kernel."""
        lua = self._lua
        table = lua.table_from({name.encode(): self._crossing(function) for name, function in functions.items()})
        package = files(__package__)
        kernel: Any = None
        for name in _SOURCES:
            text = package.joinpath(f"{name}.lua").read_bytes()
            chunk = lua.compile(text, name=f"={name}.lua".encode())
            kernel = chunk(table) if kernel is None else (chunk(kernel), kernel)[1]
        kernel[b"open"]()
        return {name: kernel[name.encode()] for name in ("start", "resume", "drop", "eval", "compile", "find")}

    def _crossing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with room for its result in Lua, and without exceptions, which would cross as objects."""

        def run(*arguments: Any) -> Any:
            try:
                answer = function(*arguments)
            except Exception:
                LOG.exception("function for Lua failed")
                answer = False, 0, b"Internal error"
            if type(answer) is tuple:
                self.reserve(sum([len(one) for one in answer if type(one) is bytes]))
            else:
                self.reserve(len(answer) if type(answer) is bytes else 0)
            return answer

        return run

    # --- compiling ---

    def compile_expression(self, text: bytes) -> tuple[Any, bytes]:
        """Return the Lua function for the text of EVAL, or None and the problem."""
        self.reserve(len(text))
        return _function_or_problem(self._eval(text))

    def compile_body(self, body: bytes, is_sandboxed: bool) -> tuple[Any, bytes]:
        """Return the Lua function for the body of a stored function, or None and the problem."""
        self.reserve(len(body))
        return _function_or_problem(self._compile(body, is_sandboxed))

    def find_global(self, name: bytes) -> Any:
        """Return the global Lua function of this name, such as `a.b:c`; None if there is none."""
        self.reserve(len(name))
        return self._find(name)

    # --- slices ---

    def start(self, task: int, function: Any, arguments: bytes) -> tuple[Any, ...]:
        """Run a function until it ends or waits; return a state, then count and bytes of results, or code and text."""
        return self._run(self._start, len(arguments), task, function, arguments)

    def resume(self, task: int, *values: Any) -> tuple[Any, ...]:
        """Continue a task with the result that it has waited for."""
        return self._run(self._resume, sum(len(one) for one in values if isinstance(one, bytes)), task, *values)

    def drop(self, task: int) -> None:
        """Forget a task that waits."""
        self.reserve(0)
        self._drop(task)

    def _run(self, function: Any, size: int, *arguments: Any) -> tuple[Any, ...]:
        self._reason = SLICE_EXCEEDED
        self._deadline = self._monotonic() + SLICE_SECONDS
        self.reserve(size)
        try:
            answer: Any = function(*arguments)
        except self._error as error:  # in the kernel itself, such as no memory for a coroutine
            self.has_run_out = True
            return FAILED, 32, str(error).encode("utf-8", "replace")
        if not isinstance(answer, tuple):
            return (answer,)
        if answer[0] == FAILED and MEMORY_EXCEEDED in answer[2]:
            self.has_run_out = True
        return answer

    def is_late(self) -> bool:
        """True if the running slice is too long."""
        return self._monotonic() > self._deadline

    def _exceeded(self) -> bool:
        """Called by the hook: return True if the running request must be stopped."""
        if self._monotonic() > self._deadline:
            return True
        if self._lua.get_memory_used(total=True) > MEMORY_OF_REQUESTS_MAX:
            self._lua.gccollect()
            if self._lua.get_memory_used(total=True) > MEMORY_OF_REQUESTS_MAX:
                self._reason = MEMORY_EXCEEDED
                self.has_run_out = True
                return True
        return False

    # --- memory ---

    def reserve(self, size: int) -> None:
        """Make sure that a value of this size can cross to Lua."""
        needed = self._lua.get_memory_used(total=True) + 2 * size + HEADROOM
        wanted = max(needed, MEMORY_MAX)
        if wanted != self._memory_max:
            self._memory_max = wanted
            self._lua.set_max_memory(wanted, total=True)

    def collect(self) -> bool:
        """Collect garbage after a request has met the limit; return True if values that user code keeps fill half of
        the memory."""
        self.has_run_out = False
        self._lua.gccollect()
        return bool(self._lua.get_memory_used(total=True) > MEMORY_OF_REQUESTS_MAX // 2)


def _no_attribute(target: object, name: object, is_setting: bool) -> object:
    raise AttributeError("Python objects have no attributes in Lua")


def _function_or_problem(compiled: Any) -> tuple[Any, bytes]:
    return compiled if isinstance(compiled, tuple) else (compiled, b"")
