"""Streams of a connection: requests that are executed in order, their transactions, and how many may be open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flowstone.box.transaction import InteractiveTransaction
from flowstone.iproto import errors


class Stream:
    """Requests that are executed one after the other, and the transaction that they may be in."""

    __slots__ = ("deadline", "is_known", "last", "transaction")

    def __init__(self) -> None:
        self.transaction: InteractiveTransaction | None = None
        self.deadline = 0.0
        self.is_known = False
        """Whose the transaction is among the open ones."""
        self.last: asyncio.Future[None] | None = None
        """Done when the last of its requests that takes time is."""

    def expire(self, now: float) -> None:
        """Abort the open transaction if its deadline has passed; it answers error 231 until it is ended."""
        if self.transaction is not None and now >= self.deadline:
            self.transaction.fail(errors.TransactionTimeout("Transaction has been aborted by timeout"))

    def usable(self, now: float) -> InteractiveTransaction | None:
        """Return the open transaction; raise the reason if it has failed or timed out."""
        if self.transaction is not None:
            self.expire(now)
            self.transaction.check()
        return self.transaction


class OpenTransactions:
    """How many transactions all clients have open, in bounds: each may hold a view, which every write has to serve.

    Those of strangers, who have not authenticated and are no guests that somebody trusts, are few and counted apart,
    so that they are in nobody's way.
    """

    def __init__(
        self, count_max: int, count_max_before_auth: int, trusts_guests: Callable[[], bool] = lambda: True
    ) -> None:
        self._max = {True: count_max, False: count_max_before_auth}
        self._count = {True: 0, False: 0}
        self._trusts_guests = trusts_guests

    def add(self, is_authenticated: bool) -> bool:
        """One more; whether it is a known client's, which `remove` wants to know."""
        is_known = is_authenticated or self._trusts_guests()
        most = self._max[is_known]
        if self._count[is_known] >= most:
            whose = "" if is_known else " before authentication"
            raise errors.Unsupported(f"This server does not support more than {most} open transactions{whose}")
        self._count[is_known] += 1
        return is_known

    def remove(self, is_known: bool) -> None:
        self._count[is_known] -= 1
