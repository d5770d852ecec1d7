"""The form of a transaction in the tail: with names, truncated, and without secrets."""

from __future__ import annotations

from typing import Any

import pytest

from flowstone.box.schema import Schema, SchemaTracker
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.observation.live_transaction import (
    BODY_SIZE_MAX,
    DATA_LENGTH_MAX,
    ROWS_MAX,
    LiveRow,
    TransactionStatus,
    described,
    waiting_rows,
)
from flowstone.xlog.transactions import make_transaction

SPACE, USER = 600, 304


@pytest.fixture
def schema() -> Schema:
    tracker = SchemaTracker()
    fields = ({"name": "id", "type": "unsigned"}, {"name": "who", "type": "string"})
    rows = {
        280: (SPACE, 1, "orders", "memtx", 0, {}, fields),
        288: (SPACE, 0, "pk", "tree", {"unique": True}, ((1, "string"), (0, "unsigned"))),
    }
    for table, row in rows.items():
        tracker.apply(RequestType.INSERT, pack({Key.SPACE_ID.value: table, Key.TUPLE.value: row}))
    return tracker.schema


def row(kind: RequestType, lsn: int = 1, *, space: int = SPACE, **parts: Any) -> Row:
    body = {Key.SPACE_ID.value: space} | {Key[name.upper()].value: value for name, value in parts.items()}
    return Row(kind.value, 1, lsn=lsn, timestamp=5.5, body=pack(body))


def test_a_transaction_is_shown_with_names(schema: Schema) -> None:
    rows = [row(RequestType.INSERT, 7, tuple=(1, "Ada")), row(RequestType.DELETE, 8, key=("Ada", 1))]
    shown = described(make_transaction(rows), schema, TransactionStatus.SETTLED)
    assert (shown.replica_id, shown.lsn, shown.tsn, shown.at, shown.more_rows) == (1, 8, 7, 5.5, 0)
    assert shown.rows == (
        LiveRow(type="INSERT", space="orders", space_id=SPACE, lsn=7, data='{id: 1, who: "Ada"}'),
        LiveRow(type="DELETE", space="orders", space_id=SPACE, lsn=8, data='{who: "Ada", id: 1}'),
    )


def test_long_transaction_is_shown_with_its_number_of_rows(schema: Schema) -> None:
    rows = [row(RequestType.INSERT, lsn, tuple=(lsn, "x")) for lsn in range(1, ROWS_MAX + 6)]
    shown = described(make_transaction(rows), schema, TransactionStatus.SETTLED)
    assert (len(shown.rows), shown.more_rows) == (ROWS_MAX, 5)


def test_long_string_is_truncated_and_a_huge_row_shown_by_size(schema: Schema) -> None:
    rows = [
        row(RequestType.INSERT, 1, tuple=(1, "x" * 1000)),
        row(RequestType.INSERT, 2, tuple=(1, "x" * BODY_SIZE_MAX)),
    ]
    shown = described(make_transaction(rows), schema, TransactionStatus.SETTLED)
    assert len(shown.rows[0].data) == DATA_LENGTH_MAX
    assert shown.rows[0].data.endswith("x…")
    assert shown.rows[1].data == f"… {len(rows[1].body):,} bytes"


def test_password_hashes_are_hidden(schema: Schema) -> None:
    user = (32, 1, "eve", "user", {"chap-sha1": "c2VjcmV0"})
    shown = described(
        make_transaction([row(RequestType.INSERT, space=USER, tuple=user)]), schema, TransactionStatus.SETTLED
    )
    assert "c2VjcmV0" not in shown.rows[0].data
    assert "eve" in shown.rows[0].data


def test_malformed_body_is_shown_by_size(schema: Schema) -> None:
    broken = Row(RequestType.INSERT.value, 1, lsn=1, body=b"\xc1")
    assert described(make_transaction([broken]), schema, TransactionStatus.WAITING).rows[0].data == "… 1 bytes"
    assert waiting_rows(make_transaction([broken]), schema)[0].key == "… 1 bytes"


def test_pending_rows_are_shown_by_their_keys(schema: Schema) -> None:
    rows = [
        row(RequestType.INSERT, 1, tuple=(1, "Ada")),
        row(RequestType.UPDATE, 2, key=("Ada", 1), tuple=(("=", 1, "x"),)),
        row(RequestType.INSERT, 3, space=999, tuple=(1,)),
    ]
    found = [(each.type, each.space, each.key) for each in waiting_rows(make_transaction(rows), schema)]
    assert found == [
        ("INSERT", "orders", '{who: "Ada", id: 1}'),
        ("UPDATE", "orders", '{who: "Ada", id: 1}'),
        ("INSERT", "999", "[1]"),
    ]
