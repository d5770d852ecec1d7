"""Two histories that have diverged: the fork point, and the rows that only one side has.

Pure. The fork point is the vclock up to which both sides have the same rows: for each component the smaller LSN, or
less if rows with the same LSN differ. A side is described by its first transactions and its control rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from flowstone.box.schema import Schema
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row
from flowstone.observation.findings.wording import position, rows_text
from flowstone.observation.live_transaction import LiveTransaction, TransactionStatus, described, waiting_rows
from flowstone.replication.vclock import VClock
from flowstone.xlog.transactions import CONTROL_TYPES, LogTransaction

SHOWN_MAX: Final = 5
"""Limit of transactions shown of each side: enough to recognize them."""

VERDICTS_MAX: Final = 5
"""Limit of control rows (CONFIRM, ROLLBACK, PROMOTE, …) shown in addition."""

LINE_MAX: Final = 200
"""Limit of a row's text, in characters."""


@dataclass(frozen=True)
class Alone:
    """The transactions that only one side has."""

    label: str
    transactions: tuple[LogTransaction, ...]
    schema: Schema
    is_whole: bool = True
    unlogged: tuple[tuple[int, int, int], ...] = ()
    """Rows in a snapshot, but in no log, so that they cannot be sent to a follower: replica id, first and last LSN."""

    @property
    def rows(self) -> int:
        logged = sum(len(transaction.rows) for transaction in self.transactions)
        return logged + sum(last - first + 1 for _, first, last in self.unlogged)

    @property
    def unlogged_text(self) -> str:
        """The rows in no log as text, such as `2:12…14`."""
        spans = ((number, first, f"…{last}" if last > first else "") for number, first, last in self.unlogged)
        return ", ".join(f"{number}:{first}{rest}" for number, first, rest in spans)

    @property
    def first(self) -> LogTransaction | None:
        return self.transactions[0] if self.transactions else None

    def lines(self) -> list[str]:
        """Return the first transactions and the control rows after them, one line each."""
        shown = list(self.transactions[:SHOWN_MAX])
        verdicts = [one for one in self.transactions[SHOWN_MAX:] if one.rows[0].type in CONTROL_TYPES]
        shown += verdicts[:VERDICTS_MAX]
        lines = [f"{self.label}: {self.unlogged_text} in a snapshot, but in no log"] if self.unlogged else []
        lines += [f"{self.label}: {transaction_text(one, self.schema)}" for one in shown]
        more = len(self.transactions) - len(shown)
        if more or not self.is_whole:
            lines.append(f"{self.label}: and {'' if self.is_whole else 'at least '}{more} more transactions")
        return lines

    def summary(self) -> str:
        """Return the side as text, such as `7 rows, beginning with 1:12 INSERT plain [1]`."""
        many = rows_text(self.rows) if self.is_whole else f"at least {self.rows} rows"
        unlogged = f", {self.unlogged_text} of them in a snapshot but in no log" if self.unlogged else ""
        if self.first is None:
            return f"{many}{unlogged}" if unlogged else "no rows"
        begin = ", those in its logs beginning with" if unlogged else ", beginning with"
        return f"{many}{unlogged}{begin} {transaction_text(self.first, self.schema)}"


@dataclass(frozen=True)
class Fork:
    """Two diverged histories; both sides have the same rows up to `point`."""

    point: VClock
    sides: tuple[Alone, Alone]

    @property
    def is_fork(self) -> bool:
        """True if each side has rows that the other lacks; otherwise one side only lags."""
        return all(side.transactions or side.unlogged for side in self.sides)

    def collisions(self) -> list[str]:
        """Return the keys that both sides have written, with their spaces. Only known rows are included."""
        ours, theirs = (_keys(side) for side in self.sides)
        return [key for key in ours if key in theirs]

    def sentence(self) -> str:
        ours, theirs = self.sides
        return (
            f"both histories are the same up to {position(self.point.to_mapping())}; only {ours.label} has "
            f"{ours.summary()}; only {theirs.label} has {theirs.summary()}"
        )

    def evidence(self) -> list[str]:
        return [
            f"fork point {position(self.point.to_mapping())}",
            *(line for side in self.sides for line in side.lines()),
        ]


