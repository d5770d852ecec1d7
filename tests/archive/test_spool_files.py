"""The files of a spool: it starts at any position, drops consumed rows, and discards unsettled ones."""

from __future__ import annotations

from random import Random
from typing import Any
from uuid import UUID

import pytest

from flowstone.archive.block_index import read_blocks
from flowstone.archive.definitions_file import definition_files, read_definitions
from flowstone.archive.spool_files import SpoolStore
from flowstone.archive.upstream_query import UpstreamFacts
from flowstone.box.schema import SchemaTracker
from flowstone.iproto.msgpack import pack
from flowstone.replication.messages import Ballot
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.reader import LogFile
from tests.archive.test_store import snapshot
from tests.node.archived_rows import INSTANCE, SYNC, alone, confirm, define_space, new_disk, slab
from tests.node.fault_disk import Died

SET = "bbbbbbbb-0000-4000-8000-000000000002"
SPACE_512 = (280, pack((512, 1, "given", "memtx", 0, {}, [])))
FACTS = UpstreamFacts(UUID(INSTANCE), "2.11.9", SET, Ballot(), ())


def opened(disk: Any, **how: Any) -> SpoolStore:
    return SpoolStore.open(disk, "dir", UUID(INSTANCE), lambda: 1000.0, **how)


def begun_at(disk: Any, lsn: int = 100, **how: Any) -> SpoolStore:
    store = opened(disk, **how)
    store.begin_at(VClock({1: lsn}), FACTS, [SPACE_512])
    return store


def begun_from_snapshot(disk: Any, lsn: int = 5, **how: Any) -> SpoolStore:
    store = opened(disk, **how)
    store.begin_from(snapshot(store, lsn), "")
    return store


def lsns(disk: Any) -> list[int]:
    found: list[int] = []
    for listed in scan_directory(disk, "dir").logs:
        with LogFile.open(disk, listed.path) as log:
            found += [row.lsn for row in log.rows()]
    return found


def names(disk: Any, ending: str) -> list[int]:
    return [int(name.split(".")[0]) for name in disk.list_directory("dir") if name.endswith(ending)]


def spaces(disk: Any, number: int = -1) -> set[str]:
    tracker = SchemaTracker()
    read_definitions(disk, definition_files(disk, "dir")[number].path).apply_to(tracker)
    return {space.name for space in tracker.schema if space.id >= 512}


def test_spool_starts_mid_log_and_continues_after_a_restart() -> None:
    disk = new_disk()
    store = begun_at(disk)
    assert store.vclock == store.settled == store.earliest == VClock({1: 100})
    store.write([slab(alone(101), alone(102))])
    store.close()
    store = opened(disk)
    assert store.manifest.replicaset_uuid == SET
    assert store.vclock == store.settled == VClock({1: 102})
    assert store.earliest == VClock({1: 100})
    store.write([slab(alone(103))])
    assert lsns(disk) == [101, 102, 103]
    assert spaces(disk) == {"given"}


def test_written_rows_are_indexed_at_once() -> None:
    disk = new_disk()
    store = begun_at(disk)
    store.write([slab(alone(101))])
    (log,) = scan_directory(disk, "dir").logs
    blocks = read_blocks(disk, log.path)
    assert blocks is not None
    assert [run.settled for run in blocks.runs] == [{1: 101}]


def test_each_log_file_starts_with_the_earlier_definitions() -> None:
    disk = new_disk()
    store = begun_at(disk, wal_max_size=1)
    store.write([slab(define_space(101, 600))])
    store.write([slab(define_space(102, 601))])
    assert names(disk, ".definitions") == [100, 101]
    assert spaces(disk, 0) == {"given"}
    assert spaces(disk, 1) == {"given", "s600"}


