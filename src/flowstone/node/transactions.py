"""The public classes for transactions and read views of a node.

A thin layer: `box/engine/transaction.py` decides which statements conflict, `box/engine/read_view.py` what a view sees.
"""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from flowstone.box.dialect import Dialect
from flowstone.box.engine.transaction import ADMIN, InteractiveTransaction, Isolation
from flowstone.iproto import errors
from flowstone.node.instance import Instance
from flowstone.node.spaces import TransactionSpace, ViewSpace, ViewTransaction
from flowstone.node.synchro.linearizable import linearization_point

ISOLATIONS: Final = {
    "default": Isolation.DEFAULT,
    "read-committed": Isolation.READ_COMMITTED,
    "read-confirmed": Isolation.READ_CONFIRMED,
    "best-effort": Isolation.BEST_EFFORT,
    "linearizable": Isolation.LINEARIZABLE,
}
"""Isolation levels, by their names in `box.begin{txn_isolation = …}`."""


class Transaction:
    """A transaction: its statements are committed together when the block ends, or not at all.

    The statements see the data as of the first statement, and their own changes. The end of the block waits until the
    transaction is in the log and, if it is synchronous, confirmed by a quorum. It raises TransactionConflict if another
    transaction has changed data that this one read, and TransactionTimeout if the transaction took too long; in both
    cases nothing is changed. An exception in the block rolls the transaction back.

    Example:
        async with node.transaction() as transaction:
            orders = transaction.space("orders")
            if orders.get(42) is not None:
                orders.update(42, [("=", "status", "paid")])
    """

    def __init__(
        self,
        instance: Instance,
        isolation: str,
        *,
        is_sync: bool = False,
        timeout: float | None = None,
        user: int = ADMIN,
    ) -> None:
        if isolation not in ISOLATIONS:
            raise errors.IllegalParams(f"Illegal parameters, txn_isolation must be one of {', '.join(ISOLATIONS)}")
        if is_sync and instance.box.dialect is Dialect.V2_6:
            # A 2.6 replica treats a transaction as synchronous only because of its space, and would stop at the
            # CONFIRM.
            raise errors.Unsupported("Dialect 2.6 does not support synchronous transactions on asynchronous spaces")
        if timeout is not None and not timeout > 0:
            raise errors.IllegalParams("Illegal parameters, timeout must be a number greater than 0")
        self._instance = instance
        self._is_sync = is_sync
        self._timeout = timeout
        self._user = user
        self._isolation = ISOLATIONS[isolation]
        self._transaction: InteractiveTransaction | None = None
        self._begun = 0.0

    async def __aenter__(self) -> Self:
        instance = self._instance
        self._begun = instance.outside.clock.monotonic()
        if self._isolation is Isolation.LINEARIZABLE:
            await linearization_point(instance, self._seconds)
        self._transaction = instance.box.begin_interactive(self._user, self._isolation)
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
        """The timeout of the transaction."""
        return self._instance.configuration.txn_timeout if self._timeout is None else self._timeout

    def space(self, space: str | int) -> TransactionSpace:
        """Return the space with this name or id, inside the transaction.

        Raises:
            TarantoolError: The space does not exist (error 36, ER_NO_SUCH_SPACE), or the block has ended.
        """
        transaction = self._open()
        return TransactionSpace(transaction, transaction.space(space).id)

    def rollback(self) -> None:
        """Roll back the statements so far. The block may continue, with an empty transaction that sees current data."""
        self._open().rollback()

    def _open(self) -> InteractiveTransaction:
        if self._transaction is None:
            raise errors.NoTransaction("No active transaction")
        return self._transaction


class View:
    """A read view: all spaces at the moment when it was opened.

    Close a view soon: it keeps all tuples in memory that are replaced or deleted while it is open.

    Example:
        with node.read_view() as view:
            for order in view.space("orders"):
                ...
    """

    def __init__(self, instance: Instance) -> None:
        self._view = instance.box.open_view()
        self._transaction = ViewTransaction(instance.box, self._view)

    def space(self, space: str | int) -> ViewSpace:
        """Return the space with this name or id, in the read view.

        Raises:
            TarantoolError: The view is closed, or the space did not exist (error 36, ER_NO_SUCH_SPACE).
        """
        self._view.check()
        return ViewSpace(self._transaction, self._transaction.space(space).id)

    def close(self) -> None:
        """Release the memory of the view. Closing twice has no effect."""
        self._view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
