"""Applied rows that are not submitted yet: their log rows, and the order in which they are undone."""

from __future__ import annotations

from flowstone.box.engine.bulk import SingleWrite
from flowstone.node.upstream.applied_batch import AppliedBatch, Together
from flowstone.xlog.transactions import make_transaction
from tests.node.applied_rows import NOP, PLAIN, REPLACE, Master, Replica, put, slab


def test_rows_that_became_nops_take_the_places_of_those_that_came() -> None:
    replica, master = Replica(), Master(2)
    rows = slab(*(master.does(put(REPLACE, key)) for key in range(3)))
    batch = AppliedBatch(rows, 0)
    index = replica.box.space(PLAIN).primary
    assert index is not None
    instead = b"".join(row.encode() for row in make_transaction(master.does((NOP, None))).rows)
    batch.add(1, SingleWrite(index, 0, b"\x91\x00"))  # type: ignore[arg-type]
    assert batch.has_facts
    batch.add(2, SingleWrite(index, 1, None), instead, has_effect=False)  # type: ignore[arg-type]
    batch.add(3, SingleWrite(index, 2, b"\x91\x02"))  # type: ignore[arg-type]
    assert batch.lsns() == {2: 3}
    assert instead in batch.rows(1.0)
    batch.go_on(3)
    assert (batch.effects, batch.first, batch.stop, batch.has_facts) == ([], 3, 3, False)


def test_batch_is_rolled_back_newest_first() -> None:
    index = Replica().box.space(PLAIN).primary
    assert index is not None
    together = Together([SingleWrite(index, 1, b"\x92\x01\x01"), SingleWrite(index, 1, b"\x92\x01\x02")])  # type: ignore[list-item]
    together.rollback()
    assert not index.map
