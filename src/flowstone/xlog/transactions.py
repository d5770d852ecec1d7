"""Transactions: rows that share a TSN, grouped when read and marked when written.

Does no I/O. Checks rows as a real receiver does (`docs/spec/files.md#grouping`, `docs/spec/files.md#local-rows`).
Writes the same rows as a real server: the TSN is the LSN of the first global row, and only the last row has COMMIT and
the limbo's flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from flowstone.errors import LocalProtocolError, RemoteProtocolError
from flowstone.iproto.constants import GROUP_LOCAL, VCLOCK_MAX, Flag, RequestType
from flowstone.iproto.row import Row

CONTROL_TYPES = frozenset(
    (
        RequestType.RAFT,
        RequestType.RAFT_PROMOTE,
        RequestType.RAFT_DEMOTE,
        RequestType.RAFT_CONFIRM,
        RequestType.RAFT_ROLLBACK,
    )
)
"""Types of control rows; each control row is a transaction of its own."""

COMMIT = Flag.COMMIT.value
LIMBO_FLAGS = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value
# Plain numbers: an expression of IntFlags costs 2 us, more than the rest of marking a row.
_ALL_FLAGS = COMMIT | LIMBO_FLAGS


class TransactionError(RemoteProtocolError):
    """The rows do not form transactions; `replica_id` and `lsn` name the row that violates the rules."""

    def __init__(self, row: Row, what: str) -> None:
        super().__init__(f"row with LSN {row.lsn} of replica {row.replica_id} {what}")
        self.replica_id = row.replica_id
        self.lsn = row.lsn


class TornTransaction(TransactionError):
    """The rows end inside a transaction, as after a crash; `rows` are the rows of it that are present."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        super().__init__(rows[0], f"begins a transaction that ends after {len(rows)} rows without a commit")
        self.rows = rows


class LogTransaction(msgspec.Struct, frozen=True, gc=False):
    """Rows that take effect together. Never empty; only the last row has COMMIT."""

    rows: tuple[Row, ...]

    @property
    def is_local(self) -> bool:
        """Return True if all rows are local, that is, never replicated."""
        return all(row.group_id == GROUP_LOCAL for row in self.rows)

    @property
    def replica_id(self) -> int:
        """Return the originator, the replica id of the first global row; 0 for a local transaction."""
        return first_global(self.rows).replica_id

    @property
    def lsn(self) -> int:
        """Return the LSN of the originator's last global row; CONFIRM and ROLLBACK identify the transaction by it."""
        if len(self.rows) == 1:
            return self.rows[0].lsn
        origin = first_global(self.rows)
        return next(
            row.lsn
            for row in reversed(self.rows)
            if row.replica_id == origin.replica_id and row.group_id == origin.group_id
        )

    @property
    def tsn(self) -> int:
        return self.rows[0].tsn

    @property
    def timestamp(self) -> float:
        return self.rows[-1].timestamp

    @property
    def flags(self) -> int:
        """Return the flags of the last row, which apply to the whole transaction."""
        return self.rows[-1].flags


def first_global(rows: Sequence[Row]) -> Row:
    """Return the row whose LSN is the transaction's TSN: the first global row or, if all are local, the first row."""
    return next((row for row in rows if row.group_id != GROUP_LOCAL), rows[0])


class Grouping:
    """Groups rows, pushed one by one, into transactions. `pending` holds the rows of an unfinished transaction."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[Row] = []

    def push(self, row: Row) -> LogTransaction | None:
        """Return the transaction that `row` ends, or None. After an error the grouping must not be used again."""
        if row.replica_id >= VCLOCK_MAX:
            raise TransactionError(row, f"has a replica id above {VCLOCK_MAX - 1}")
        pending = self.pending
        if not pending:
            if row.flags & 1 and row.tsn == row.lsn:
                return LogTransaction((row,))
        elif row.tsn != pending[0].tsn:
            raise TransactionError(
                row, f"belongs to transaction {row.tsn}, but transaction {pending[0].tsn} has not ended"
            )
        if row.type in CONTROL_TYPES:
            raise TransactionError(row, f"of type {RequestType(row.type).name} is inside a transaction")
        pending.append(row)
        return self._end() if row.flags & 1 else None

    def _end(self) -> LogTransaction:
        rows, self.pending = tuple(self.pending), []
        origin = first_global(rows)
        if origin.lsn != origin.tsn:
            raise TransactionError(origin, f"is the first global row of a transaction with TSN {origin.tsn}")
        return LogTransaction(rows)


def group(rows: Iterable[Row]) -> Iterator[LogTransaction]:
    """Yield the transactions of `rows`. Raise TornTransaction after the last whole one if the rows end inside one."""
    grouping = Grouping()
    push = grouping.push
    for row in rows:
        transaction = push(row)
        if transaction is not None:
            yield transaction
    if grouping.pending:
        raise TornTransaction(tuple(grouping.pending))


def make_transaction(rows: Sequence[Row], flags: int = 0) -> LogTransaction:
    """Return `rows`, whose replica ids and LSNs are assigned, as one transaction to be written or sent.

    `flags` are the limbo's (WAIT_SYNC, WAIT_ACK), set on the last row. A row that already has the right TSN and flags
    keeps its bytes. If the last row of a mixed transaction is local, 2.6.0 appends a NOP; the caller adds it, because
    it has an LSN of its own.
    """
    if not rows:
        raise LocalProtocolError("transaction has no rows")
    if len(rows) > 1:
        for row in rows:
            if row.type in CONTROL_TYPES:
                raise LocalProtocolError(f"{RequestType(row.type).name} with LSN {row.lsn} cannot share a transaction")
    if flags & ~_ALL_FLAGS:
        raise LocalProtocolError(f"unknown row flags {flags:#x}")
    last = rows[-1]
    if len(rows) == 1:
        return LogTransaction((_marked(last, last.lsn, flags | COMMIT),))
    tsn = first_global(rows).lsn
    return LogTransaction((*(_marked(row, tsn, 0) for row in rows[:-1]), _marked(last, tsn, flags | COMMIT)))


def _marked(row: Row, tsn: int, flags: int) -> Row:
    if row.lsn <= 0:
        raise LocalProtocolError(f"row of replica {row.replica_id} has no LSN")
    if row.tsn == tsn and row.flags == flags:
        return row
    return Row(
        row.type,
        row.replica_id,
        row.group_id,
        row.lsn,
        row.timestamp,
        tsn,
        flags,
        row.sync,
        row.stream_id,
        row.body,
    )
