"""What the old owner of the queue wrote alone is archived as nothing when its successor is known already."""

from __future__ import annotations

from flowstone.iproto.constants import RequestType
from flowstone.node.archive_overtaken import Overtaken
from flowstone.node.archive_rows import log_rows
from tests.node.archived_rows import QUEUED, SYNC, alone, confirm, promote, row, slab, transaction

NOP = RequestType.NOP.value
PROMOTE = promote(1, 2, term=5, origin=2)
"""Instance 2 takes the queue of instance 1 over, up to row 2."""


def types(data: bytes) -> list[int]:
    return [each.type for each in slab(data).rows()]


def test_rows_of_the_owner_stay_as_they_are() -> None:
    rows = slab(alone(1, flags=SYNC), confirm(2, 1), alone(3, flags=QUEUED), alone(1, origin=3))
    assert Overtaken().log_rows([rows], 1, 4) == log_rows(rows, 0, len(rows))


def test_a_log_without_promotions_stays_as_it_is() -> None:
    rows = slab(alone(1, flags=SYNC), alone(1, origin=2, flags=SYNC), confirm(2, 1))
    assert Overtaken().log_rows([rows], 0, 0) == log_rows(rows, 0, len(rows))


def test_synchronous_transactions_behind_the_promote_that_took_their_queue_are_nops() -> None:
    two = transaction([row(4), row(5)], SYNC)
    data = Overtaken().log_rows([slab(alone(2, flags=SYNC), PROMOTE, alone(3, flags=SYNC), two)], 1, 4)
    replace, promoted, *others = types(data)
    assert (replace, promoted) == (RequestType.REPLACE, RequestType.RAFT_PROMOTE)
    assert others == [NOP, NOP, NOP]
    before, after = slab(alone(3, flags=SYNC), two).rows(), list(slab(data).rows())[2:]
    assert [(each.lsn, each.tsn, each.flags, each.timestamp) for each in after] == [
        (each.lsn, each.tsn, each.flags, each.timestamp) for each in before
    ]


def test_what_waited_behind_them_goes_with_them_and_so_do_verdicts_about_them() -> None:
    overtaken = Overtaken()
    assert types(overtaken.log_rows([slab(alone(3, flags=SYNC))], 2, 5)) == [NOP]
    rows = slab(alone(4, flags=QUEUED), confirm(5, 3), alone(6))
    assert types(overtaken.log_rows([rows], 2, 5)) == [NOP, NOP, RequestType.REPLACE]


def test_an_old_owner_that_is_promoted_again_is_believed() -> None:
    overtaken = Overtaken()
    overtaken.log_rows([slab(alone(3, flags=SYNC))], 2, 5)
    again = promote(4, 1, term=6, origin=1, owner=2)
    assert types(overtaken.log_rows([slab(again, alone(5, flags=SYNC), confirm(6, 5))], 2, 5)) == [
        RequestType.RAFT_PROMOTE,
        RequestType.REPLACE,
        RequestType.RAFT_CONFIRM,
    ]
