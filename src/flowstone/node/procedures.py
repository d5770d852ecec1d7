"""What CALL reaches: Python functions registered on the node, and a built-in set under Tarantool's own names.

Here is how a name is found and a procedure run; the built-in ones live in `procedures_box.py` (box.info, box.cfg, …),
`procedures_schema.py` (box.schema.*, box.sequence.*) and `procedures_space.py` (methods of spaces and indexes). Whether
the user may call it at all has been checked before. There is no Lua: a name that is not found is error 33.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from flowstone.box.transaction import InteractiveTransaction, Transaction
from flowstone.errors import LocalProtocolError
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack
from flowstone.node.instance import Function, Instance
from flowstone.node.tuples import Tuple
from flowstone.node.watchers import Watchers

if TYPE_CHECKING:
    from flowstone.node.session import Session

LOG = logging.getLogger("flowstone.node")

Results = list[bytes]
"""What a procedure returns, each value as MessagePack."""

Outcome = Results | Awaitable[Results]

_ELEMENTS = msgspec.msgpack.Decoder(list[msgspec.Raw])


@dataclass(slots=True, eq=False)
class Call:
    """One CALL: its arguments, whose rights it has, and the stream's transaction that it is part of, if any."""

    instance: Instance
    watchers: Watchers
    name: str
    arguments: tuple[Any, ...]
    user: int
    session: Session
    transaction: InteractiveTransaction | None = None
    sync: int = 0

    def get(self, number: int) -> Any:
        """An argument, counted from 0; None where there is none."""
        return self.arguments[number] if number < len(self.arguments) else None

    def options(self, number: int) -> dict[str, Any]:
        """An argument that is a table of options; an empty table looks like an empty array."""
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

    def reading(self) -> Transaction:
        """A transaction to read with."""
        return self.transaction if self.transaction is not None else self.instance.box.begin(self.user)

    def writing(self, statement: Callable[[Transaction], Results]) -> Outcome:
        """Runs `statement` in the stream's transaction, or in one of its own and waits until that is in the log."""
        transaction = self.transaction
        if transaction is None:
            return self._commit(statement)
        return transaction.attempt(lambda: statement(transaction))

    async def _commit(self, statement: Callable[[Transaction], Results]) -> Results:
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
"""Finds what has no fixed name, such as methods of spaces; None if it is not of its kind, or not there."""


class Procedures:
    """Built-in procedures by name, and ways to find others."""

    def __init__(self, table: dict[str, Procedure], finders: tuple[Finder, ...]) -> None:
        self._table = table
        self._finders = finders

    def run(self, call: Call) -> Outcome:
        """Runs what the call names. A function of the user's hides a built-in procedure of its name."""
        function = call.instance.functions.get(call.name)
        if function is not None:
            return _run_function(call, function)
        procedure = self._table.get(call.name)
        for finder in self._finders:
            if procedure is not None:
                break
            procedure = finder(call.instance, call.name)
        if procedure is None:
            raise errors.NoSuchProc(f"Procedure '{call.name}' is not defined")
        return procedure(call)


def value(*values: Any) -> Results:
    """Results that are plain values."""
    return [pack(one) for one in values]


def array(tuples: list[bytes]) -> bytes:
    """One result that is an array of raw values."""
    count = len(tuples)
    head = bytes((0x90 + count,)) if count < 16 else b"\xdd" + count.to_bytes(4, "big")
    return head + b"".join(tuples)


def rows_of_call_16(results: Results) -> Results:
    """Results as CALL_16 gives them: each a tuple; an array of arrays as its one result is several tuples."""
    if len(results) == 1 and _is_array(results[0]):
        elements = [bytes(raw) for raw in _ELEMENTS.decode(results[0])]
        if not elements or not _is_array(elements[0]):
            return results
        results = elements
    return [raw if _is_array(raw) else b"\x91" + raw for raw in results]


def _is_array(raw: bytes) -> bool:
    return 0x90 <= raw[0] <= 0x9F or raw[0] in (0xDC, 0xDD)


def _run_function(call: Call, function: Function) -> Outcome:
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
    """An error of the user's own function reaches the client as an error of a Lua function would."""
    if isinstance(error, errors.TarantoolError):
        return error
    LOG.warning("function %s failed", call.name, exc_info=error)
    return errors.ProcLua(f"{type(error).__name__}: {error}")


def _returned(call: Call, returned: Any) -> Results:
    """`return a, b` are two results, as in Lua; nothing is none."""
    if returned is None:
        return []
    results = returned if isinstance(returned, tuple) else (returned,)
    try:
        return [pack(_plain(one)) for one in results]
    except LocalProtocolError as error:
        raise errors.ProcLua(f"function {call.name} returned what {error.message}") from error


def _plain(result: Any) -> Any:
    """Tuples of the node's spaces are arrays to a client."""
    if isinstance(result, Tuple):
        return result.values
    if isinstance(result, list | tuple):
        return [_plain(one) for one in result]
    if isinstance(result, dict):
        return {key: _plain(one) for key, one in result.items()}
    return result
