"""The wanted rows of a reading, put together by transaction again, for whoever applies them elsewhere.

A filter may take rows out of the middle of a transaction; what is left still becomes true together. Rows of a snapshot
are a transaction each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter

import msgspec
import numpy as np

from flowstone.history.reading import Piece
from flowstone.history.records import transaction_numbers
from flowstone.iproto.row import Row
from flowstone.iproto.scan import COMMIT
from flowstone.xlog.reader import Slab
from flowstone.xlog.transactions import Transaction


def transactions(pieces: Iterable[Piece]) -> Iterator[tuple[Transaction, str]]:
    """Each transaction with the path of its file, in log order."""
    for (_, _), rows in groupby(_numbered(pieces), itemgetter(0, 1)):
        wanted = list(rows)
        yield _transaction([row for _, _, row, _ in wanted]), wanted[0][3]


def _numbered(pieces: Iterable[Piece]) -> Iterator[tuple[int, int, Row, str]]:
    """Rows with the numbers of their slab and of their transaction in it."""
    slab: Slab | None = None
    slab_number, numbers = 0, np.empty(0, np.int64)
    for piece in pieces:
        if piece.slab is not slab:
            slab, slab_number, numbers = piece.slab, slab_number + 1, transaction_numbers(piece.slab)
        for row, transaction in zip(slab.rows(piece.rows), numbers[piece.rows].tolist(), strict=True):
            yield slab_number, transaction, row, slab.path


def _transaction(rows: list[Row]) -> Transaction:
    if not rows[-1].is_commit:
        # The row that carried the mark was filtered out.
        rows[-1] = msgspec.structs.replace(rows[-1], flags=rows[-1].flags | COMMIT, raw=b"")
    return Transaction(tuple(rows))
