"""The directory of an archive: it opens after any crash, with a repaired manifest."""

from __future__ import annotations

import itertools
from contextlib import suppress
from random import Random
from typing import Any
from uuid import UUID

import pytest

from flowstone.archive import manifest as archive_manifest
from flowstone.archive.manifest import ArchivedUpstream, NotAnArchive
from flowstone.archive.received_snapshot import IncomingSnapshot
from flowstone.archive.store import ArchiveStore
from flowstone.outside import AlreadyLocked
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.errors import WriteFailed
from flowstone.xlog.transactions import make_transaction
from tests.archive.test_received_snapshot import SET, tuple_row
from tests.limestone.crashes import fresh, one_failure
from tests.node.archived_rows import INSTANCE, new_disk, row, stream
from tests.node.fault_disk import Died

UUID_ = UUID(INSTANCE)


def opened(disk: Any) -> ArchiveStore:
    return ArchiveStore.open(disk, "dir", UUID_, lambda: 1000.0)


def snapshot(store: ArchiveStore, lsn: int) -> IncomingSnapshot:
    incoming = store.receive_snapshot(VClock({1: lsn}), "2.11.9", INSTANCE)
    incoming.add(stream(tuple_row(272, ["cluster", str(SET)]), tuple_row(512, [1])))
    return incoming


def write(store: ArchiveStore, *lsns: int) -> None:
    store.write([stream(*(make_transaction([row(lsn)]).rows[0] for lsn in lsns))])


def begun(disk: Any) -> ArchiveStore:
    store = opened(disk)
    assert store.begin_from(snapshot(store, 5), "") is None
    return store


def test_new_archive_has_no_files_before_its_first_snapshot() -> None:
    disk = new_disk()
    store = opened(disk)
    assert store.log is None
    assert store.vclock == VClock()
    store.close()
    assert disk.list_directory("dir") == []
    store = opened(disk)
    assert not store.is_begun
    store.receive_snapshot(VClock({1: 5}), "2.11.9", INSTANCE)
    assert store.is_begun
    assert "manifest.json" in disk.list_directory("dir")


def test_archive_starts_with_a_snapshot_and_continues_after_a_restart() -> None:
    disk = new_disk()
    store = begun(disk)
    write(store, 6, 7)
    store.close()
    again = opened(disk.after_death())
    assert again.vclock == again.settled == VClock({1: 7})
    assert again.manifest.replicaset_uuid == str(SET)
    assert [each.reason for each in again.manifest.snapshots] == ["first"]


def test_gap_is_recorded_and_the_log_restarts_after_it() -> None:
    disk = new_disk()
    store = begun(disk)
    write(store, 6)
    gap = store.begin_from(snapshot(store, 20), "collected")
    assert gap is not None
    assert gap.missing == ((1, 7, 20),)
    write(store, 21)
    store.close()
    again = opened(disk.after_death())
    assert again.vclock == VClock({1: 21})
    assert again.manifest.gaps == [gap]


def test_interval_snapshot_is_published_where_the_log_was_cut() -> None:
    disk = new_disk()
    store = begun(disk)
    write(store, 6)
    incoming = snapshot(store, 8)
    store.cut(VClock({1: 8}))
    write(store, 7, 8, 9)
    assert store.publish(incoming) is not None
    store.close()
    again = opened(disk.after_death())
    assert again.vclock == VClock({1: 9})
    assert [each.reason for each in again.manifest.snapshots] == ["first", "interval"]


def test_snapshot_before_the_end_of_the_log_is_discarded() -> None:
    disk = new_disk()
    store = begun(disk)
    write(store, 6, 7)
    incoming = snapshot(store, 6)
    store.cut(VClock({1: 6}))
    assert store.publish(incoming) is None
    assert [name for name in disk.list_directory("dir") if name.endswith("inprogress")] == []


def test_change_of_the_upstream_is_recorded() -> None:
    store = begun(new_disk())
    first = ArchivedUpstream(INSTANCE, "a:1", "2.6.0")
    assert store.follow(first)
    assert not store.follow(first)
    assert store.follow(ArchivedUpstream(INSTANCE, "b:1", "2.6.0"))


def test_log_files_without_a_manifest_are_not_an_archive() -> None:
    disk = new_disk()
    begun(disk).close()
    disk = disk.after_death()
    disk.unlink(f"dir/{archive_manifest.NAME}")
    with pytest.raises(NotAnArchive, match="is not an archive"):
        opened(disk)
    assert not disk.locked


