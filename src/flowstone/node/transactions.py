"""Transactions and read views of a node, as a program uses them.

Thin: which statements conflict, and what a view sees, `box/transaction.py` and `box/read_view.py` decide.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from flowstone.box.dialect import Dialect
from flowstone.box.transaction import InteractiveTransaction, Isolation
from flowstone.iproto import errors
from flowstone.node.instance import Instance
from flowstone.node.linearizable import linearization_point
from flowstone.node.spaces import TransactionSpace, ViewSpace, ViewTransaction

ISOLATIONS: Final = {
    "default": Isolation.DEFAULT,
    "read-committed": Isolation.READ_COMMITTED,
    "read-confirmed": Isolation.READ_CONFIRMED,
    "best-effort": Isolation.BEST_EFFORT,
    "linearizable": Isolation.LINEARIZABLE,
}
"""By the names of `box.begin{txn_isolation = …}`."""


class Transaction:
    """Statements that become true together when the block ends, or not at all.

    They see everything as it was when the first of them was made, and what they did themselves. Leaving the block
    waits for the log, and for a quorum where they are synchronous. Where somebody else changed what was read here, and
    was first, it raises TransactionConflict, and nothing was done; an exception in the block takes everything back.
    """

    def __init__(
        self, instance: Instance, isolation: str, *, is_sync: bool = False, timeout: float | None = None
    ) -> None:
        if isolation not in ISOLATIONS:
            raise errors.IllegalParams(f"Illegal parameters, txn_isolation must be one of {', '.join(ISOLATIONS)}")
        if is_sync and instance.box.dialect is Dialect.V2_6:
            # Its replicas know by the space alone what has to wait, and would stop at the verdict.
            raise errors.Unsupported("Dialect 2.6 does not support synchronous transactions on asynchronous spaces")
        if timeout is not None and not timeout > 0:
            raise errors.IllegalParams("Illegal parameters, timeout must be a number greater than 0")
        self._instance = instance
        self._is_sync = is_sync
        self._timeout = timeout
        self._isolation = ISOLATIONS[isolation]
        self._transaction: InteractiveTransaction | None = None
        self._begun = 0.0

    async def __aenter__(self) -> Self:
        instance = self._instance
        self._begun = instance.outside.clock.monotonic()
        if self._isolation is Isolation.LINEARIZABLE:
            await linearization_point(instance, self._seconds)
        self._transaction = instance.box.begin_interactive(isolation=self._isolation)
        if self._is_sync:
            self._transaction.make_sync()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        transaction, self._transaction = self._open(), None
        if error is not None:
            transaction.end()
            return
        instance = self._instance
        if instance.outside.clock.monotonic() - self._begun > self._seconds:
            transaction.end()
            raise errors.TransactionTimeout("Transaction has been aborted by timeout")
        await instance.commits.commit(transaction.prepare())

    @property
    def _seconds(self) -> float:
        """How long it may take."""
        return self._instance.configuration.txn_timeout if self._timeout is None else self._timeout

    def space(self, space: str | int) -> TransactionSpace:
        """The space with this name or id, inside the transaction."""
        transaction = self._open()
        return TransactionSpace(transaction, transaction.space(space).id)

    def rollback(self) -> None:
        """Takes back what was done so far; the block may go on, with an empty transaction that sees what is there."""
        self._open().rollback()

    def _open(self) -> InteractiveTransaction:
        if self._transaction is None:
            raise errors.NoTransaction("No active transaction")
        return self._transaction


class View:
    """All spaces as they were when it was opened. Close it soon: what is overwritten meanwhile is kept for it."""

    def __init__(self, instance: Instance) -> None:
        self._view = instance.box.open_view()
        self._transaction = ViewTransaction(instance.box, self._view)

    def space(self, space: str | int) -> ViewSpace:
        """The space with this name or id, as it was; ReadViewClosed once the view is."""
        self._view.check()
        return ViewSpace(self._transaction, self._transaction.space(space).id)

    def close(self) -> None:
        """Gives back what it holds; closing twice is harmless."""
        self._view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
