"""The log file of a replica's channel has whole sessions after any fault, by the original's rules after a crash."""

from __future__ import annotations

import pytest

from flowstone.limestone.format.entries import Marker, decode_all, encode, put, walk
from flowstone.limestone.format.entries import WriteVersion as Version
from flowstone.limestone.format.log_scan import REPAIR, STARTUP, LogScan
from flowstone.limestone.replica.log_file_channel import ReplicaChannel
from flowstone.outside import Disk
from tests.limestone.crashes import DIRECTORY, crashed, fresh

NAME = "pwal_0000"
PATH = f"{DIRECTORY}/{NAME}"
VALUES = [b"a" * 10, b"b" * 100, b""]


def entries(epoch: int) -> list[bytes]:
    return [
        encode(put(1, bytes([epoch, number]), value, Version(epoch, number))) for number, value in enumerate(VALUES)
    ]


def write_session(channel: ReplicaChannel, epoch: int, durable_epoch: int = 0) -> None:
    channel.begin(epoch, durable_epoch)
    for entry in entries(epoch):
        channel.add(entry)
    channel.end()


def read(disk: Disk) -> bytes:
    with disk.open(PATH) as file:
        return file.read_at(0, file.size())


def markers(data: bytes) -> list[tuple[int, int]]:
    return [(int(token.type), token.epoch) for token in decode_all(data, PATH) if isinstance(token, Marker)]


def test_sessions_stay_in_memory_until_flushed() -> None:
    _, disk = fresh()
    channel = ReplicaChannel(disk, DIRECTORY, NAME)
    write_session(channel, 3)
    write_session(channel, 4)
    assert read(disk) == b""
    assert [session.epoch for session in channel.flush(True)] == [3, 4]
    assert channel.flush(True) == []
    assert markers(read(disk)) == [(2, 3), (3, 3), (2, 4), (3, 4)]


def test_compatible_markers_have_epoch_0() -> None:
    _, disk = fresh()
    channel = ReplicaChannel(disk, DIRECTORY, NAME, compatible=True)
    write_session(channel, 3, durable_epoch=9)
    channel.flush(True)
    assert markers(read(disk)) == [(2, 0), (3, 0)]


def test_session_of_a_durable_epoch_counts_only_when_complete() -> None:
    _, disk = fresh()
    channel = ReplicaChannel(disk, DIRECTORY, NAME)
    write_session(channel, 3, durable_epoch=3)
    channel.flush(False)
    assert markers(read(disk)) == [(6, 3), (3, 3)]
    channel.flush(True)
    assert markers(read(disk)) == [(2, 3), (3, 3)]


def test_unfinished_sessions_are_removed_and_finished_ones_kept() -> None:
    _, disk = fresh()
    channel = ReplicaChannel(disk, DIRECTORY, NAME)
    write_session(channel, 1)
    channel.flush(True)
    whole = read(disk)
    channel.begin(2, 0)
    channel.add(entries(2)[0])
    channel.flush(False)
    channel.add(entries(2)[1])
    assert channel.buffered
    channel.abandon()
    assert read(disk) == whole
    assert channel.session is None
    assert not channel.buffered
    write_session(channel, 3)
    channel.flush(True)
    assert markers(read(disk)) == [(2, 1), (3, 1), (2, 3), (3, 3)]


def test_open_session_after_ended_ones_is_flushed_with_them_and_removed_alone() -> None:
    _, disk = fresh()
    channel = ReplicaChannel(disk, DIRECTORY, NAME)
    write_session(channel, 1)
    channel.begin(2, 0)
    assert [session.epoch for session in channel.flush(True)] == [1]
    channel.abandon()
    assert markers(read(disk)) == [(2, 1), (3, 1)]


def test_channel_continues_a_closed_file_or_starts_a_new_one() -> None:
    _, disk = fresh()
    channel = ReplicaChannel(disk, DIRECTORY, NAME)
    write_session(channel, 1)
    channel.flush(True)
    channel.close()
    write_session(channel, 2)
    channel.flush(True)
    channel.close()
    disk.rename(PATH, f"{PATH}.old")
    write_session(channel, 3)
    channel.flush(True)
    assert markers(read(disk)) == [(2, 3), (3, 3)]


@pytest.mark.parametrize("operation", ["append", "sync", "overwrite"])
def test_failed_write_leaves_no_bytes(operation: str) -> None:
    machine, disk = fresh()
    channel = ReplicaChannel(disk, DIRECTORY, NAME)
    write_session(channel, 1)
    channel.flush(True)
    whole = read(disk)
    write_session(channel, 2, durable_epoch=5)
    machine.broken.add(operation)
    with pytest.raises(OSError, match="Input/output error"):
        channel.flush(True)
    machine.broken.clear()
    assert read(disk) == whole
    write_session(channel, 3)
    channel.flush(True)
    assert markers(read(disk)) == [(2, 1), (3, 1), (2, 3), (3, 3)]


# --- crashes ---

DURABLE = 5


def counted(data: bytes, durable_epoch: int) -> list[bytes]:
    """Return the keys that count by the original's rules: a repair, which rotates the file, then a startup."""
    repaired = bytearray(data)
    scan = LogScan(tokens(data), durable_epoch, REPAIR)
    list(scan)
    assert scan.verdict.is_repairable, scan.findings
    for mark in scan.changes.marks:
        repaired[mark] = 6
    scan = LogScan(tokens(bytes(repaired)), durable_epoch, STARTUP, is_detached=True)
    found = [entry.key for entry in scan]
    assert scan.verdict.is_clean, scan.findings
    return found


def tokens(data: bytes) -> list:
    return list(walk(lambda at, size: data[at : at + size], len(data)))


def keys(*epochs: int) -> list[bytes]:
    return [bytes([epoch, number]) for epoch in epochs for number in range(len(VALUES))]


def test_crash_at_any_moment_leaves_complete_or_uncounted_sessions() -> None:
    """Each session of a durable epoch is complete or absent, and no synced data is missing."""
    synced: list[int] = []

    def prepare(disk: Disk) -> None:
        synced.clear()
        channel = ReplicaChannel(disk, DIRECTORY, NAME)
        write_session(channel, 1)
        synced.extend(session.epoch for session in channel.flush(True))

    def work(disk: Disk) -> None:
        channel = ReplicaChannel(disk, DIRECTORY, NAME)
        for epoch in (4, 6, 5, 7):
            channel.begin(epoch, DURABLE)
            for entry in entries(epoch):
                channel.add(entry)
                channel.flush(False)
            channel.end()
            synced.extend(session.epoch for session in channel.flush(True))
        channel.begin(2, DURABLE)
        channel.add(entries(2)[0])
        channel.flush(False)
        channel.abandon()

    for disk, is_done in crashed(prepare, work):
        found = counted(read(disk), DURABLE)
        wanted = [epoch for epoch in synced if epoch <= DURABLE]
        following = [epoch for epoch in (4, 5) if epoch not in synced][:1]
        assert found in (keys(*wanted), keys(*wanted, *following)), (synced, found)
        assert not is_done or synced == [1, 4, 6, 5, 7]
