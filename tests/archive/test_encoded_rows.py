"""Stream rows in the form of log files: the bytes of a real writer, with the timestamps of the upstream."""

from __future__ import annotations

import msgspec

from flowstone.archive import encoded_rows as archive_rows
from flowstone.archive.encoded_rows import log_rows, snapshot_rows
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row, encode_header
from flowstone.replication.row_stream import slab_of_rows
from flowstone.xlog.transactions import make_transaction
from tests.node.archived_rows import SYNC, row, stream


def test_log_rows_equal_those_of_the_upstream() -> None:
    rows = [
        *make_transaction([row(6)]).rows,
        *make_transaction([row(7), row(8), row(9)], SYNC).rows,
        *make_transaction([row(3, origin=2), Row(RequestType.NOP, 2, lsn=4, timestamp=9.0)]).rows,
    ]
    slab = stream(*rows)
    assert log_rows(slab, 0, len(slab)) == b"".join(each.encode() for each in rows)
    assert log_rows(slab, 1, 4) == b"".join(each.encode() for each in rows[1:4])
    assert log_rows(slab, 2, 2) == b""


def test_sync_numbers_of_a_connection_are_omitted_from_headers() -> None:
    plain = make_transaction([row(6)]).rows[0]
    with_sync = msgspec.structs.replace(plain, sync=77)
    assert log_rows(stream(with_sync), 0, 1) == plain.encode()


def test_snapshot_rows_are_numbered_and_stamped() -> None:
    rows = [Row(RequestType.INSERT, body=row(number).body) for number in range(5)]
    ((data, count),) = snapshot_rows(stream(*rows), 0, 5, 0, 12.5)
    wanted = [Row(RequestType.INSERT, lsn=n, tsn=n, timestamp=12.5, body=each.body) for n, each in enumerate(rows)]
    assert count == 5
    assert data == b"".join(encode_header(each) + each.body for each in wanted)


def test_many_snapshot_rows_are_yielded_in_pieces() -> None:
    rows = [Row(RequestType.INSERT, body=row(number).body) for number in range(2500)]
    pieces = list(snapshot_rows(stream(*rows), 100, 2500, 7, 1.0))
    assert [count for _, count in pieces] == [archive_rows.SNAPSHOT_BLOCK_ROWS] * 2 + [400]
    lsns = [each.lsn for data, _ in pieces for each in slab_of_rows(data, "").rows()]
    assert lsns == list(range(7, 2407))
