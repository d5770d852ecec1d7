"""Applied rows that are not submitted yet: their log rows, and the order in which they are undone."""

from __future__ import annotations

import pytest

from flowstone.box.engine.index import EngineIndex
from flowstone.box.lane.writes import Writes
from flowstone.iproto.constants import Flag
from flowstone.iproto.row import COMMIT, Row, encode_header
from flowstone.node.upstream.applied_batch import AppliedBatch, Together
from flowstone.replication.row_stream import journal_rows, slab_of_rows
from flowstone.xlog.transactions import make_transaction
from tests.node.applied_rows import NOP, PLAIN, REPLACE, Master, Replica, put, slab

WAIT_ACK = Flag.WAIT_ACK.value


def write(index: EngineIndex, key: int, raw: bytes | None) -> Writes:
    writes = Writes()
    writes.changes += [index, key, index.set(key, raw)]
    writes.marks.append(len(writes.changes))
    return writes


def test_nops_replace_the_received_rows() -> None:
    replica, master = Replica(), Master(2)
    rows = slab(*(master.does(put(REPLACE, key)) for key in range(3)))
    batch = AppliedBatch(rows, 0)
    index = replica.box.space(PLAIN).primary
    assert index is not None
    instead = b"".join(row.encode() for row in make_transaction(master.does((NOP, None))).rows)
    batch.add(1, write(index, 0, b"\x91\x00"))
    assert batch.has_facts
    batch.add(2, write(index, 1, None), instead, has_effect=False)
    batch.add(3, write(index, 2, b"\x91\x02"))
    assert batch.lsns() == {2: 3}
    assert instead in batch.rows(1.0)
    batch.go_on(3)
    assert (batch.effects, batch.first, batch.stop, batch.has_facts) == ([], 3, 3, False)


def test_batch_is_rolled_back_newest_first() -> None:
    index = Replica().box.space(PLAIN).primary
    assert index is not None
    together = Together([write(index, 1, b"\x92\x01\x01"), write(index, 1, b"\x92\x01\x02")])
    together.rollback()
    assert len(index) == 0


@pytest.mark.parametrize("is_explicit", [False, True], ids=["as a row alone", "in place of a control row"])
@pytest.mark.parametrize("lsns", [(1,), (200, 70_000)], ids=str)
@pytest.mark.parametrize("flags", [COMMIT, COMMIT | WAIT_ACK, 0], ids=["async", "synchronous", "inside a transaction"])
def test_few_rows_are_encoded_like_by_the_kernel(lsns: tuple[int, ...], flags: int, is_explicit: bool) -> None:
    kinds = [Row(NOP if is_explicit else REPLACE, 1, lsn=lsn, timestamp=9.0, tsn=lsn, flags=flags) for lsn in lsns]
    body = b"" if is_explicit else b"\x82\x10\xcd\x02\x00\x21\x91\x01"
    encoded = b"".join(encode_header(row, is_explicit=is_explicit) + body for row in kinds)
    rows = slab_of_rows(encoded, "rows")
    batch = AppliedBatch(rows, 0)
    batch.stop = len(rows)
    assert batch.rows(1.5) == journal_rows(rows, 0, len(rows), 1.5)
