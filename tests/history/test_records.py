"""Rows one by one: names of fields in tuples, keys and operations, and in control rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowstone.history.log_reading import Reading
from flowstone.history.records import Record, header_of, records
from flowstone.history.selection import Selection
from flowstone.iproto.constants import RequestType
from flowstone.outside import production
from flowstone.xlog.errors import DamagedLog
from tests.history.logs import Log


@pytest.fixture
def log(tmp_path: Path) -> Log:
    log = Log(tmp_path)
    log.create_space(512, "t", ("id", "unsigned"), ("text", "string"))
    return log


def read(log: Log, **selection: Any) -> list[Record]:
    log.writer.close()
    return list(records(Reading(production(), [log.path], selection=Selection(**selection)).pieces()))


def test_tuple_fields_are_named_up_to_the_end_of_the_format(log: Log) -> None:
    log.insert(512, 1, "x", "more")
    (row,) = read(log)
    assert row.named_body() == {"space_id": 512, "space": "t", "tuple": {"id": 1, "text": "x", 3: "more"}}
    assert row.plain_body() == {"space_id": 512, "space": "t", "tuple": (1, "x", "more")}


def test_keys_and_operations_name_their_fields(log: Log) -> None:
    operations = (("=", 2, "y"), ("!", -1, 0), ("=", 9, 0), ("=", "text", 0))
    log.write((RequestType.UPDATE, {0x10: 512, 0x15: 1, 0x20: (1,), 0x21: operations}))
    (row,) = read(log)
    body = row.named_body()
    assert body["key"] == {"id": 1}
    assert body["operations"] == [("=", "text", "y"), ("!", -1, 0), ("=", 9, 0), ("=", "text", 0)]
    assert row.tuple is None
    assert row.operations == operations


def test_undefined_space_is_shown_by_id(log: Log) -> None:
    log.insert(999, 1)
    (row,) = read(log)
    assert row.named_body() == {"space_id": 999, "tuple": (1,)}


@pytest.mark.parametrize(
    ("row", "body"),
    [
        ((RequestType.RAFT, {0: 2, 1: 1, 2: 3}), {"term": 2, "vote": 1, "state": "leader"}),
        ((RequestType.RAFT, {0: 2, 2: 9, 77: 1}), {"term": 2, "state": 9, "77": 1}),
        ((RequestType.RAFT_CONFIRM, {2: 1, 3: 7}), {"replica_id": 1, "lsn": 7}),
        ((RequestType.RAFT_PROMOTE, {2: 1, 3: 7, 0x53: 4}), {"replica_id": 1, "lsn": 7, "term": 4}),
    ],
)
def test_control_rows_have_named_fields(
    log: Log, row: tuple[RequestType, dict[int, Any]], body: dict[str, Any]
) -> None:
    log.write(row)
    (record,) = read(log)
    assert record.named_body() == record.plain_body() == body


def test_headers_show_unusual_keys(log: Log) -> None:
    insert = (RequestType.INSERT, {0x10: 512, 0x21: (1,)})
    log.write(insert)
    log.write(insert, insert, flags=6)
    alone, first, last = (dict(header_of(row)) for row in read(log))
    assert alone == {"lsn": 3, "replica_id": 1, "type": "INSERT", "timestamp": 1003.0}
    assert first == {"lsn": 4, "replica_id": 1, "type": "INSERT", "tsn": 4, "timestamp": 1004.0}
    assert last == {
        "lsn": 5, "commit": True, "wait_sync": True, "wait_ack": True,
        "replica_id": 1, "type": "INSERT", "tsn": 4, "timestamp": 1005.0,
    }  # fmt: skip


def test_rows_of_a_transaction_share_a_number_even_if_its_end_is_filtered_out(log: Log) -> None:
    for _ in range(2):
        log.write(*((RequestType.INSERT, {0x10: space, 0x21: (1,)}) for space in (512, 512, 513)))
    numbers = [row.transaction for row in read(log, spaces=(512,))]
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


def test_error_about_an_undecodable_body_names_its_row(log: Log) -> None:
    log.write((RequestType.INSERT, {0x10: 512, "x": 1}))  # type: ignore[dict-item]
    with pytest.raises(DamagedLog, match="body of row 3 of replica 1 is malformed"):
        read(log)
