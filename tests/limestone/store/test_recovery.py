"""Data directories: recorded ones recover to the recorded rows, a crash keeps durable data, and errors name
the damage.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import names
from flowstone.limestone.format.entries import EntryType, Marker, WriteVersion, encode, put
from flowstone.limestone.format.epoch_file import EpochWriter, record
from flowstone.limestone.format.log_scan import INSPECT, STARTUP, FileRepair
from flowstone.limestone.store.recovery import RecoveredDirectory, recover, recover_live
from flowstone.outside import Disk, production
from tests.limestone import recorded
from tests.limestone.crashes import DIRECTORY, crashed, fresh
from tests.limestone.plain_state import encode_compacted, encode_snapshot

DISK = production().disk
HERE = recorded.HERE
ROWS = recorded.rows((HERE / "dirs-master" / "before.rows.txt").read_text())


def copied(tmp_path: Path, *parts: str) -> Path:
    return Path(shutil.copytree(HERE.joinpath(*parts), tmp_path / "copy"))


def shown(found: RecoveredDirectory) -> list[tuple[int, bytes, bytes]]:
    return [(row.storage_id, row.key, row.value) for row in found.snapshot.rows()]


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


@pytest.mark.parametrize("side", ["dirs-master", "dirs-replica"])
@pytest.mark.parametrize("state", ["before", "before-reopened", "after-offline-compaction"])
def test_recorded_directories_recover_to_the_recorded_rows(tmp_path: Path, side: str, state: str) -> None:
    listing = "after-offline.rows.txt" if state.startswith("after") else "before.rows.txt"
    text = (HERE / side / listing).read_text()
    directory = copied(tmp_path, side, state)
    before = content(directory)
    found = recover(DISK, str(directory))
    assert shown(found) == recorded.rows(text) != []
    assert f"last_epoch {found.last_epoch}" in text
    assert content(directory) == before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("dirs-master/before", "dirs-master/before-reopened"),
        ("dirs-replica/before", "dirs-replica/before-reopened"),
        ("tail/dir-before-reopen", "tail/dir"),
        ("basic/master-dir", "restart/master-dir"),
    ],
)
def test_snapshot_file_equals_that_of_the_real_program(before: str, after: str) -> None:
    found = recover(DISK, str(HERE / before), repairs=False)
    changes = found.snapshot.changes(with_removes=bool(found.catalog.compacted))
    assert encode_snapshot(changes) == (HERE / after / names.SNAPSHOT).read_bytes()


@pytest.mark.parametrize("side", ["dirs-master", "dirs-replica"])
def test_compacted_file_equals_that_of_the_real_program(side: str) -> None:
    found = recover(DISK, str(HERE / side / "before"), repairs=False)
    real = HERE / side / "after-offline-compaction" / names.COMPACTED
    assert encode_compacted(found.snapshot.rows()) == real.read_bytes()


def test_undurable_sessions_are_marked_as_in_the_real_program(tmp_path: Path) -> None:
    directory = copied(tmp_path, "tail", "dir-before-reopen")
    found = recover(DISK, str(directory))
    real = {name: data for name, data in content(HERE / "tail" / "dir").items() if names.is_pwal(name)}
    assert {name: data for name, data in content(directory).items() if names.is_pwal(name)} == real
    text = (HERE / "tail" / "2.out").read_text()
    assert shown(found) == recorded.rows(text)
    assert (found.durable_epoch, found.last_epoch) == (5, 6)


def test_thousands_of_sessions_are_marked_with_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = copied(tmp_path, "tail", "dir-before-reopen")
    begin = EntryType.MARKER_BEGIN
    sessions = [encode(Marker(begin, epoch)) + encode(Marker(EntryType.MARKER_END, epoch)) for epoch in range(7, 3007)]
    (directory / "pwal_0009").write_bytes(b"".join(sessions))
    synced: list[int] = []
    sync = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.append(descriptor) or sync(descriptor))  # type: ignore[func-returns-value, redundant-expr]
    found = recover(DISK, str(directory))
    changed = [report for report in found.files if report.changes.marks]
    assert sum(len(report.changes.marks) for report in changed) >= 3000
    assert len(synced) <= 2 * len(found.files)


def test_recovery_without_repairs_changes_nothing(tmp_path: Path) -> None:
    directory = copied(tmp_path, "tail", "dir-before-reopen")
    before = content(directory)
    recover(DISK, str(directory), repairs=False)
    assert content(directory) == before


def test_removed_key_stays_removed_after_an_offline_compaction() -> None:
    """In the original the key returns, because an empty catalog keeps the remove out of the snapshot."""
    directory = HERE / "quirk-offline-remove" / "dir"
    found = recover(DISK, str(directory), repairs=False)
    removed = [token for token in found.snapshot.changes(with_removes=True) if token.type is EntryType.REMOVE]
    assert removed
    keys = [(storage_id, key) for storage_id, key, _ in shown(found)]
    assert not [entry for entry in removed if (entry.storage_id, entry.key) in keys]


def test_replica_killed_in_epoch_0_reports_the_lost_data(tmp_path: Path) -> None:
    directory = copied(tmp_path, "replica_crash", "crash.dir.asleft")
    before = content(directory)
    for mode in (STARTUP, INSPECT):
        with pytest.raises(DamagedFile, match=r"pwal_0000 is damaged at byte \d+.*restore a backup"):
            recover(DISK, str(directory), mode)
    assert content(directory) == before


def test_compacted_files_and_their_inputs_are_not_read_as_logs(tmp_path: Path) -> None:
    old, new = put(1, b"k", b"old", WriteVersion(1, 1)), put(1, b"k", b"new", WriteVersion(2, 1))
    detached = "pwal_0000.01794772615522.0"
    (tmp_path / detached).write_bytes(session(1, b"gone"))
    (tmp_path / names.CATALOG).write_bytes(
        f"COMPACTION_CATALOG_HEADER\nDETACHED_PWAL {detached}\nMAX_EPOCH_ID 1\nMAX_BLOB_ID 8\n"
        "COMPACTION_CATALOG_FOOTER\n".encode()
    )
    (tmp_path / names.COMPACTED_PREVIOUS).write_bytes(encode_compacted([old]))
    (tmp_path / names.EPOCH).write_bytes(record(2))
    assert shown(recover(DISK, str(tmp_path))) == [(1, b"k", b"old")]
    (tmp_path / names.COMPACTED).write_bytes(encode_compacted([new]))
    found = recover(DISK, str(tmp_path))
    assert (shown(found), found.max_blob_id, found.files) == ([(1, b"k", b"new")], 8, ())
    (tmp_path / names.COMPACTED).write_bytes(encode_compacted([new])[:-1])
    with pytest.raises(DamagedFile, match="restore it from a backup"):
        recover(DISK, str(tmp_path))


def session(epoch: int, key: bytes) -> bytes:
    markers = [Marker(kind, epoch) for kind in (EntryType.MARKER_BEGIN, EntryType.MARKER_END)]
    return encode(markers[0]) + encode(put(1, key, b"v" * 30, WriteVersion(epoch, 1))) + encode(markers[1])


@pytest.mark.parametrize("start", [1, 0xFE])
def test_crash_at_any_moment_keeps_reported_epochs_and_no_partial_one(start: int) -> None:
    """Sessions are synced, then their epoch is written; recovery itself may also be interrupted."""
    reported: list[int] = []

    def prepare(disk: Disk) -> None:
        reported.clear()
        disk.create(f"{DIRECTORY}/pwal_0000").close()
        EpochWriter.open(disk, DIRECTORY)
        disk.sync_directory(DIRECTORY)

    def work(disk: Disk) -> None:
        writer = EpochWriter.open(disk, DIRECTORY)
        for epoch in range(start, start + 4):
            data = session(epoch, b"%d" % epoch)
            with disk.append_to(f"{DIRECTORY}/pwal_0000") as file:
                file.append(data[:30])
                file.append(data[30:])
                file.sync()
            writer.write(epoch)
            reported.append(epoch)

    for disk, _ in crashed(prepare, work):
        found = recover(disk, DIRECTORY)
        epochs = [int(key) for _, key, _ in shown(found)]
        assert epochs == list(range(start, start + len(epochs)))
        assert len(reported) <= len(epochs) <= len(reported) + 1
        EpochWriter.open(disk, DIRECTORY).write(found.last_epoch)
        again = recover(disk, DIRECTORY)
        assert shown(again) == shown(found)
        assert [report.changes for report in again.files] == [FileRepair()]


def test_empty_directory_recovers_to_an_empty_state(tmp_path: Path) -> None:
    found = recover(DISK, str(tmp_path))
    assert (shown(found), found.last_epoch, found.max_blob_id) == ([], 0, 0)


class Busy:
    """A disk that runs a hook before call number `moment`, and then before every `period`th call."""

    def __init__(self, disk: Disk, moment: int, happens: Callable[[], None], period: int = 1 << 30) -> None:
        self._disk, self._moment, self._happens, self._period = disk, moment, happens, period
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._disk, name)

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls >= self._moment and not (self.calls - self._moment) % self._period:
                self._happens()
            return method(*arguments)

        return call


class Channel:
    """A channel of a running store that writes sessions and rotates its file."""

    def __init__(self, disk: Disk) -> None:
        self.disk, self.sizes, self.rotations = disk, {"pwal_0000": 0}, 0
        disk.create(f"{DIRECTORY}/pwal_0000").close()

    def write(self, data: bytes, *, is_finished: bool = True) -> None:
        with self.disk.append_to(f"{DIRECTORY}/pwal_0000") as file:
            file.append(data)
            self.sizes["pwal_0000"] += len(data) if is_finished else 0

    def rotate(self) -> None:
        self.rotations += 1
        self.disk.rename(f"{DIRECTORY}/pwal_0000", f"{DIRECTORY}/{names.rotated('pwal_0000', self.rotations, 0)}")
        self.disk.create(f"{DIRECTORY}/pwal_0000").close()
        self.sizes["pwal_0000"] = 0
        self.write(session(9, b"later"))


def live_rows(moment: int, happens: Callable[[Channel], None], period: int = 1 << 30) -> tuple[list[bytes], int]:
    _, disk = fresh()
    channel = Channel(disk)
    channel.write(session(1, b"a") + session(2, b"b"))
    channel.write(session(9, b"unfinished")[:-1], is_finished=False)
    busy: Any = Busy(disk, moment, lambda: happens(channel), period)
    found = recover_live(busy, DIRECTORY, 2, lambda: dict(channel.sizes))
    stored = found.snapshot.stored(busy, DIRECTORY, with_removes=False)
    rows = [row.key for row in stored.cursor()]
    stored.close()
    return rows, busy.calls


def test_file_rotated_at_any_moment_is_read_completely_once() -> None:
    rows, calls = live_rows(1 << 30, Channel.rotate)
    assert rows == [b"a", b"b"]
    for moment in range(1, calls + 1):
        assert live_rows(moment, Channel.rotate)[0] == [b"a", b"b"]


def test_bytes_after_the_finished_sessions_are_not_read() -> None:
    """These bytes may be aborted and overwritten while they are read."""
    assert live_rows(1, lambda channel: channel.write(b"\xff" * 100, is_finished=False))[0] == [b"a", b"b"]


def test_session_that_begins_while_files_are_read_is_ignored() -> None:
    """The session is in a file of an earlier process, whose channel had no session before."""
    _, disk = fresh()
    channel = Channel(disk)
    channel.write(session(1, b"a"))

    def sizes_before_the_session() -> dict[str, int]:
        channel.write(b"\xff" * 100)
        return {}

    found = recover_live(disk, DIRECTORY, 2, sizes_before_the_session)
    assert [row.key for row in found.snapshot.rows()] == [b"a"]
    found.snapshot.close()


def test_live_recovery_fails_if_files_change_at_every_third_call() -> None:
    """Each attempt finds more files, needs more calls to read them, and therefore sees even more changes."""
    with pytest.raises(LimestoneError, match="change faster"):
        live_rows(1, Channel.rotate, 3)
