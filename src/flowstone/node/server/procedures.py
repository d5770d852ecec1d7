"""Procedures for CALL: Python functions registered on the node, and built-in procedures with Tarantool's names.

This module looks up names and runs procedures. The built-in procedures are in `procedures_box.py` (box.info, box.cfg,
…), `procedures_schema.py` (box.schema.*, box.sequence.*) and `procedures_space.py` (methods of spaces and indexes). The
caller has checked the right of the user to call. Functions in Lua are run by `node/lua/`, if its extra is installed.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from flowstone.box.engine.transaction import BoxTransaction
from flowstone.box.tuples import Tuple
from flowstone.errors import LocalProtocolError
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack
from flowstone.node.instance import Function, Instance
from flowstone.node.server.procedure_call import PythonProcedure
from flowstone.node.server.watchers import Watchers

if TYPE_CHECKING:
    from flowstone.node.lua.host import LuaHost
    from flowstone.node.server.session import Session

LOG = logging.getLogger("flowstone.node")

Results = list[bytes]
"""The results of a procedure, each as MessagePack."""

Outcome = Results | Awaitable[Results]

_ELEMENTS = msgspec.msgpack.Decoder(list[msgspec.Raw])


@dataclass(slots=True, eq=False)
class Call:
    """One CALL: its arguments, the user whose rights it has, and the transaction of its stream, if any."""

    instance: Instance
    watchers: Watchers
    name: str
    arguments: tuple[Any, ...]
    user: int
    session: Session
    transaction: BoxTransaction | None = None
    sync: int = 0

    def get(self, number: int) -> Any:
        """Return an argument, counted from 0; None if it is missing."""
        return self.arguments[number] if number < len(self.arguments) else None

    def options(self, number: int) -> dict[str, Any]:
        """Return an argument that is a table of options. An empty Lua table arrives as an empty array."""
        options = self.get(number)
        if options is None or options == ():
            return {}
        if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
            raise errors.IllegalParams("Illegal parameters, options should be a table")
        return options

    def text(self, number: int, name: str) -> str:
        value = self.get(number)
        if not isinstance(value, str):
            raise errors.IllegalParams(f"Illegal parameters, {name} should be a string")
        return value

    def number(self, number: int, name: str) -> int:
        value = self.get(number)
        if not isinstance(value, int) or isinstance(value, bool):
            raise errors.IllegalParams(f"Illegal parameters, {name} should be a number")
        return value

    def push(self, value: Any) -> None:
        """Send a value to the client before the reply, with the SYNC of the call."""
        self.session.push(self.sync, pack(_plain(value)))

    def reading(self) -> BoxTransaction:
        """Return the transaction for reads: the stream's transaction, or a new one."""
        return self.transaction if self.transaction is not None else self.instance.box.begin(self.user)

    def writing(self, statement: Callable[[BoxTransaction], Results]) -> Outcome:
        """Run `statement` in the transaction of the stream, or in a transaction of its own, which is then committed."""
        transaction = self.transaction
        if transaction is None:
            return self._commit(statement)
        return transaction.attempt(lambda: statement(transaction))

    async def _commit(self, statement: Callable[[BoxTransaction], Results]) -> Results:
        transaction = self.instance.box.begin(self.user)
        try:
            results = statement(transaction)
        except BaseException:
            transaction.rollback()
            raise
        await self.instance.commits.commit(transaction)
        return results


Procedure = Callable[[Call], Outcome]
Finder = Callable[[Instance, str], Procedure | None]
"""Returns the procedure of a name that is not fixed, such as a method of a space; None if there is none."""


