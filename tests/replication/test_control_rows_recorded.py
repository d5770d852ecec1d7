"""RAFT, PROMOTE, DEMOTE, CONFIRM and ROLLBACK as real servers 2.11 and 3.8 sent and wrote them, byte for byte.

They are found by type in all recordings: both directions of each connection, including rows of JOIN_META, and every log
and snapshot. Each is decoded, and encoded again from the decoded values alone, by a node's encoders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.row import Row, decode_row
from flowstone.replication.limbo.control_rows import Promote, RaftState, decode_control
from flowstone.replication.messages import encode_row_packet
from flowstone.xlog.transactions import CONTROL_TYPES
from tests.conversations import recording
from tests.replication.test_recorded_logs import rows_of
from tests.vectors import recorded

RAFT, PROMOTE, DEMOTE, CONFIRM, ROLLBACK = (
    RequestType.RAFT,
    RequestType.RAFT_PROMOTE,
    RequestType.RAFT_DEMOTE,
    RequestType.RAFT_CONFIRM,
    RequestType.RAFT_ROLLBACK,
)
SCENARIOS = [
    (path.parent.name.removeprefix("tarantool-"), path.name)
    for path in sorted(recorded.HERE.glob("tarantool-*/*"))
    if path.parent.name != "tarantool-2.6"
]
SENT = {
    ("2.11", "01-join-subscribe"): {RAFT: 6, PROMOTE: 3, DEMOTE: 1, CONFIRM: 5, ROLLBACK: 1},
    ("2.11", "05-election"): {RAFT: 21, PROMOTE: 4, CONFIRM: 3},
    ("2.11", "06-contested-election"): {RAFT: 76, PROMOTE: 15, CONFIRM: 12, ROLLBACK: 4},
    ("2.11", "08-probe"): {RAFT: 4, PROMOTE: 2},
    ("3.8", "01-join-subscribe"): {RAFT: 6, PROMOTE: 3, DEMOTE: 1, CONFIRM: 6, ROLLBACK: 1},
    ("3.8", "03-anon-register"): {RAFT: 2, PROMOTE: 1},
    ("3.8", "04-mesh"): {RAFT: 4, PROMOTE: 1},
    ("3.8", "05-election"): {RAFT: 20, PROMOTE: 4, CONFIRM: 3},
    ("3.8", "06-contested-election"): {RAFT: 76, PROMOTE: 15, CONFIRM: 12, ROLLBACK: 4},
    ("3.8", "08-probe"): {RAFT: 4, PROMOTE: 2},
}
"""How many of each kind were sent, as counted by another decoder."""

WRITTEN = {
    ("2.11", "01-join-subscribe"): {RAFT: 11, PROMOTE: 9, DEMOTE: 2, CONFIRM: 10, ROLLBACK: 2},
    ("2.11", "05-election"): {RAFT: 13, PROMOTE: 10, CONFIRM: 6},
    ("3.8", "01-join-subscribe"): {RAFT: 11, PROMOTE: 9, DEMOTE: 2, CONFIRM: 12, ROLLBACK: 2},
    ("3.8", "03-anon-register"): {RAFT: 3, PROMOTE: 3, CONFIRM: 1},
    ("3.8", "04-mesh"): {RAFT: 2, PROMOTE: 2},
    ("3.8", "05-election"): {RAFT: 13, PROMOTE: 10, CONFIRM: 6},
    ("3.8", "07-errors"): {RAFT: 2, PROMOTE: 2},
}
"""How many of each kind are in files, as listed by another decoder."""


def sent(version: str, scenario: str) -> Iterator[recording.Packet]:
    for name in recording.names(version, scenario):
        for packet in recording.load(version, scenario, name).packets:
            if packet.type in CONTROL_TYPES:
                yield packet


def files(version: str, scenario: str) -> list[Path]:
    directory = recording.scenario(version, scenario)
    return sorted(path for path in directory.rglob("*") if path.suffix in (".snap", ".xlog"))


def listed(version: str, scenario: str) -> Iterator[tuple[int, bytes]]:
    """Return type and bytes of control rows, from the listings."""
    directory = recording.scenario(version, scenario)
    for path in recorded.files():
        for entry in recorded.listing(path) if path.is_relative_to(directory) else ():
            row_type = entry.get("header", {}).get(str(Key.REQUEST_TYPE.value))
            if row_type in CONTROL_TYPES:
                yield row_type, bytes.fromhex(entry["row"])


def made_again(row: Row) -> Row:
    """Encode a row again from its values alone."""
    return Row(
        row.type,
        replica_id=row.replica_id,
        group_id=row.group_id,
        lsn=row.lsn,
        timestamp=row.timestamp,
        tsn=row.tsn,
        flags=row.flags,
        body=decode_control(row.type, row.body).encode(),
    )


@pytest.mark.parametrize(("version", "scenario"), SCENARIOS)
def test_control_rows_on_the_wire_are_encoded_to_the_same_bytes(version: str, scenario: str) -> None:
    found: Counter[int] = Counter()
    for packet in sent(version, scenario):
        row = decode_row(packet.payload)
        assert encode_row_packet(made_again(row), row.sync) == recording.framed(packet.payload), str(packet)
        assert packet.from_server, "such rows are only sent downstream"
        found[packet.type] += 1
    assert found == SENT.get((version, scenario), {})


@pytest.mark.parametrize(("version", "scenario"), SCENARIOS)
def test_control_rows_in_files_are_encoded_to_the_same_bytes(version: str, scenario: str) -> None:
    for path in files(version, scenario):
        for row in rows_of(path):
            if row.type in CONTROL_TYPES:
                assert row.raw
                assert made_again(row).encode() == row.raw


@pytest.mark.parametrize(("version", "scenario"), SCENARIOS)
def test_reader_finds_every_control_row_that_another_decoder_found(version: str, scenario: str) -> None:
    expected = list(listed(version, scenario))
    assert Counter(row_type for row_type, _ in expected) == WRITTEN.get((version, scenario), {})
    with_listing = set(recorded.files())
    rows = [row for path in files(version, scenario) if path in with_listing for row in rows_of(path)]
    assert sorted(row.raw for row in rows if row.type in CONTROL_TYPES) == sorted(payload for _, payload in expected)
    assert all(made_again(decode_row(payload)).encode() == payload for _, payload in expected)


@pytest.mark.parametrize("version", ["2.11", "3.8"])
def test_recordings_contain_each_kind_of_control_row(version: str) -> None:
    on_the_wire = {packet.type for each, scenario in SCENARIOS if each == version for packet in sent(each, scenario)}
    in_logs = {
        row.type
        for each, scenario in SCENARIOS
        if each == version
        for path in files(each, scenario)
        if path.suffix == ".xlog"
        for row in rows_of(path)
    }
    assert on_the_wire == CONTROL_TYPES
    assert in_logs >= CONTROL_TYPES


@pytest.mark.parametrize("version", ["2.11", "3.8"])
def test_join_meta_has_the_term_and_the_state_of_the_queue(version: str) -> None:
    """Two rows between the markers JOIN_META and JOIN_SNAPSHOT, without a header of their own."""
    packets = recording.load(version, "01-join-subscribe", "join-01").answers
    kinds = [packet.type for packet in packets]
    first, last = kinds.index(RequestType.JOIN_META), kinds.index(RequestType.JOIN_SNAPSHOT)
    rows = [decode_row(packet.payload) for packet in packets[first + 1 : last]]
    bodies = [decode_control(row.type, row.body) for row in rows]
    assert [type(body) for body in bodies] == [RaftState, Promote]
    assert all(row.lsn == row.replica_id == 0 for row in rows)
    promote = bodies[1]
    assert isinstance(promote, Promote)
    assert promote.confirmed_vclock is not None
