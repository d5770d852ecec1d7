"""Streaming snapshots of live servers: all rows, one table per chunk, clear errors."""

from __future__ import annotations

import pytest

from flowstone.iproto.msgpack import unpack
from flowstone.iproto.scan import SPACE_ID, TUPLE_AT, TUPLE_END
from flowstone.iproto.uri import parse_uri
from flowstone.spark.sources.tarantool import live_snapshot
from flowstone.spark.sources.tarantool.live_node import CannotUse
from flowstone.spark.sources.tarantool.live_snapshot import merged, snapshot_slabs
from tests.spark.live_servers import PAIR_ROWS, PAIRS
from tests.xlog.slabs import insert, slab_of


def test_all_rows_arrive_with_a_small_buffer(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_snapshot, "QUEUE_SIZE_MAX", 100)
    monkeypatch.setattr(live_snapshot, "CHUNK_SIZE", 10)
    found = []
    for slab in snapshot_slabs([parse_uri(address)]):
        for number in (slab.cells[SPACE_ID] == PAIRS).nonzero()[0].tolist():
            at, end = slab.cells[TUPLE_AT, number], slab.cells[TUPLE_END, number]
            found.append(unpack(slab.payload[at:end]))
    assert found == list(PAIR_ROWS)


def test_snapshot_can_be_closed_early(address: str) -> None:
    slabs = snapshot_slabs([parse_uri(address)])
    next(slabs)
    slabs.close()  # type: ignore[attr-defined]


def test_next_member_is_asked_when_one_is_unreachable(address: str) -> None:
    members = [parse_uri("127.0.0.1:1"), parse_uri(address)]
    assert sum(map(len, snapshot_slabs(members))) > len(PAIR_ROWS)
    with pytest.raises(CannotUse, match=r"127.0.0.1:1: connection refused; cannot connect to 127.0.0.1:2"):
        list(snapshot_slabs([members[0], parse_uri("127.0.0.1:2")]))


def test_user_without_the_replication_role_gets_a_hint(real_server: str) -> None:
    with pytest.raises(CannotUse, match=r"rejects a snapshot request of user 'limited': .*readMode=select"):
        list(snapshot_slabs([parse_uri(f"limited:pass@{real_server}")]))
    with pytest.raises(CannotUse, match=r"rejects user 'limited'"):
        list(snapshot_slabs([parse_uri(f"limited:wrong@{real_server}")]))


def test_merged_slabs_keep_their_rows_and_offsets() -> None:
    parts = [slab_of([insert([b"\x01", b"\xa1a"], 1)]), slab_of([insert([b"\x02", b"\xa1b"], 2), insert([b"\x03"], 3)])]
    whole = merged(parts)
    assert [row.body for row in whole.rows()] == [row.body for part in parts for row in part.rows()]
    tuples = [whole.payload[at:end] for at, end in zip(whole.cells[TUPLE_AT], whole.cells[TUPLE_END], strict=True)]
    assert list(map(unpack, tuples)) == [(1, "a"), (2, "b"), (3,)]
    assert merged(parts[:1]) is parts[0]
