"""Rewrites late rows for the log of an archive: rows received after the PROMOTE that decided about them.

The log of one server never has late rows. But an archive that continues with another server may have the PROMOTE from
the first one, and then receive rows that the former owner of the limbo wrote before the PROMOTE. No server recovers
from a log with both in that order. So transactions that were rolled back become NOPs, as a server would have written
them, and the others lose the flags of the limbo. `replication/settled_position.py` decides which ones were rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from flowstone.archive.encoded_rows import log_rows
from flowstone.iproto import scan
from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.row import Row, encode_header
from flowstone.iproto.slab import Slab
from flowstone.replication.settled_position import Tenure, is_nop, void_rows
from flowstone.xlog.transactions import CONTROL_TYPES, LogTransaction, group, make_transaction

_NOP: Final = RequestType.NOP.value
_COMMIT: Final = Flag.COMMIT.value
_WAIT: Final = (Flag.WAIT_ACK | Flag.WAIT_SYNC).value
_TRANSFERS: Final = (RequestType.RAFT_PROMOTE.value, RequestType.RAFT_DEMOTE.value)
_VERDICTS: Final = (RequestType.RAFT_CONFIRM.value, RequestType.RAFT_ROLLBACK.value)
_VERDICT_SIZE_MIN: Final = 4
"""Smallest body of a CONFIRM or ROLLBACK that is read in place: a map, the owner's key, its id, the next key."""


def overtaken_rows(slabs: Sequence[Slab], tenure: Tenure) -> bytes:
    """Return the log rows of whole transactions. `tenure` is the one before them, and is updated."""
    parts: list[bytes] = []
    for slab in slabs:
        if not _concerns(slab, tenure):
            parts.append(log_rows(slab, 0, len(slab)))
            continue
        first = 0
        for transaction in group(slab.rows()):
            end = first + len(transaction.rows)
            parts.append(_replaced(transaction, tenure) or log_rows(slab, first, end))
            first = end
    return b"".join(parts)


def _concerns(slab: Slab, tenure: Tenure) -> bool:
    """True if the slab may have rows to rewrite or changes the owner; most only have rows and verdicts of the owner."""
    types, flags = slab.cells[scan.TYPE], slab.cells[scan.FLAGS]
    waits, nops = flags & _WAIT != 0, types == _NOP
    if (nops & waits).any() or np.isin(types, _TRANSFERS).any():
        return True
    if not tenure.term:
        return False
    is_foreign = slab.cells[scan.REPLICA_ID] != tenure.owner_id
    return bool((is_foreign & (waits | nops)).any()) or _has_foreign_verdicts(slab, tenure.owner_id)


def _has_foreign_verdicts(slab: Slab, owner_id: int) -> bool:
    """True unless every CONFIRM and ROLLBACK is about the queue of `owner_id`, as its first key says in place."""
    cells = slab.cells[:, np.isin(slab.cells[scan.TYPE], _VERDICTS)]
    at = cells[scan.BODY_AT]
    if (cells[scan.ROW_END] - at < _VERDICT_SIZE_MIN).any():
        return True
    return bool(((slab.buf[at + 1] != Key.REPLICA_ID.value) | (slab.buf[at + 2] != owner_id)).any())


def _replaced(transaction: LogTransaction, tenure: Tenure) -> bytes:
    """Return the log rows that replace the transaction; empty if it stays unchanged."""
    row = transaction.rows[0]
    if row.type in CONTROL_TYPES:
        if not tenure.is_obsolete(row):
            tenure.follow(row)
            return b""
        nop = Row(_NOP, row.replica_id, row.group_id, row.lsn, row.timestamp, row.lsn, _COMMIT)
        return encode_header(nop, is_explicit=True)
    if tenure.is_void(transaction) or (is_nop(transaction) and transaction.flags & _WAIT):
        return _encoded(void_rows(transaction.rows))
    return _encoded(make_transaction(transaction.rows).rows) if tenure.is_late(transaction) else b""


def _encoded(rows: Iterable[Row]) -> bytes:
    return b"".join(encode_header(row) + row.body for row in rows)
