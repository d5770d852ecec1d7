"""Rows that an archive gets behind the PROMOTE that has decided about them: they are archived as NOPs.

The log of one server never has such rows: whoever knows of the PROMOTE writes NOPs in their place. But an archive that
goes on with another server may have the PROMOTE from the first, and then gets what the old owner of the queue wrote
alone from one that had it before. No server would recover from a log with both in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from flowstone.iproto import scan
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.row import Row, encode_header
from flowstone.node.archive_rows import log_rows
from flowstone.replication.synchro import Demote, Promote, decode_control
from flowstone.xlog.reader import Slab
from flowstone.xlog.transactions import Transaction, group

_NOP: Final = RequestType.NOP.value
_TRANSFERS: Final = (RequestType.RAFT_PROMOTE.value, RequestType.RAFT_DEMOTE.value)
_VERDICTS: Final = (RequestType.RAFT_CONFIRM.value, RequestType.RAFT_ROLLBACK.value)
_WAIT_ACK: Final = Flag.WAIT_ACK.value
_WAIT_SYNC: Final = Flag.WAIT_SYNC.value


class Overtaken:
    """`log_rows` of what comes next, given who owns the queue behind all that came before."""

    def __init__(self) -> None:
        self._origins: dict[int, None] = {}
        """Former owners of whom such a transaction has come: what waits behind it has gone with it."""

    def log_rows(self, slabs: Sequence[Slab], owner_id: int, term: int) -> bytes:
        """Whole transactions as the log has them. `term` is 0 where nobody was ever promoted."""
        parts: list[bytes] = []
        for slab in slabs:
            if not self._concerns(slab, owner_id, term):
                parts.append(log_rows(slab, 0, len(slab)))
                continue
            first = 0
            for transaction in group(slab.rows()):
                end = first + len(transaction.rows)
                owner_id, term = _owner_behind(transaction, owner_id, term)
                is_overtaken = bool(term) and self._is_overtaken(transaction, owner_id)
                parts += _nops(transaction) if is_overtaken else [log_rows(slab, first, end)]
                first = end
        return b"".join(parts)

    def _concerns(self, slab: Slab, owner_id: int, term: int) -> bool:
        """Whether there may be such rows: in most slabs there is nothing of anybody but the owner that waits."""
        types, flags = slab.cells[scan.TYPE], slab.cells[scan.FLAGS]
        if np.isin(types, _TRANSFERS).any():
            return True
        is_foreign = slab.cells[scan.REPLICA_ID] != owner_id
        waits = ((flags & (_WAIT_ACK | _WAIT_SYNC)) != 0) | np.isin(types, _VERDICTS)
        return bool(term) and bool((is_foreign & waits).any())

    def _is_overtaken(self, transaction: Transaction, owner_id: int) -> bool:
        origin_id = transaction.replica_id
        if origin_id == owner_id:
            self._origins.pop(origin_id, None)
            return False
        if transaction.flags & _WAIT_ACK:
            self._origins[origin_id] = None
            return True
        waits = transaction.flags & _WAIT_SYNC or transaction.rows[0].type in _VERDICTS
        return bool(waits) and origin_id in self._origins


def _owner_behind(transaction: Transaction, owner_id: int, term: int) -> tuple[int, int]:
    row = transaction.rows[0]
    if row.type in _TRANSFERS:
        body = decode_control(row.type, row.body)
        assert isinstance(body, Promote | Demote)
        if body.term > term:
            return (row.replica_id if isinstance(body, Promote) else 0), body.term
    return owner_id, term


def _nops(transaction: Transaction) -> Iterator[bytes]:
    """Places in the vclock, and no data."""
    for row in transaction.rows:
        yield encode_header(Row(_NOP, row.replica_id, row.group_id, row.lsn, row.timestamp, row.tsn, row.flags))
