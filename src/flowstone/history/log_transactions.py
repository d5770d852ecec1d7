"""The selected rows of a reading, grouped by transaction, for callers that apply them elsewhere.

A filter can remove rows from the middle of a transaction; the remaining rows are still one transaction. Each row of a
snapshot is a transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec
import numpy as np

from flowstone.history.log_reading import Piece
from flowstone.history.records import transaction_numbers
from flowstone.iproto.row import Row
from flowstone.iproto.scan import COMMIT
from flowstone.xlog.transactions import LogTransaction


def transactions(pieces: Iterable[Piece]) -> Iterator[tuple[LogTransaction, str]]:
    """Yield each transaction with the path of its file, in log order."""
    waiting: list[Row] = []
    path, slab, number = "", None, -1
    for piece in pieces:
        for transaction, rows in _runs(piece):
            # Only the last transaction of a piece can continue, in the next piece of the same slab.
            if waiting and (piece.slab is not slab or transaction != number):
                yield _transaction(waiting), path
                waiting = []
            path, slab, number = piece.slab.path, piece.slab, transaction
            waiting += rows
    if waiting:
        yield _transaction(waiting), path


def _runs(piece: Piece) -> Iterator[tuple[int, list[Row]]]:
    """Yield the rows of each transaction in the piece, with its number in the slab."""
    rows = list(piece.slab.rows(piece.rows))
    numbers = transaction_numbers(piece.slab)[piece.rows]
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
    for start, end in pairwise(cuts):
        yield int(numbers[start]), rows[start:end]


def _transaction(rows: list[Row]) -> LogTransaction:
    if not rows[-1].is_commit:
        # The row with the commit flag was filtered out.
        rows[-1] = msgspec.structs.replace(rows[-1], flags=rows[-1].flags | COMMIT, raw=b"")
    return LogTransaction(tuple(rows))
