"""Runs requests in Lua: stored functions, global functions, and EVAL.

Theory of operation: a request is a task, a coroutine in Lua. The host runs it in slices. A slice ends when the task
ends, or when it has to wait: for the log, for a timer, for another procedure; then the request continues in a task of
the event loop. Slices are limited in time (`runtime.py`), and after ROUND_SECONDS of slices the event loop runs
once before the next one, so that heartbeats and other clients are served in between.

Transactions are those of a real server without MVCC: they apply their statements at once, and a wait aborts them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final

from flowstone.box.engine.function import FunctionDefinition
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.extensions import ErrorRecord, ErrorStack
from flowstone.iproto.msgpack import pack
from flowstone.node.instance import Instance
from flowstone.node.lua.box_functions import BoxFunctions
from flowstone.node.lua.runtime import FAILED, WAITING, LuaState
from flowstone.node.lua.task import LuaTask, failure, split_values
from flowstone.node.lua.value_functions import value_functions
from flowstone.node.server.procedures import Call, Outcome, Results

LOG = logging.getLogger("flowstone.node")

ROUND_SECONDS: Final = 0.02
"""Time of slices after which further requests wait for the next iteration of the event loop."""

WAITING_MAX: Final = 10_000
"""Requests in Lua that may wait at the same time."""


class LuaHost:
    """Runs requests in Lua for one node. `run_built_in` runs a built-in procedure."""

    def __init__(
        self,
        instance: Instance,
        run_built_in: Callable[[Call], Outcome],
        has_built_in: Callable[[str], bool],
    ) -> None:
        self._instance = instance
        self._clock = instance.outside.clock
        self._box = BoxFunctions(instance, run_built_in, has_built_in)
        self._state = self._new_state()
        self._compiled: dict[str, tuple[FunctionDefinition, Any]] = {}
        self._last_id = 100
        self._spent = 0.0
        self._is_round_open = False
        self._queue: deque[asyncio.Future[None]] = deque()
        self._task_count = 0

    def _new_state(self) -> LuaState:
        functions = self._box.functions() | value_functions(self._instance.outside)
        state = LuaState(self._clock, functions)
        self._box.state = state
        return state

    # --- requests ---

    def evaluate(self, call: Call, expression: bytes) -> Outcome:
        """Run the text of an EVAL."""
        return self._begin(call, lambda: self._chunk(expression))

    def run_stored(self, call: Call, definition: FunctionDefinition) -> Outcome:
        """Run a stored function that has a body."""
        return self._begin(call, lambda: self._stored(definition))

    def run_global(self, call: Call) -> Outcome | None:
        """Run the global Lua function that the call names; return None if there is none."""
        name = call.name.encode("utf-8", "surrogateescape")
        if self._state.find_global(name) is None:
            return None
        return self._begin(call, lambda: self._state.find_global(name))

    def _chunk(self, expression: bytes) -> Any:
        function, problem = self._state.compile_expression(expression)
        if function is None:
            raise errors.ProcLua(_text(problem))
        return function

    def _stored(self, definition: FunctionDefinition) -> Any:
        known, function = self._compiled.get(definition.name, (None, None))
        if known is not definition:
            body = definition.body.encode("utf-8", "surrogateescape")
            function, problem = self._state.compile_body(body, definition.is_sandboxed)
            if function is None:
                raise errors.LoadFunction(f"Failed to dynamically load function '{definition.name}': {_text(problem)}")
            self._compiled[definition.name] = (definition, function)
        return function

    # --- slices ---

    def _begin(self, call: Call, compiled: Callable[[], Any]) -> Outcome:
        arguments = pack(call.arguments)
        self._last_id += 1
        task = LuaTask(self._last_id, call)
        if self._spent > ROUND_SECONDS or self._queue:
            return self._begin_later(task, compiled, arguments)
        answer = self._slice(task, lambda state: state.start(task.id, compiled(), arguments))
        return self._continue(task, answer) if answer[0] == WAITING else self._finished(task, answer)

    async def _begin_later(self, task: LuaTask, compiled: Callable[[], Any], arguments: bytes) -> Results:
        await self._turn()
        answer = self._slice(task, lambda state: state.start(task.id, compiled(), arguments))
        return await self._continue(task, answer) if answer[0] == WAITING else self._finished(task, answer)

    def _slice(self, task: LuaTask, run: Callable[[LuaState], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run a slice of the task, and account for its time."""
        begun = self._clock.monotonic()
        box, state = self._box, self._state
        task.state = task.state or state
        box.task, box.state = task, task.state
        try:
            answer = run(task.state)
        except BaseException:
            task.abandon()
            raise
        finally:
            box.task = None
            self._spent += self._clock.monotonic() - begun
            if self._spent > ROUND_SECONDS and not self._is_round_open:
                self._is_round_open = True
                asyncio.get_running_loop().call_soon(self._next_round)
        if task.state.has_run_out and task.state.collect() and task.state is self._state:
            LOG.warning("Lua: values kept by functions fill the memory; discarding them and all global variables")
            self._compiled.clear()
            self._state = self._new_state()
        return answer

    def _next_round(self) -> None:
        """A new iteration of the event loop: let requests in that wait for their turn, one after the other."""
        self._spent = 0.0
        self._is_round_open = bool(self._queue)
        while self._queue:
            waiting = self._queue.popleft()
            if not waiting.done():
                waiting.set_result(None)
                break
        if self._is_round_open:
            asyncio.get_running_loop().call_soon(self._next_round)

    async def _turn(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        if not self._is_round_open:
            self._is_round_open = True
            asyncio.get_running_loop().call_soon(self._next_round)
        await turn

    async def _continue(self, task: LuaTask, answer: tuple[Any, ...]) -> Results:
        """Wait for what the task waits for, and run its next slices."""
        state = task.state
        assert state is not None
        if self._task_count >= WAITING_MAX:
            self._cancel(task)
            raise errors.Unsupported(f"This node does not support more than {WAITING_MAX} waiting requests in Lua")
        self._task_count += 1
        try:
            while answer[0] == WAITING:
                task.abort_by_yield()
                assert task.awaited is not None, "a task that waits has told for what"
                values = await _settled(task.awaited)
                if self._spent > ROUND_SECONDS or self._queue:
                    await self._turn()
                answer = self._slice(task, lambda state: state.resume(task.id, *values))  # noqa: B023
        except BaseException:
            self._cancel(task)
            raise
        finally:
            self._task_count -= 1
        return self._finished(task, answer)

    def _cancel(self, task: LuaTask) -> None:
        """Cancel a task whose client has disconnected."""
        task.abandon()
        if inspect.iscoroutine(task.awaited):
            task.awaited.close()
        if task.state is not None:
            task.state.drop(task.id)

    def _finished(self, task: LuaTask, answer: tuple[Any, ...]) -> Results:
        """Return the results as one array of bytes per value; raise the error of the request."""
        was_open = task.abandon()
        if answer[0] == FAILED:
            raise _error(*answer[1:])
        if was_open:
            raise errors.FunctionTxActive("Transaction is active at return from function")
        return split_values(answer[2], int(answer[1]))


async def _settled(awaited: Awaitable[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the values that resume a task: True and results, or False and an error."""
    try:
        return await awaited
    except FlowstoneError as error:
        return failure(error)


def _error(code: int, message: bytes, kind: bytes = b"") -> errors.TarantoolError:
    """Return the error of a request; `kind` is the class of an error object."""
    text = _text(message)
    stack = None
    if kind == b"ClientError" and code == errors.ProcLua.code:  # of box.error: other errors of this code are of LuaJIT
        stack = ErrorStack((ErrorRecord("ClientError", text, code=code),))
    return errors.error_of(code, text, stack)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
