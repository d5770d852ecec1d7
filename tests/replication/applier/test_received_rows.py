"""Rows that no master sends, alone and hidden among many valid ones."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.replication.applier.received_rows import RowRefused, check_name, check_own_rows, check_rows, goes_on
from flowstone.replication.row_stream import slab_of_rows
from flowstone.replication.vclock import VClock

BODY = {Key.SPACE_ID.value: 512, Key.TUPLE.value: (1, "text")}
MANY = 100


def row(lsn: int, *, tsn: int = 0, is_last: bool = True, body: dict[int, Any] | None = None, **other: Any) -> Row:
    fields: dict[str, Any] = {"type": RequestType.REPLACE.value, "replica_id": 1} | other
    flags = Flag.COMMIT.value if is_last else 0
    return Row(lsn=lsn, tsn=tsn or lsn, flags=flags, timestamp=1.5, body=pack(BODY if body is None else body), **fields)


def slab(*rows: Row) -> Slab:
    return slab_of_rows(b"".join(each.encode() for each in rows), "peer")


FINE = {
    "changes": [
        row(1),
        row(2, type=5, body={0x10: 512, 0x20: (1,)}),
        row(3, type=9, body={0x10: 512, 0x21: (1,), 0x28: ()}),
        row(4, type=4, body={0x10: 512, 0x20: (1,), 0x21: (("=", 1, 2),)}),
    ],
    "transaction": [row(5, is_last=False), row(6, tsn=5, is_last=False), row(9, tsn=5)],
    "of two members": [row(5, is_last=False), row(3, tsn=5, replica_id=2, is_last=False), row(6, tsn=5)],
    "back in another transaction": [row(5), row(4)],
    "verdict": [row(5, type=40, body={2: 1, 3: 4})],
    "gap": [row(5), row(500)],
}
WRONG = {
    "row 5 of replica 0: no member has this id": [row(5, replica_id=0)],
    "row 5 of replica 1: local rows are not replicated": [row(5, group_id=1)],
    "row 5 of replica 1: unsupported type SELECT": [row(5, type=1)],
    "row 5 of replica 1: unsupported type RAFT": [row(5, type=30)],
    "row 5 of replica 1: unsupported type 999": [row(5, type=999)],
    "row 5 of replica 1: REPLACE without a space": [row(5, body={0x21: (1,)})],
    "row 5 of replica 1: REPLACE without a tuple": [row(5, body={0x10: 512})],
    "row 5 of replica 1: DELETE without a key": [row(5, type=5, body={0x10: 512})],
    "row 5 of replica 1: UPDATE without operations": [row(5, type=4, body={0x10: 512, 0x20: (1,)})],
    "row 5 of replica 1: UPSERT without operations": [row(5, type=9)],
    "row 4 of replica 1: out of order after row 5 of the same transaction": [row(5, is_last=False), row(4, tsn=5)],
    "row 4 of replica 1: out of order after row 5 of the same": [
        row(5, is_last=False),
        row(9, tsn=5, replica_id=2, is_last=False),
        row(4, tsn=5),
    ],
    "row 6 of replica 1: CONFIRM inside a transaction": [
        row(5, is_last=False),
        row(6, tsn=5, type=40, body={2: 1, 3: 4}),
    ],
}


@pytest.mark.parametrize("before", [0, MANY], ids=["few", "many"])
@pytest.mark.parametrize("rows", FINE.values(), ids=FINE)
def test_rows_that_masters_send_are_accepted(rows: list[Row], before: int) -> None:
    check_rows(slab(*(row(lsn, replica_id=7) for lsn in range(1, before + 1)), *rows))


@pytest.mark.parametrize("before", [0, MANY], ids=["few", "many"])
@pytest.mark.parametrize(("what", "rows"), WRONG.items(), ids=WRONG)
def test_rows_that_no_master_sends_are_rejected(what: str, rows: list[Row], before: int) -> None:
    with pytest.raises(RowRefused, match=f"peer sent invalid {what}") as caught:
        check_rows(slab(*(row(lsn, replica_id=7) for lsn in range(1, before + 1)), *rows))
    assert caught.value.hint == "check that instance, then restart replication from it"


def test_own_rows_are_accepted_up_to_the_known_position() -> None:
    check_own_rows(slab(row(5), row(6)), 1, 6)
    check_own_rows(slab(row(5), row(6)), 2, 0)
    with pytest.raises(RowRefused, match="row 6 of replica 1, which is this instance: its last row is 5"):
        check_own_rows(slab(row(5), row(6), row(7)), 1, 5)


def test_replica_id_of_this_instance_is_rejected_from_a_peer() -> None:
    check_name("peer", 2, 1)
    check_name("peer", 0, 0)
    with pytest.raises(RowRefused, match="peer claims replica id 1, which is the id of this instance"):
        check_name("peer", 1, 1)


def test_rows_must_continue_without_a_gap() -> None:
    assert goes_on(slab(row(5), row(6)), VClock({1: 4}))
    assert goes_on(slab(row(5), row(6)), VClock({1: 9}))
    assert not goes_on(slab(row(5), row(1, replica_id=2)), VClock({1: 3, 2: 0}))
