"""Bulk requests to live servers: bounded, counted, with conflict handling, and rejected rows named by key."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from flowstone.iproto.constants import RequestType
from flowstone.iproto.uri import parse_uri
from flowstone.spark.sources.tarantool import row_sender
from flowstone.spark.sources.tarantool.live_node import CannotUse, definitions
from flowstone.spark.sources.tarantool.row_sender import OnConflict, RowSender
from flowstone.spark.sources.tarantool.tuple_encoder import CannotWrite, Requests, TupleEncoder
from tests.spark.live_servers import create, insert, rows_of

FIELDS = [("id", "unsigned"), ("name", "string"), ("size", "integer", True)]
_ids = iter(range(800, 900))


@pytest.fixture
def space_id(address: str) -> int:
    """Create a space for this test, with a second unique index by name."""
    number = next(_ids)
    create(address, number, f"s{number}", FIELDS, more_indexes=[("by_name", [(1, "string")])])
    return number


def send(
    address: str, space_id: int, rows: Sequence[tuple[Any, ...]], how: OnConflict, *, size: int = 10_000
) -> RowSender:
    uri = parse_uri(address)
    space = definitions([uri]).space(space_id)
    table = pa.Table.from_pylist([dict(zip(("id", "name", "size"), row, strict=True)) for row in rows])
    kind = RequestType.REPLACE if how == "replace" else RequestType.INSERT
    encoder = TupleEncoder(space, table.schema, kind)
    sender = RowSender(uri, space, how)
    try:
        for batch in table.to_batches(max_chunksize=size):
            sender.send(encoder.requests(batch, sender.sync + 1))
        sender.finish()
    finally:
        sender.close()
    return sender


ROWS = [(number, f"n{number}", -number) for number in range(1000)]


def test_all_rows_are_written_with_small_limits(address: str, space_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_sender, "CHUNK_SIZE", 100)
    monkeypatch.setattr(row_sender, "UNDER_WAY_MAX", 1000)
    monkeypatch.setattr(row_sender, "REPLIES_MAX", 7)
    sender = send(address, space_id, ROWS, "replace", size=64)
    assert (sender.written, sender.skipped) == (1000, 0)
    assert rows_of(address, space_id) == ROWS


def test_existing_rows_are_replaced_or_skipped(address: str, space_id: int) -> None:
    insert(address, space_id, [(5, "old", 1)])
    sender = send(address, space_id, ROWS[:10], "skip")
    assert (sender.written, sender.skipped) == (9, 1)
    assert rows_of(address, space_id)[5] == (5, "old", 1)
    assert send(address, space_id, ROWS[:10], "replace").written == 10
    assert rows_of(address, space_id) == ROWS[:10]


def test_repeated_insert_of_the_same_rows_succeeds_and_of_others_fails(address: str, space_id: int) -> None:
    """Spark repeats a task that failed halfway."""
    send(address, space_id, ROWS[:500], "insert")
    sender = send(address, space_id, ROWS, "insert", size=100)
    assert (sender.written, sender.skipped) == (1000, 0)
    with pytest.raises(
        CannotWrite, match=r"row with key 7 of space .* cannot be inserted .* a row with this key exists"
    ):
        send(address, space_id, [(7, "seven", None)], "insert")
    assert rows_of(address, space_id) == ROWS


@pytest.mark.parametrize("how", ["replace", "insert", "skip"])
def test_rejected_row_is_reported_with_its_key_and_reason(address: str, space_id: int, how: OnConflict) -> None:
    """Another row already has the name: this is not a duplicate of the row, for any value of the option."""
    insert(address, space_id, [(5, "taken", 1)])
    with pytest.raises(CannotWrite) as caught:
        send(address, space_id, [(1, "free", 1), (2, "taken", 2)], how)
    text = str(caught.value)
    assert f"row with key 2 of space 's{space_id}' was rejected by 127.0.0.1:" in text
    assert "Duplicate key exists in unique index" in text
    assert "by_name" in text
    assert "(ER_TUPLE_FOUND, 3)" in text
    assert (5, "taken", 1) in rows_of(address, space_id)


def test_unreachable_server_is_one_clear_error(real_server: str) -> None:
    space = definitions([parse_uri(real_server)]).space("orders")
    sender = RowSender(parse_uri("127.0.0.1:1"), space, "replace")
    encoder = TupleEncoder(
        space, pa.schema({"id": pa.int64(), "name": pa.string(), "amount": pa.int64()}), RequestType.REPLACE
    )
    batch = pa.RecordBatch.from_pydict({"id": [1], "name": ["a"], "amount": [1]})
    with pytest.raises(CannotUse, match=r"cannot connect to 127\.0\.0\.1:1: connection refused"):
        sender.send(encoder.requests(batch, 1))
    sender.close()


def test_lost_connection_reports_the_rows_in_progress(real_server: str) -> None:
    space = definitions([parse_uri(real_server)]).space("orders")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_greet_and_leave, args=(listener,), daemon=True).start()
        sender = RowSender(parse_uri(f"127.0.0.1:{listener.getsockname()[1]}"), space, "replace")
        columns = {"id": pa.int64(), "name": pa.string(), "amount": pa.int64()}
        encoder = TupleEncoder(space, pa.schema(columns), RequestType.REPLACE)
        batch = pa.RecordBatch.from_pydict({"id": [1, 2], "name": ["a", "b"], "amount": [1, 2]})
        with pytest.raises(
            CannotWrite, match=r"is lost: .*2 rows of space 'orders' were in progress and may or may not be written"
        ):
            _send_all(sender, encoder.requests(batch, 1))
        sender.close()


def _send_all(sender: RowSender, requests: Requests) -> None:
    sender.send(requests)
    sender.finish()


def _greet_and_leave(listener: socket.socket) -> None:
    client, _ = listener.accept()
    with client:
        client.sendall(
            b"Tarantool 2.6.0 (Binary) 00000000-0000-4000-8000-000000000001".ljust(63)
            + b"\n"
            + b"A" * 44
            + b" " * 19
            + b"\n"
        )
        client.recv(1)
