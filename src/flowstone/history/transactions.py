"""The wanted rows of a reading, put together by transaction again, for whoever applies them elsewhere.

A filter may take rows out of the middle of a transaction; what is left still becomes true together. Rows of a snapshot
are a transaction each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import msgspec
import numpy as np

from flowstone.history.reading import Piece
from flowstone.history.records import transaction_numbers
from flowstone.iproto.row import Row
from flowstone.iproto.scan import COMMIT
from flowstone.xlog.transactions import Transaction


def transactions(pieces: Iterable[Piece]) -> Iterator[tuple[Transaction, str]]:
    """Each transaction with the path of its file, in log order."""
    waiting: list[Row] = []
    path, slab, number = "", None, -1
    for piece in pieces:
        for transaction, rows in _runs(piece):
            # Only the last one of a piece can go on, in the next piece of the same slab.
            if waiting and (piece.slab is not slab or transaction != number):
                yield _transaction(waiting), path
                waiting = []
            path, slab, number = piece.slab.path, piece.slab, transaction
            waiting += rows
    if waiting:
        yield _transaction(waiting), path


def _runs(piece: Piece) -> Iterator[tuple[int, list[Row]]]:
    """Rows of the piece that share a transaction, with its number in the slab."""
    rows = list(piece.slab.rows(piece.rows))
    numbers = transaction_numbers(piece.slab)[piece.rows]
    cuts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
    for start, end in pairwise(cuts):
        yield int(numbers[start]), rows[start:end]


def _transaction(rows: list[Row]) -> Transaction:
    if not rows[-1].is_commit:
        # The row that carried the mark was filtered out.
        rows[-1] = msgspec.structs.replace(rows[-1], flags=rows[-1].flags | COMMIT, raw=b"")
    return Transaction(tuple(rows))
