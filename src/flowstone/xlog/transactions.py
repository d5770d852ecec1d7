"""Transactions: rows that share a TSN, grouped when read and marked when written.

Pure (reference: rows and transactions, grouping; local rows). The checks are those of a real receiver. What
is written is what a real server writes: the TSN is the LSN of the first global row, COMMIT and the limbo's
flags stand on the last row only.
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
"""Rows that speak about transactions; each stands alone, between them."""

COMMIT = Flag.COMMIT.value
LIMBO_FLAGS = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value
# Plain numbers: an expression of IntFlags costs 2 us, more than all the rest of marking a row.
_ALL_FLAGS = COMMIT | LIMBO_FLAGS


class TransactionError(RemoteProtocolError):
    """The rows do not form transactions: `lsn` of `replica_id` is the row where that shows."""

    def __init__(self, row: Row, what: str) -> None:
        super().__init__(f"row with LSN {row.lsn} of replica {row.replica_id} {what}")
        self.replica_id = row.replica_id
        self.lsn = row.lsn


class TornTransaction(TransactionError):
    """The rows end inside a transaction: `rows` are what there is of it. A crash leaves this."""

    def __init__(self, rows: tuple[Row, ...]) -> None:
        super().__init__(rows[0], f"begins a transaction that ends after {len(rows)} rows without a commit")
        self.rows = rows


class Transaction(msgspec.Struct, frozen=True, gc=False):
    """Rows that become true together. Never empty, its last row and no other has COMMIT."""

    rows: tuple[Row, ...]

    @property
    def is_local(self) -> bool:
        """No row of it is ever replicated."""
        return all(row.group_id == GROUP_LOCAL for row in self.rows)

    @property
    def replica_id(self) -> int:
        """The originator: that of the first global row; of a local transaction 0."""
        return first_global(self.rows).replica_id

    @property
    def lsn(self) -> int:
        """The LSN of the originator's last global row; CONFIRM and ROLLBACK name a transaction by it."""
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
        """The flags of the last row, which hold for all."""
        return self.rows[-1].flags


def first_global(rows: Sequence[Row]) -> Row:
    """The row whose LSN is the transaction's TSN; where all rows are local, the first one."""
    return next((row for row in rows if row.group_id != GROUP_LOCAL), rows[0])


class Grouping:
    """Rows in, one by one; transactions out. `pending` holds the rows of one that has not ended yet."""

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[Row] = []

    def push(self, row: Row) -> Transaction | None:
        """The transaction that `row` ends, or None. After an error the grouping is of no more use."""
        if row.replica_id >= VCLOCK_MAX:
            raise TransactionError(row, f"has a replica id above {VCLOCK_MAX - 1}")
        pending = self.pending
        if not pending:
            if row.flags & 1 and row.tsn == row.lsn:
                return Transaction((row,))
        elif row.tsn != pending[0].tsn:
            raise TransactionError(
                row, f"belongs to transaction {row.tsn}, but transaction {pending[0].tsn} has not ended"
            )
        if row.type in CONTROL_TYPES:
            raise TransactionError(row, f"of type {RequestType(row.type).name} stands inside a transaction")
        pending.append(row)
        return self._end() if row.flags & 1 else None

    def _end(self) -> Transaction:
        rows, self.pending = tuple(self.pending), []
        origin = first_global(rows)
        if origin.lsn != origin.tsn:
            raise TransactionError(origin, f"is the first global row of a transaction, whose TSN says {origin.tsn}")
        return Transaction(rows)


def group(rows: Iterable[Row]) -> Iterator[Transaction]:
    """The transactions of `rows`. If the rows end inside one, TornTransaction follows the last whole one."""
    grouping = Grouping()
    push = grouping.push
    for row in rows:
        transaction = push(row)
        if transaction is not None:
            yield transaction
    if grouping.pending:
        raise TornTransaction(tuple(grouping.pending))


def make_transaction(rows: Sequence[Row], flags: int = 0) -> Transaction:
    """`rows`, whose replica ids and LSNs are assigned, as one transaction ready to be written or sent.

    `flags` are the limbo's (WAIT_SYNC, WAIT_ACK) for the last row. A row that already is as it must be keeps
    its bytes. Of two global rows and a local one behind them 2.6.0 would end with a NOP; that row, having an
    LSN of its own, is the caller's to add.
    """
    if not rows:
        raise LocalProtocolError("a transaction without rows")
    if len(rows) > 1:
        for row in rows:
            if row.type in CONTROL_TYPES:
                raise LocalProtocolError(f"{RequestType(row.type).name} with LSN {row.lsn} must stand alone")
    if flags & ~_ALL_FLAGS:
        raise LocalProtocolError(f"unknown row flags {flags:#x}")
    last = rows[-1]
    if len(rows) == 1:
        return Transaction((_marked(last, last.lsn, flags | COMMIT),))
    tsn = first_global(rows).lsn
    return Transaction((*(_marked(row, tsn, 0) for row in rows[:-1]), _marked(last, tsn, flags | COMMIT)))


def _marked(row: Row, tsn: int, flags: int) -> Row:
    if row.lsn <= 0:
        raise LocalProtocolError(f"a row of replica {row.replica_id} without an LSN")
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
