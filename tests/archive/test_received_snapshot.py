"""Snapshots of an archive: written atomically, in the order that servers require."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from flowstone.archive.received_snapshot import IncomingSnapshot
from flowstone.errors import RemoteProtocolError
from flowstone.iproto.constants import RaftKey, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.replication.limbo.control_rows import Promote
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import LogFile
from tests.node.archived_rows import INSTANCE, new_disk, stream

SET = UUID("99999999-2222-3333-4444-555555555555")
PATH = "dir/00000000000000000007.snap"


def incoming(disk: Any) -> IncomingSnapshot:
    disk.make_directory("dir")
    return IncomingSnapshot(
        disk,
        "dir",
        instance_uuid=INSTANCE,
        vclock=VClock({1: 7}),
        version="2.11.9",
        timestamp=12.5,
    )


def tuple_row(space: int, values: list[object]) -> Row:
    return Row(RequestType.INSERT, body=b"\x82\x10\xce" + space.to_bytes(4, "big") + b"\x21" + pack(values))


def test_snapshot_appears_only_when_complete() -> None:
    disk = new_disk()
    snapshot = incoming(disk)
    snapshot.add(stream(tuple_row(272, ["version", 2, 11]), tuple_row(272, ["cluster", str(SET)])))
    assert snapshot.replicaset_uuid == SET
    assert disk.list_directory("dir") == ["00000000000000000007.snap.inprogress"]
    assert snapshot.finish() == PATH
    assert disk.list_directory("dir") == ["00000000000000000007.snap"]


def test_uuid_of_newer_sets_is_found() -> None:
    snapshot = incoming(new_disk())
    snapshot.add(stream(tuple_row(272, ["replicaset_uuid", str(SET)])))
    assert snapshot.replicaset_uuid == SET


def test_states_are_between_system_and_user_spaces() -> None:
    disk = new_disk()
    snapshot = incoming(disk)
    snapshot.meta(Row(RequestType.RAFT, body=pack({int(RaftKey.TERM): 3})))
    snapshot.meta(Row(RequestType.RAFT_PROMOTE, 1, body=Promote(1, 6, 3, VClock({1: 6})).encode()))
    snapshot.add(stream(tuple_row(272, ["cluster", str(SET)]), tuple_row(512, [1]), tuple_row(512, [2])))
    snapshot.add(stream(tuple_row(513, [1])))
    snapshot.finish()
    with LogFile.open(disk, PATH) as log:
        rows = list(log.rows())
    assert [each.type for each in rows] == [2, 30, 31, 2, 2, 2]
    assert [each.lsn for each in rows] == [0, 1, 2, 3, 4, 5]
    assert {each.timestamp for each in rows} == {12.5}
    assert [each.group_id for each in rows] == [0, 1, 0, 0, 0, 0]


def test_snapshot_without_user_spaces_contains_states() -> None:
    disk = new_disk()
    snapshot = incoming(disk)
    snapshot.meta(Row(RequestType.RAFT, body=pack({int(RaftKey.TERM): 3})))
    snapshot.add(stream(tuple_row(272, ["cluster", str(SET)])))
    snapshot.finish()
    with LogFile.open(disk, PATH) as log:
        assert [each.type for each in log.rows()] == [2, 30]


def test_abandoned_snapshot_leaves_no_files() -> None:
    disk = new_disk()
    snapshot = incoming(disk)
    snapshot.add(stream(tuple_row(512, [1])))
    snapshot.abandon()
    assert disk.list_directory("dir") == []


def test_each_position_has_at_most_one_snapshot() -> None:
    disk = new_disk()
    incoming(disk).finish()
    again = incoming(disk)
    again.add(stream(tuple_row(512, [1])))
    assert again.finish() == PATH
    again.abandon()
    assert disk.list_directory("dir") == ["00000000000000000007.snap"]


def test_rows_that_cannot_be_in_a_snapshot_are_rejected() -> None:
    with pytest.raises(RemoteProtocolError, match="row is not an INSERT"):
        incoming(new_disk()).add(stream(Row(RequestType.DELETE, body=tuple_row(512, [1]).body)))
