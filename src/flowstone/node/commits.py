"""Commits: from a transaction that has taken effect in memory to rows in the log, and back if the log refuses.

The rows are numbered and encoded here, in the order of their statements; the journal writes them together with
whatever else the turn brings. A transaction that could not be written is rolled back, the newest first, before anybody
is told. What others may see meanwhile, `box/transaction.py` decides.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Mapping
from typing import Protocol

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.read_view import ReadView
from flowstone.box.system import CLUSTER_ID
from flowstone.box.transaction import Statement, Transaction
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.row import Row, encode_header, encode_uint
from flowstone.node.journal import Journal, JournalClosed
from flowstone.outside import Clock
from flowstone.xlog.transactions import make_transaction

Done = Callable[[FlowstoneError | None], None]
Listener = Callable[[tuple[Statement, ...]], None]


class Revocable(Protocol):
    """Something that is visible and can be taken back until it is in the log."""

    def rollback(self) -> None: ...

    def hide_from(self, view: ReadView) -> None:
        """Makes `view`, just opened, see what was there before."""
        ...


class Commits:
    """The way of transactions into the log. Turns write what they did in bulk themselves, and settle it here."""

    def __init__(self, box: Box, journal: Journal, clock: Clock) -> None:
        self._box = box
        self._journal = journal
        self._clock = clock
        self._is_flush_due = False
        self.on_commit: list[Listener] = []
        self.on_rollback: list[Listener] = []
        self.on_members: Callable[[], None] | None = None
        """Called when a change of `_cluster` is in the log."""

    def submit(self, transaction: Transaction, done: Done) -> None:
        """Queues the transaction's rows; `done` is told when they are written, or that all was rolled back.

        Raises, with the transaction rolled back, what can be known before anything is written.
        """
        statements = tuple(transaction.statements)
        if not statements:
            done(None)
            return
        try:
            rows, count, local_count = self._encode(transaction, statements)
        except BaseException:
            transaction.rollback()
            raise

        submit = lambda written: self._journal.submit(rows, count, written, local_count=local_count)  # noqa: E731
        self._send(transaction, statements, submit, done)

    def submit_replicated(
        self,
        effect: Revocable,
        rows: bytes,
        lsns: Mapping[int, int],
        done: Done,
        statements: tuple[Statement, ...] = (),
    ) -> None:
        """Queues rows that other instances have numbered, the last of each in `lsns`; `effect` takes them back.

        `statements` are for who listens. Otherwise as `submit`.
        """
        self._send(effect, statements, lambda written: self._journal.submit_replicated(rows, lsns, written), done)

    def _send(
        self, effect: Revocable, statements: tuple[Statement, ...], submit: Callable[[Done], None], done: Done
    ) -> None:
        def written(error: FlowstoneError | None) -> None:
            self.settle(effect, error)
            if statements:
                for listener in self.on_rollback if error else self.on_commit:
                    listener(statements)
                if error is None and self.on_members is not None and any(map(_is_about_members, statements)):
                    self.on_members()
            done(error)

        self._box.in_flight.append(effect)
        try:
            submit(written)
        except JournalClosed as error:
            self.settle(effect, error)
            raise
        except FlowstoneError as error:  # more than one transaction may be
            self.settle(effect, error)
            raise wal_error(error) from error

    @property
    def has_listeners(self) -> bool:
        """Whether somebody wants to hear of single transactions."""
        return bool(self.on_commit or self.on_rollback)

    @property
    def is_quiet(self) -> bool:
        """Nothing is in flight, nobody listens and a small write is quick: who is alone may use the journal itself."""
        return self._journal.is_ready and not self._box.in_flight and not self.has_listeners

    def settle(self, transaction: Revocable, error: FlowstoneError | None) -> None:
        """What was in flight is written, or taken back. Journals tell successes in order, failures backwards."""
        if error is None:
            self._box.in_flight.popleft()
        else:
            self._box.in_flight.pop()
            transaction.rollback()

    async def commit(self, transaction: Transaction) -> None:
        """Returns when the transaction is in the log; raises ER_WAL_IO when it was rolled back instead."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: FlowstoneError | None) -> None:
            if written.cancelled():
                return  # who waited has gone: that alone undoes nothing
            if error is None:
                written.set_result(None)
            else:
                written.set_exception(wal_error(error))

        self.submit(transaction, done)
        if not self._is_flush_due:
            # Whoever else commits before the loop comes round again shares the write.
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)
        await written

    def _flush(self) -> None:
        self._is_flush_due = False
        self._journal.flush()

    def _encode(self, transaction: Transaction, statements: tuple[Statement, ...]) -> tuple[bytes, int, int]:
        """The rows, how many of them are ours, and how many local."""
        if transaction.is_sync:
            return self._encode_synchronous(statements)
        journal = self._journal
        if len(statements) == 1 and not statements[0].is_local:
            return self._encode_single(statements[0], journal.next_lsn(journal.replica_id)), 1, 0
        return self._encode_many(statements)

    def _encode_single(self, statement: Statement, lsn: int) -> bytes:
        """What `encode_header` gives, without the detour: this is one row per autocommit statement."""
        return b"".join(
            (
                b"\x84\x00",
                encode_uint(statement.type),
                b"\x02",
                encode_uint(self._journal.replica_id),
                b"\x03",
                encode_uint(lsn),
                b"\x04\xcb",
                struct.pack(">d", self._clock.wall()),
                statement.body,
            )
        )

    def _encode_many(self, statements: tuple[Statement, ...]) -> tuple[bytes, int, int]:
        journal, now = self._journal, self._clock.wall()
        lsn, local_lsn = journal.next_lsn(journal.replica_id), journal.next_lsn(0)
        first, first_local = lsn, local_lsn
        rows: list[Row] = []
        for statement in statements:
            if statement.is_local:
                rows.append(Row(statement.type, 0, GROUP_LOCAL, local_lsn, now, body=statement.body))
                local_lsn += 1
            else:
                rows.append(Row(statement.type, journal.replica_id, 0, lsn, now, body=statement.body))
                lsn += 1
        if rows[-1].group_id == GROUP_LOCAL and lsn > first and self._box.dialect is Dialect.V2_6:
            # 2.6 ends a mixed transaction with a global row, so that its end survives where local rows are left out.
            rows.append(Row(RequestType.NOP, journal.replica_id, 0, lsn, now))
            lsn += 1
        encoded = b"".join(encode_header(row) + row.body for row in make_transaction(rows).rows)
        return encoded, lsn - first, local_lsn - first_local

    def _encode_synchronous(self, statements: tuple[Statement, ...]) -> tuple[bytes, int, int]:
        """A replica set of one is its own quorum: the rows, and their CONFIRM right behind them."""
        if self._box.dialect is not Dialect.V2_6:
            raise errors.SyncQueueUnclaimed("The synchronous transaction queue doesn't belong to any instance")
        rows, count, local_count = self._encode_many(statements)
        journal = self._journal
        last = journal.next_lsn(journal.replica_id) + count - 1
        body = b"\x82\x02" + encode_uint(journal.replica_id) + b"\x03" + encode_uint(last)
        confirm = Row(RequestType.RAFT_CONFIRM, journal.replica_id, 0, last + 1, self._clock.wall(), last + 1)
        return rows + encode_header(confirm) + body, count + 1, local_count


def _is_about_members(statement: Statement) -> bool:
    return statement.space is not None and statement.space.id == CLUSTER_ID


def wal_error(cause: FlowstoneError) -> errors.TarantoolError:
    """What a client is told of a write that failed; the cause is in the log of the node."""
    error = errors.WalIo("Failed to write to disk")
    error.__cause__ = cause
    return error