@pytest.mark.parametrize("name", ["notes.txt", "00000000000000000000.snap.inprogress", ".hidden"])
def test_foreign_directory_is_rejected_and_unchanged(name: str) -> None:
    disk = new_disk()
    disk.create(f"dir/{name}")
    with pytest.raises(NotAnArchive, match=f"such as {name}"):
        opened(disk)
    assert disk.list_directory("dir") == [name]
    assert not disk.locked


@pytest.mark.parametrize("name", ["lost+found", "manifest.json.new"])
def test_new_file_system_and_leftovers_of_a_killed_start_are_accepted(name: str) -> None:
    disk = new_disk()
    disk.create(f"dir/{name}")
    begun(disk).close()
    assert opened(disk).vclock == VClock({1: 5})


def test_directory_in_use_is_rejected() -> None:
    disk = new_disk()
    opened(disk)
    with pytest.raises(AlreadyLocked, match="another archive or a server is using it"):
        opened(disk)


def test_archive_is_consistent_and_keeps_acknowledged_rows_after_any_crash() -> None:
    for seed in range(120):
        rng = Random(seed)
        disk = new_disk()
        disk.life = rng.randrange(4000)
        acknowledged = 0
        gap_at: int | None = None
        try:
            store = begun(disk)
            acknowledged = 5
            for lsn in range(6, 30):
                if lsn == 15 and seed % 3 == 0:
                    incoming = snapshot(store, lsn)
                    store.cut(VClock({1: lsn}))
                    write(store, lsn)
                    store.publish(incoming)
                elif lsn == 20 and seed % 3 == 1:
                    store.begin_from(snapshot(store, 40), "collected")
                    acknowledged = gap_at = 40
                    break
                else:
                    write(store, lsn)
                acknowledged = lsn
                if rng.random() < 0.2:
                    store.save()
        except Died:
            pass
        after = disk.after_death() if seed % 2 else disk.after_power_loss(rng)
        again = opened(after)
        assert again.vclock.get(1) >= acknowledged
        manifest = again.manifest
        files = {name for name in after.list_directory("dir") if name.endswith(".snap")}
        assert {each.file for each in manifest.snapshots} == files
        assert bool(manifest.gaps) == (again.vclock.get(1) == 40), (seed, gap_at)
        if again.log is not None:
            assert manifest.replicaset_uuid == str(SET)
            write(again, again.vclock.get(1) + 1)
            again.close()


def kill(disk: Any, *, is_indexed: bool, has_snapshot: bool) -> None:
    """Leave the files of a killed archive: two logs, with or without their indexes, the second one longer than its
    index; with `has_snapshot`, also a snapshot between them that is missing from the manifest."""
    store = begun(disk)
    write(store, 6)
    incoming = snapshot(store, 6)
    store.cut(VClock({1: 6}))
    write(store, 7)
    store.save()
    write(store, 8)
    store.abandon()
    if has_snapshot:
        incoming.finish()
    else:
        incoming.abandon()
    for name in disk.list_directory("dir"):
        if name.endswith(".jsonl") and not is_indexed:
            disk.unlink(f"dir/{name}")


@pytest.mark.parametrize("has_snapshot", [False, True])
@pytest.mark.parametrize("is_indexed", [False, True])
def test_start_that_fails_at_any_disk_operation_leaves_nothing_open(is_indexed: bool, has_snapshot: bool) -> None:
    for number in itertools.count(1):
        machine, disk = fresh()
        kill(disk, is_indexed=is_indexed, has_snapshot=has_snapshot)
        assert not machine.opened
        store, failure = None, None
        with one_failure(machine, number) as has_failed:
            try:
                store = opened(disk)
            except (OSError, WriteFailed, NotAnArchive) as error:
                failure = error  # its traceback keeps all frames alive, so no file is closed by chance
        if store is None:
            assert not machine.opened, (number, failure)
            assert not machine.locked, (number, failure)
            store = opened(disk)
        assert store.vclock == VClock({1: 8})
        store.close()
        assert not machine.opened
        if not has_failed():
            return


def test_files_continue_each_other_after_any_failed_cut() -> None:
    """A server starts only from logs whose headers name the previous log."""
    for number in itertools.count(1):
        machine, disk = fresh()
        store = begun(disk)
        for lsn in (6, 7):
            write(store, lsn)
            store.cut(VClock({1: lsn}))
        write(store, 8)
        with one_failure(machine, number) as has_failed, suppress(OSError, WriteFailed):
            store.cut(VClock({1: 8}))
        write(store, 9)
        store.close()
        assert not machine.opened
        logs = [each.meta for each in scan_directory(disk, "dir").logs]
        assert [each.prev_vclock for each in logs] == [None, *(each.vclock for each in logs[:-1])], number
        assert opened(disk).vclock == VClock({1: 9})
        if not has_failed():
            return