def _keys(side: Alone) -> dict[str, None]:
    """Return the keys of a side as shown: whole tuples if the schema is unknown, and without truncated keys."""
    rows = (row for transaction in side.transactions for row in waiting_rows(transaction, side.schema))
    return {f"{row.space} {row.key}": None for row in rows if row.space is not None and not row.key.endswith("…")}


def transactions_after(transactions: Iterable[LogTransaction], point: VClock) -> tuple[LogTransaction, ...]:
    """Return the transactions with a row after `point`, without local transactions."""
    return tuple(
        transaction
        for transaction in transactions
        if not transaction.is_local
        and any(row.lsn > point.get(row.replica_id) for row in transaction.rows if row.replica_id)
    )


Digests = Mapping[tuple[int, int], int]
"""Digests of rows by replica id and LSN. They exclude the timestamp, which each member sets itself. The digest of a NOP
is 0: it replaces a row that was dropped."""

NOP_DIGEST: Final = 0


def digests(transactions: Iterable[LogTransaction]) -> dict[tuple[int, int], int]:
    return {(row.replica_id, row.lsn): digest(row) for one in transactions for row in one.rows if row.replica_id}


def digest(row: Row) -> int:
    return zlib.crc32(row.body, row.type) or 1 if row.type != RequestType.NOP else NOP_DIGEST


def common_point(ours: VClock, theirs: VClock, ours_rows: Digests, theirs_rows: Digests) -> VClock:
    """Return the fork point: for each replica id the last LSN that both sides have before the first different row."""
    common = ours.without_zero().common(theirs.without_zero()).to_mapping()
    for replica_id, lsn in _differing(ours_rows, theirs_rows):
        common[replica_id] = min(common.get(replica_id, 0), lsn - 1)
    return VClock({replica_id: lsn for replica_id, lsn in common.items() if lsn})


def are_used_twice(ours_rows: Digests, theirs_rows: Digests) -> bool:
    """Return True if an LSN denotes different rows on the two sides; a NOP in place of a dropped row does not count."""
    return bool(used_twice(ours_rows, theirs_rows))


def used_twice(ours_rows: Digests, theirs_rows: Digests) -> list[tuple[int, int]]:
    """Return the replica ids and LSNs that denote different rows on the two sides."""
    places = _differing(ours_rows, theirs_rows)
    return [place for place in places if NOP_DIGEST not in (ours_rows[place], theirs_rows[place])]


def unlogged(end: VClock, point: VClock, rows: Digests) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges after `point` up to `end` that are not in `rows`: replica id, first and last LSN."""
    found = []
    for replica_id, last in end.without_zero():
        begin = point.get(replica_id) + 1
        logged = sorted(lsn for number, lsn in rows if number == replica_id and begin <= lsn <= last)
        for lsn in (*logged, last + 1):
            if lsn > begin:
                found.append((replica_id, begin, lsn - 1))
            begin = lsn + 1
    return tuple(found)


def _differing(ours_rows: Digests, theirs_rows: Digests) -> Iterator[tuple[int, int]]:
    return (place for place, one in ours_rows.items() if theirs_rows.get(place, one) != one)


def transaction_text(transaction: LogTransaction, schema: Schema) -> str:
    """Return a transaction as text: its first row, such as `1:12 INSERT plain [1]`, and the number of further rows."""
    shown: LiveTransaction = described(transaction, schema, TransactionStatus.SETTLED)
    row = shown.rows[0]
    more = len(transaction.rows) - 1
    text = " ".join(part for part in (row.type, row.space, row.data) if part)
    text = text if len(text) <= LINE_MAX else f"{text[:LINE_MAX]}…"
    return f"{shown.replica_id}:{shown.lsn} {text}" + (f" and {more} more row{'s' if more > 1 else ''}" if more else "")
