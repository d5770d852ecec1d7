"""Unconfirmed rows of the old queue owner are archived as NOPs if the new owner is already known."""

from __future__ import annotations

from random import Random

import pytest

from flowstone.archive import late_rows as archive_overtaken
from flowstone.archive.encoded_rows import log_rows
from flowstone.archive.late_rows import overtaken_rows
from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.row import Row
from flowstone.replication.limbo.control_rows import Confirm, Demote
from flowstone.replication.settled_position import Tenure
from tests.node.archived_rows import QUEUED, SYNC, alone, confirm, promote, rollback, row, slab, transaction

NOP = RequestType.NOP.value
COMMIT = Flag.COMMIT.value
PROMOTE = promote(1, 2, term=5, origin=2)
"""Return the PROMOTE by which instance 2 takes over the queue of instance 1 up to row 2."""


def types(data: bytes) -> list[int]:
    return [each.type for each in slab(data).rows()]


def test_rows_of_the_owner_are_unchanged() -> None:
    rows = slab(alone(1, flags=SYNC), confirm(2, 1), alone(3, flags=QUEUED), alone(1, origin=3))
    assert overtaken_rows([rows], Tenure(1, 4)) == log_rows(rows, 0, len(rows))


def test_log_without_promotions_is_unchanged() -> None:
    rows = slab(alone(1, flags=SYNC), alone(1, origin=2, flags=SYNC), confirm(2, 1))
    assert overtaken_rows([rows], Tenure()) == log_rows(rows, 0, len(rows))


def test_synchronous_transactions_after_the_promote_that_claimed_their_queue_are_nops() -> None:
    two = transaction([row(4), row(5)], SYNC)
    data = overtaken_rows([slab(alone(2, flags=SYNC), PROMOTE, alone(3, flags=SYNC), two)], Tenure(1, 4))
    replace, promoted, *others = types(data)
    assert (replace, promoted) == (RequestType.REPLACE, RequestType.RAFT_PROMOTE)
    assert others == [NOP, NOP, NOP]
    before, after = slab(alone(3, flags=SYNC), two).rows(), list(slab(data).rows())[2:]
    assert [(each.lsn, each.tsn, each.flags, each.timestamp) for each in after] == [
        (each.lsn, each.tsn, each.flags & COMMIT, each.timestamp) for each in before
    ]


def test_transactions_queued_behind_nops_and_verdicts_on_nops_are_nops() -> None:
    tenure = Tenure(2, 5)
    assert types(overtaken_rows([slab(alone(3, flags=SYNC))], tenure)) == [NOP]
    rows = slab(alone(4, flags=QUEUED), confirm(5, 3), alone(6))
    assert types(overtaken_rows([rows], tenure)) == [NOP, NOP, RequestType.REPLACE]


def test_transaction_queued_behind_a_confirmed_one_is_archived_and_no_longer_pending() -> None:
    (kept,) = slab(overtaken_rows([slab(alone(4, flags=QUEUED))], Tenure(2, 5))).rows()
    assert (kept.type, kept.lsn, kept.flags) == (RequestType.REPLACE, 4, COMMIT)


def test_promote_of_an_old_term_and_verdicts_of_its_writer_are_nops() -> None:
    """A real server does not compare terms during recovery, so its queue would have the wrong owner."""
    rows = slab(promote(3, 0, term=4, origin=1, owner=3), confirm(4, 2), alone(2, origin=2, flags=SYNC))
    assert types(overtaken_rows([rows], Tenure(2, 5))) == [NOP, NOP, RequestType.REPLACE]


def test_nops_lose_limbo_flags() -> None:
    nop = row(3)
    nop.type, nop.body = NOP, b""
    (kept,) = slab(overtaken_rows([slab(transaction([nop], SYNC))], Tenure(2, 5))).rows()
    assert (kept.type, kept.lsn, kept.flags) == (NOP, 3, COMMIT)


def test_former_owner_is_accepted_after_another_promotion() -> None:
    tenure = Tenure(2, 5)
    overtaken_rows([slab(alone(3, flags=SYNC))], tenure)
    again = promote(4, 1, term=6, origin=1, owner=2)
    assert types(overtaken_rows([slab(again, alone(5, flags=SYNC), confirm(6, 5))], tenure)) == [
        RequestType.RAFT_PROMOTE,
        RequestType.REPLACE,
        RequestType.RAFT_CONFIRM,
    ]


def test_rows_and_verdicts_of_the_owner_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding these rows one by one takes hundreds of times as long, and archives of synchronous sets consist mostly
    of them.
    """
    monkeypatch.setattr(archive_overtaken, "group", lambda rows: pytest.fail("the rows were decoded one by one"))
    rows = slab(alone(1, flags=SYNC), confirm(2, 1), alone(3, flags=QUEUED), rollback(4, 3), alone(1, origin=3))
    assert overtaken_rows([rows], Tenure(1, 4)) == log_rows(rows, 0, len(rows))
    assert overtaken_rows([rows], Tenure()) == log_rows(rows, 0, len(rows))


def test_verdict_of_the_owner_on_the_queue_of_another_instance_is_a_nop() -> None:
    body = Confirm(1, 2).encode()
    verdict = transaction([Row(RequestType.RAFT_CONFIRM, 2, lsn=7, timestamp=1.0, body=body)])
    assert types(overtaken_rows([slab(verdict)], Tenure(2, 5))) == [NOP]


def random_transaction(random: Random, lsns: dict[int, int]) -> bytes:
    origin = random.choice((1, 2, 3))
    lsns[origin] = lsn = lsns.get(origin, 0) + 1
    kind = random.randrange(12)
    if kind == 0:
        return promote(lsn, 1, term=random.randrange(1, 8), origin=origin, owner=random.choice((0, 1, 2)))
    if kind == 1:
        body = Demote(origin, 1, random.randrange(1, 8)).encode()
        return transaction([Row(RequestType.RAFT_DEMOTE, origin, lsn=lsn, timestamp=1.0, body=body)])
    if kind <= 4:
        return (confirm if random.random() < 0.7 else rollback)(lsn, 1, origin)
    if kind == 5:
        return transaction([Row(NOP, origin, lsn=lsn, timestamp=1.0)], random.choice((0, QUEUED, SYNC)))
    return alone(lsn, origin=origin, flags=random.choice((0, QUEUED, SYNC, SYNC)))


@pytest.mark.parametrize("seed", range(40))
def test_skipped_slabs_would_be_unchanged_row_by_row(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random, lsns = Random(seed), dict[int, int]()
    tenure = Tenure(*random.choice(((0, 0), (0, 3), (1, 3), (2, 3))))
    exact = tenure.copy()
    for _ in range(20):
        rows = slab(*(random_transaction(random, lsns) for _ in range(random.randrange(1, 4))))
        found = overtaken_rows([rows], tenure)
        with monkeypatch.context() as patch:
            patch.setattr(archive_overtaken, "_concerns", lambda *_: True)
            assert overtaken_rows([rows], exact) == found
        assert (tenure.owner_id, tenure.term, tenure.voids) == (exact.owner_id, exact.term, exact.voids)
