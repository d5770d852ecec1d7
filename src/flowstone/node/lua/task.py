"""A request in Lua: its caller, its transaction, and what it waits for."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

import numpy as np

from flowstone.box.engine.transaction import BoxTransaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.scan_kernels import skip_value

if TYPE_CHECKING:
    from flowstone.node.lua.runtime import LuaState
    from flowstone.node.server.procedures import Call

Answer = tuple[Any, ...]
"""What a Python function returns to Lua: True and results, or False, a code and a text."""


class LuaTask:
    """One request. `user` is the user whose rights it has now; `transaction` is open, or that of its stream."""

    def __init__(self, id: int, call: Call) -> None:
        self.id = id
        self.call = call
        self.user = call.user
        self.state: LuaState | None = None
        self.transaction: BoxTransaction | None = call.transaction
        self.awaited: Awaitable[Answer] | None = None
        """The result that the task waits for, after a slice that ended by waiting."""
        self.savepoints: list[tuple[int, int]] = []
        self._failure: errors.TarantoolError | None = None

    @property
    def is_in_stream(self) -> bool:
        """True if the transaction is that of the stream, which the client commits."""
        return self.call.transaction is not None

    def begin(self, transaction: BoxTransaction) -> None:
        self.transaction = transaction
        self.savepoints = []
        self._failure = None

    def check(self) -> None:
        """Raise the error of an aborted transaction."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def end(self) -> BoxTransaction | None:
        """Take the open transaction of the task; raise the error of an aborted one."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure.with_traceback(None)
        transaction, self.transaction = self.transaction, None
        return transaction

    def forgive(self) -> None:
        """Forget that the transaction was aborted: the task has rolled it back."""
        self._failure = None

    def abort_by_yield(self) -> None:
        """Roll back the open transaction because the task waits, as a real server without MVCC does."""
        if self.transaction is not None and not self.is_in_stream:
            self.transaction.rollback()
            self.transaction = None
            self._failure = errors.TransactionYield("Transaction has been aborted by a fiber yield")

    def abandon(self) -> bool:
        """Roll back the transaction that the task has left open; return True if there was one."""
        was_open = (self.transaction is not None or self._failure is not None) and not self.is_in_stream
        if self.transaction is not None and not self.is_in_stream:
            self.transaction.rollback()
            self.transaction = None
        self._failure = None
        return was_open


def failure(error: FlowstoneError) -> Answer:
    """Return the values that raise the error in Lua."""
    code = error.code if isinstance(error, errors.TarantoolError) else 0
    return False, code, error.message.encode("utf-8", "surrogateescape")


def split_values(data: bytes, count: int) -> list[bytes]:
    """Return each of the MessagePack values that are joined in `data`."""
    if count == 1:
        return [data]
    buf, at, values = np.frombuffer(data, np.uint8), 0, []
    for _ in range(count):
        end = skip_value(buf, at, len(data))
        values.append(data[at:end])
        at = end
    return values
