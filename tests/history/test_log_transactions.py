"""Filtered rows are grouped by transaction again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowstone.history.log_reading import Reading
from flowstone.history.log_transactions import transactions
from flowstone.history.selection import Selection
from flowstone.iproto.constants import RequestType
from flowstone.outside import production
from tests.history.logs import SYNC_FLAGS, Log


def lsns(log: Log, *, settled: bool = False, **selection: Any) -> list[list[int]]:
    log.writer.close()
    pieces = Reading(production(), [log.path], settled=settled, selection=Selection(**selection)).pieces()
    found = list(transactions(pieces))
    assert all(path == log.path for _, path in found)
    for transaction, _ in found:
        assert [row.is_commit for row in transaction.rows] == [False] * (len(transaction.rows) - 1) + [True]
    return [[row.lsn for row in transaction.rows] for transaction, _ in found]


def write(log: Log, *spaces: int) -> None:
    log.write(*((RequestType.INSERT, {0x10: space, 0x21: (log.lsn,)}) for space in spaces))


def test_rows_are_grouped_into_their_transactions(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for spaces in ((512,), (512, 513), (513, 512, 512)):
        write(log, *spaces)
    assert lsns(log) == [[1], [2, 3], [4, 5, 6]]


def test_filtered_rows_keep_their_transaction_boundaries(tmp_path: Path) -> None:
    log = Log(tmp_path)
    for spaces in ((512, 512, 513), (512, 513, 512), (513,), (512,)):
        write(log, *spaces)
    assert lsns(log, spaces=(512,)) == [[1, 2], [4, 6], [8]]


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("flags", [0, SYNC_FLAGS])
def test_schema_change_does_not_split_its_transaction(tmp_path: Path, flags: int, settled: bool) -> None:
    log = Log(tmp_path)
    log.write((RequestType.RAFT_PROMOTE, {2: 0, 3: 0, 0x53: 2}))
    space = (RequestType.INSERT, {0x10: 280, 0x21: (512, 1, "t", "memtx", 0, {}, [])})
    index = (RequestType.INSERT, {0x10: 288, 0x21: (512, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]])})
    log.confirm(log.write(space, index, (RequestType.INSERT, {0x10: 512, 0x21: (1,)}), flags=flags))
    assert lsns(log, settled=settled, show_system=True) == [[1], [2, 3, 4], [5]]