class Procedures:
    """Built-in procedures by name, finders for others, and functions in Lua."""

    def __init__(self, table: dict[str, Procedure], finders: tuple[Finder, ...]) -> None:
        self._table = table
        self._finders = finders
        self._lua: LuaHost | None = None

    def run(self, call: Call) -> Outcome:
        """Run the procedure that the call names.

        A registered function hides a stored function with a body, which hides a built-in procedure of the same name.
        The global functions of Lua come last.
        """
        function = call.instance.functions.get(call.name)
        if function is not None:
            return _run_function(call, function)
        definition = call.instance.box.functions.get(call.name)
        if definition is not None and definition.body and definition.language == "LUA":
            return self._host(call.instance, f"function '{call.name}'").run_stored(call, definition)
        procedure = self._find(call.instance, call.name)
        if procedure is not None:
            return procedure(call)
        outcome = self._lua.run_global(call) if self._lua is not None else None
        if outcome is None:
            raise _not_defined(call.name)
        return outcome

    def run_built_in(self, call: Call) -> Outcome:
        """Run the built-in procedure that the call names."""
        procedure = self._find(call.instance, call.name)
        if procedure is None:
            raise _not_defined(call.name)
        return procedure(call)

    def evaluate(self, call: Call, expression: bytes) -> Outcome:
        """Run the text of an EVAL."""
        return self._host(call.instance, "EVAL").evaluate(call, expression)

    def _find(self, instance: Instance, name: str) -> Procedure | None:
        procedure = self._table.get(name)
        for finder in self._finders:
            if procedure is not None:
                break
            procedure = finder(instance, name)
        return procedure

    def _host(self, instance: Instance, what: str) -> LuaHost:
        if self._lua is None:
            from flowstone.node.lua.host import LuaHost
            from flowstone.node.lua.runtime import LuaMissing

            try:
                self._lua = LuaHost(instance, self.run_built_in, lambda name: self._find(instance, name) is not None)
            except LuaMissing as error:
                raise errors.Unsupported(
                    f"Flowstone does not support {what} without Lua: pip install 'flowstone[lua]'"
                ) from error
        return self._lua


def _not_defined(name: str) -> errors.TarantoolError:
    return errors.NoSuchProc(f"Procedure '{name}' is not defined")


def value(*values: Any) -> Results:
    """Return plain values as results."""
    return [pack(one) for one in values]


def array(tuples: list[bytes]) -> bytes:
    """Return a single result: the array of encoded values."""
    count = len(tuples)
    head = bytes((0x90 + count,)) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return head + b"".join(tuples)


def rows_of_call_16(results: Results) -> Results:
    """Return results in the form of CALL_16: each is a tuple, and a single array of arrays becomes several tuples."""
    if len(results) == 1 and _is_array(results[0]):
        elements = [bytes(raw) for raw in _ELEMENTS.decode(results[0])]
        if not elements or not _is_array(elements[0]):
            return results
        results = elements
    return [raw if _is_array(raw) else b"\x91" + raw for raw in results]


def _is_array(raw: bytes) -> bool:
    return 0x90 <= raw[0] <= 0x9F or raw[0] in (0xDC, 0xDD)


def _run_function(call: Call, function: Function) -> Outcome:
    if isinstance(function, PythonProcedure):
        return _await_function(call, function(call))
    try:
        returned = function(*call.arguments)
    except Exception as error:
        raise _failure(call, error) from error
    if inspect.isawaitable(returned):
        return _await_function(call, returned)
    return _returned(call, returned)


async def _await_function(call: Call, returned: Awaitable[Any]) -> Results:
    try:
        return _returned(call, await returned)
    except Exception as error:
        raise _failure(call, error) from error


def _failure(call: Call, error: Exception) -> errors.TarantoolError:
    """Return the error for the client. Exceptions of registered functions become ER_PROC_LUA, and are logged."""
    if isinstance(error, errors.TarantoolError):
        return error
    LOG.warning("function %s failed", call.name, exc_info=error)
    return errors.ProcLua(f"{type(error).__name__}: {error}")


def _returned(call: Call, returned: Any) -> Results:
    """Encode the returned value: a tuple stands for several results, as in Lua, and None for no result."""
    if returned is None:
        return []
    results = returned if isinstance(returned, tuple) else (returned,)
    try:
        return [pack(_plain(one)) for one in results]
    except LocalProtocolError as error:
        raise errors.ProcLua(f"result of function {call.name}: {error.message}") from error


def _plain(result: Any) -> Any:
    """Replace tuples of spaces by lists, which clients receive as arrays."""
    if isinstance(result, Tuple):
        return result.values
    if isinstance(result, list | tuple):
        return [_plain(one) for one in result]
    if isinstance(result, dict):
        return {key: _plain(one) for key, one in result.items()}
    return result