def test_collection_drops_read_files_and_keeps_definitions() -> None:
    disk = new_disk()
    store = begun_from_snapshot(disk, wal_max_size=1)
    for lsn in range(6, 10):
        store.write([slab(define_space(lsn, 600 + lsn))])
    store.collect(VClock({1: 5}))  # the snapshot has been consumed
    assert names(disk, ".snap") == []
    assert store.manifest.snapshots == []
    assert lsns(disk) == [6, 7, 8, 9]
    store.collect(VClock({1: 8}))
    assert lsns(disk) == [9]
    assert names(disk, ".definitions") == [8]
    assert names(disk, ".blocks.jsonl") == [8]
    assert spaces(disk) >= {"s606", "s607", "s608"}
    store.write([slab(alone(10))])
    store.close()
    assert opened(disk).vclock == VClock({1: 10})


def test_collection_keeps_the_snapshot_until_it_is_read() -> None:
    disk = new_disk()
    store = begun_from_snapshot(disk)
    store.collect(VClock({1: 4}))
    assert names(disk, ".snap") == [5]


def test_log_that_starts_with_a_pending_transaction_needs_the_previous_log() -> None:
    disk = new_disk()
    store = begun_at(disk, wal_max_size=1)
    store.write([slab(alone(101))])
    store.write([slab(alone(102, flags=SYNC))])
    store.write([slab(alone(103, flags=SYNC))])
    store.write([slab(confirm(104, 103))])
    store.write([slab(alone(105))])
    assert names(disk, ".definitions") == [100, 101, 104]
    store.collect(VClock({1: 102}))
    assert lsns(disk) == [102, 103, 104, 105]


@pytest.mark.parametrize("is_in_one_run", [True, False])
def test_rollback_drops_unacknowledged_rows(is_in_one_run: bool) -> None:
    disk = new_disk()
    store = begun_at(disk)
    rows = [alone(101), alone(102), alone(103, flags=SYNC), alone(104, flags=SYNC)]
    for each in [rows] if is_in_one_run else [[one] for one in rows]:
        store.write([slab(*each)])
    assert store.settled == VClock({1: 102})
    store.take_back()
    assert store.vclock == store.settled == VClock({1: 102})
    assert lsns(disk) == [101, 102]
    store.write([slab(alone(103), alone(1, origin=2))])
    store.close()
    store = opened(disk)
    assert lsns(disk) == [101, 102, 103, 1]
    assert store.settled == VClock({1: 103, 2: 1})


def test_rollback_spans_several_files() -> None:
    disk = new_disk()
    store = begun_at(disk, wal_max_size=1)
    store.write([slab(alone(101))])
    for lsn in (102, 103, 104):
        store.write([slab(alone(lsn, flags=SYNC))])
    store.take_back()
    assert store.vclock == VClock({1: 101})
    store.write([slab(alone(102))])
    assert lsns(disk) == [101, 102]


def test_reset_drops_all_files() -> None:
    disk = new_disk()
    store = begun_from_snapshot(disk)
    store.write([slab(alone(6))])
    store.begin_at(VClock({1: 100}), FACTS, [])
    assert lsns(disk) == []
    assert names(disk, ".snap") == []
    assert names(disk, ".definitions") == [100]
    assert store.manifest.snapshots == []
    store.write([slab(alone(101))])
    assert store.vclock == VClock({1: 101})


def test_spool_is_consistent_after_any_crash() -> None:
    """Whichever call is interrupted, the next start finds a prefix of the written rows that includes all rows reported
    durable.
    """
    for life in range(0, 6000, 37):
        disk = new_disk()
        store = begun_at(disk, wal_max_size=300)
        store.write([slab(alone(101))])
        durable = 101
        disk.life = life
        try:
            for lsn in range(102, 110):
                store.write([slab(define_space(lsn, 600 + lsn))])
                durable = lsn
                if lsn == 106:
                    store.collect(VClock({1: 105}))
        except Died:
            pass
        disk = disk.after_power_loss(Random(life))
        store = opened(disk, wal_max_size=300)
        there = lsns(disk)
        assert there == list(range(there[0], there[-1] + 1))
        assert there[-1] >= durable
        assert there[0] <= 106
        assert store.vclock == store.settled == VClock({1: there[-1]})
        assert spaces(disk, 0) >= {f"s{600 + lsn}" for lsn in range(102, store.earliest.get(1) + 1)}
