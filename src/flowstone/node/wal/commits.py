"""Commits transactions that were applied in memory: writes their rows to the log, or rolls them back.

Rows are numbered and encoded here, in the order of their statements; the journal writes them in a batch with other
transactions. Synchronous transactions, and transactions after them, then wait for their verdict in the queue
(`node/synchro/limbo_driver.py`). Transactions that cannot be written, or that a verdict rejects, are rolled back,
newest first, before their clients are notified. `box/engine/transaction.py` decides what other clients can see
meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine.transaction import BoxTransaction, Statement
from flowstone.box.system import CLUSTER_ID
from flowstone.errors import FlowstoneError, OutcomeUnknown
from flowstone.iproto import errors
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.errors import TarantoolError
from flowstone.iproto.row import Row, encode_header, encode_lone_header
from flowstone.node.synchro.limbo_driver import NOBODY, LimboDriver, OnDone, Revocable, Waiter
from flowstone.node.wal.journal import Journal, JournalClosed
from flowstone.outside import Clock
from flowstone.replication.limbo.queue import LimboEntry
from flowstone.xlog.transactions import make_transaction

Listener = Callable[[tuple[Statement, ...]], None]


class Commits:
    """Commits transactions. Batches of statements write their rows themselves, and only `settle` them here."""

    def __init__(self, box: Box, journal: Journal, clock: Clock) -> None:
        self._box = box
        self._journal = journal
        self._clock = clock
        self._is_flush_due = False
        self.queue = LimboDriver(box, journal, clock)
        self.on_commit: list[Listener] = []
        self.on_rollback: list[Listener] = []
        self.on_members: Callable[[], None] | None = None
        """Called when a change of `_cluster` was committed."""

    def submit(self, transaction: BoxTransaction, done: OnDone) -> None:
        """Submit the rows of the transaction; call `done` when it is committed, or with the error if rolled back.

        An asynchronous transaction is committed when it is written, a synchronous one when it is confirmed. If an error
        is known before the write, roll the transaction back and raise it.
        """
        statements = tuple(transaction.statements)
        if not statements:
            done(None)
            return
        if not self._journal.replica_id and not all(statement.is_local for statement in statements):
            # The transaction began before this instance was expelled: without an id its rows would look local.
            transaction.rollback()
            raise self._box.read_only_error()
        if self.queue.is_empty and not transaction.is_sync:
            self._submit_plain(transaction, statements, done)
            return
        told = self._teller(statements, done)
        entry = None
        try:
            entry = self._enter(transaction, statements, told)
            rows, count, local_count = self._encode(statements, self.queue.limbo.row_flags(entry))
        except BaseException:
            transaction.rollback()
            if entry is not None:
                self.queue.withdraw(entry)
            raise
        # Verdicts identify the transaction by the LSN of its last replicated row.
        lsn = self._journal.next_lsn(self._journal.replica_id if count else 0) + (count or local_count) - 1
        submit = lambda logged: self._journal.submit(rows, count, logged, local_count=local_count)  # noqa: E731
        self._send(Waiter(transaction, told), submit, entry, lsn)

    def _submit_plain(self, transaction: BoxTransaction, statements: tuple[Statement, ...], done: OnDone) -> None:
        """Asynchronous commit: durable once written to the WAL."""
        try:
            rows, count, local_count = self._encode(statements, 0)
        except BaseException:
            transaction.rollback()
            raise
        # Local rows reach no other member, so they do not bind a later leader (see `Tenures.former`).
        if count:
            self.queue.note_async_commit()

        def written(error: FlowstoneError | None) -> None:
            self.settle(transaction, error)
            self._tell_listeners(statements, error)
            done(error)

        self._box.in_flight.append(transaction)
        try:
            self._journal.submit(rows, count, written, local_count=local_count)
        except FlowstoneError as error:
            self.settle(transaction, error)
            if isinstance(error, JournalClosed):
                raise
            raise client_error(error) from error

    def _enter(
        self, transaction: BoxTransaction, statements: tuple[Statement, ...], told: OnDone
    ) -> LimboEntry[Waiter] | None:
        """Return the entry of the transaction in the queue; None if it does not have to wait."""
        is_local = all(statement.is_local for statement in statements)
        size = sum(len(statement.body) for statement in statements)
        waiting = Waiter(transaction, told)
        return self.queue.submit(waiting, is_synchronous=transaction.is_sync, is_local=is_local, size=size)

    def must_wait(self, transaction: BoxTransaction) -> bool:
        """Return True if the transaction needs a verdict: the write alone does not commit it."""
        return transaction.is_sync or not self.queue.is_empty

    def submit_replicated(
        self,
        effect: Revocable,
        rows: bytes,
        lsns: Mapping[int, int],
        logged: OnDone,
        statements: tuple[Statement, ...] = (),
        *,
        entry: LimboEntry[Waiter] | None = None,
    ) -> None:
        """Submit rows of other instances, which keep their LSNs; `effect` rolls them back.

        `lsns` has the last LSN of each instance. `logged` is called when the rows are written, or with the error.
        `statements` are passed to listeners when they are committed. `entry` is the result of `LimboDriver.receive`
        for a pending transaction. Otherwise like `submit`.
        """
        submit = lambda done: self._journal.submit_replicated(rows, lsns, done)  # noqa: E731
        waiting = Waiter(effect, self._teller(statements, NOBODY)) if entry is None else entry.transaction
        self._send(waiting, submit, entry, entry.lsn if entry is not None else 0, logged)

    def submit_waiting(
        self, entries: Sequence[LimboEntry[Waiter]], submit: Callable[[OnDone], None], logged: OnDone | None = None
    ) -> None:
        """Submit several transactions, which have entries in the queue and LSNs, as one write."""

        def written(error: FlowstoneError | None) -> None:
            if error is None:
                self.queue.written_together(entries)
            else:
                # Newest first, as everywhere: see `Journal._fail`.
                for entry in reversed(entries):
                    self.queue.write_failed(entry)
            if logged is not None:
                logged(error)

        self._box.in_flight.extend(entry.transaction.effect for entry in entries)
        try:
            submit(written)
        except FlowstoneError as error:
            for entry in reversed(entries):
                self.settle(entry.transaction.effect, error)
                self.queue.withdraw(entry)
            raise

    def teller(self, statements: tuple[Statement, ...]) -> OnDone:
        """Return a callback that passes the outcome of a transaction without a client to listeners."""
        return self._teller(statements, NOBODY)

    def _teller(self, statements: tuple[Statement, ...], done: OnDone) -> OnDone:
        if not self.has_listeners and self.on_members is None:
            return done

        def told(error: FlowstoneError | None) -> None:
            self._tell_listeners(statements, error)
            done(error)

        return told if statements else done

    def _tell_listeners(self, statements: tuple[Statement, ...], error: FlowstoneError | None) -> None:
        # The transaction is neither committed nor rolled back, so listeners are not notified.
        if isinstance(error, OutcomeUnknown):
            return
        for listener in self.on_rollback if error else self.on_commit:
            listener(statements)
        if error is None and self.on_members is not None and any(map(_is_about_members, statements)):
            self.on_members()

    def _send(
        self,
        waiting: Waiter,
        submit: Callable[[OnDone], None],
        entry: LimboEntry[Waiter] | None,
        lsn: int,
        logged: OnDone | None = None,
    ) -> None:
        def written(error: FlowstoneError | None) -> None:
            if entry is None:
                self.settle(waiting.effect, error)
                waiting.told(error)
            elif error is None:
                self.queue.written(entry, lsn)
            else:
                self.queue.write_failed(entry)
            if logged is not None:
                logged(error)

        self._box.in_flight.append(waiting.effect)
        try:
            submit(written)
        except FlowstoneError as error:  # the transaction is too large, or the journal is closed
            self.settle(waiting.effect, error)
            if entry is not None:
                self.queue.withdraw(entry)
            if isinstance(error, JournalClosed):
                raise
            raise client_error(error) from error
        if entry is not None:
            entry.lsn = lsn  # `submit` has assigned it

    @property
    def has_listeners(self) -> bool:
        """True if listeners need to be called for each transaction."""
        return bool(self.on_commit or self.on_rollback)

    @property
    def is_quiet(self) -> bool:
        """True if a single small transaction may use the journal directly: nothing in flight, and no listeners."""
        return self._journal.is_ready and not self._box.in_flight and not self.has_listeners

    def settle(self, effect: Revocable, error: FlowstoneError | None) -> None:
        """Remove `effect` from the transactions in flight, and roll it back if there is an error.

        The journal reports successes in order, and failures newest first.
        """
        in_flight = self._box.in_flight
        if error is not None:
            in_flight.pop()
            effect.rollback()
        elif in_flight[0] is effect:
            in_flight.popleft()
        else:
            in_flight.remove(effect)  # without an effect, it does not wait for earlier pending transactions

    async def commit(self, transaction: BoxTransaction) -> None:
        """Wait until the transaction is committed; raise ER_WAL_IO, or the error of the verdict, if rolled back."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: FlowstoneError | None) -> None:
            if settled.done():
                return  # the caller was cancelled, which does not undo the commit, or got OutcomeUnknown
            if error is None:
                settled.set_result(None)
            else:
                settled.set_exception(error if isinstance(error, OutcomeUnknown) else client_error(error))

        self.submit(transaction, done)
        if not self._is_flush_due:
            # All commits of one iteration of the event loop share a write.
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)
        await settled

    def _flush(self) -> None:
        self._is_flush_due = False
        self._journal.flush()

    def _encode(self, statements: tuple[Statement, ...], flags: int) -> tuple[bytes, int, int]:
        """Return the rows, the number of replicated ones, and the number of local ones. `flags` are the limbo flags."""
        journal = self._journal
        if len(statements) == 1 and not statements[0].is_local:
            statement, replica_id = statements[0], journal.replica_id
            head = encode_lone_header(
                statement.type, replica_id, journal.next_lsn(replica_id), self._clock.wall(), flags
            )
            return head + statement.body, 1, 0
        return self._encode_many(statements, flags)

    def _encode_many(self, statements: tuple[Statement, ...], flags: int) -> tuple[bytes, int, int]:
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
        encoded = b"".join(encode_header(row) + row.body for row in make_transaction(rows, flags).rows)
        return encoded, lsn - first, local_lsn - first_local


def _is_about_members(statement: Statement) -> bool:
    return statement.space is not None and statement.space.id == CLUSTER_ID


def client_error(cause: FlowstoneError) -> TarantoolError:
    """Return the error for the client of a rolled back transaction. The error of the disk is in the hint."""
    if isinstance(cause, TarantoolError):
        return cause
    error = errors.WalIo("Failed to write to disk", hint=cause.message)
    error.__cause__ = cause
    return error
