"""Streams of a connection, their transactions, and the limits on open transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flowstone.box.engine.transaction import InteractiveTransaction
from flowstone.iproto import errors


class RequestStream:
    """A stream: its requests are executed one after the other, and may share a transaction."""

    __slots__ = ("deadline", "is_known", "last", "transaction")

    def __init__(self) -> None:
        self.transaction: InteractiveTransaction | None = None
        self.deadline = 0.0
        self.is_known = False
        """The limit that `OpenTransactions` counts the transaction for."""
        self.last: asyncio.Future[None] | None = None
        """Done when the last pending request of the stream is done; None if none is pending."""

    def expire(self, now: float) -> None:
        """Abort the open transaction if its deadline has passed; requests get error 231 until the client ends it."""
        if self.transaction is not None and now >= self.deadline:
            self.transaction.fail(errors.TransactionTimeout("Transaction has been aborted by timeout"))

    def usable(self, now: float) -> InteractiveTransaction | None:
        """Return the open transaction, if any; raise the reason if it has failed or timed out."""
        if self.transaction is not None:
            self.expire(now)
            self.transaction.check()
        return self.transaction


class OpenTransactions:
    """Limits the open transactions of all clients: each may have a read view, which makes every write slower.

    Transactions of clients that have not authenticated have a smaller limit of their own, so that they do not use up
    the limit of others. It does not apply if guests have been granted rights.
    """

    def __init__(
        self, count_max: int, count_max_before_auth: int, trusts_guests: Callable[[], bool] = lambda: True
    ) -> None:
        self._max = {True: count_max, False: count_max_before_auth}
        self._count = {True: 0, False: 0}
        self._trusts_guests = trusts_guests

    def add(self, is_authenticated: bool) -> bool:
        """Count one more transaction; return the argument for `remove`. Raise Unsupported at the limit."""
        is_known = is_authenticated or self._trusts_guests()
        most = self._max[is_known]
        if self._count[is_known] >= most:
            whose = "" if is_known else " before authentication"
            raise errors.Unsupported(f"This server does not support more than {most} open transactions{whose}")
        self._count[is_known] += 1
        return is_known

    def remove(self, is_known: bool) -> None:
        self._count[is_known] -= 1
