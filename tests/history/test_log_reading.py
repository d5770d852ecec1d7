"""Readings: the schema as of each row, settled rows only, gaps, damage and torn tails."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from flowstone.box.schema import UnknownSpace
from flowstone.history.files import find_logs
from flowstone.history.log_reading import Reading
from flowstone.history.selection import Selection
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack, unpack_body
from flowstone.iproto.row import Row
from flowstone.outside import production
from flowstone.replication.settled_position import SettledTracker
from flowstone.xlog import reader
from flowstone.xlog.errors import DamagedLog, LogGap
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import EndingKind, LogFile
from flowstone.xlog.transactions import group
from flowstone.xlog.writer import SnapWriter
from tests.history.logs import INSTANCE, SYNC_FLAGS, Log

RECORDED = sorted({path.parent for path in (Path(__file__).parent.parent / "vectors").glob("tarantool-*/**/*.xlog")})


def rows_of(reading: Reading) -> list[Row]:
    return [row for piece in reading.pieces() for row in piece.slab.rows(piece.rows)]


def names_by_lsn(reading: Reading, space_id: int) -> dict[int, Any]:
    """Return the definition of the space as of each of its rows."""
    found: dict[int, Any] = {}
    for piece in reading.pieces():
        space = piece.schema.get(space_id)
        for row in piece.slab.rows(piece.rows):
            found[row.lsn] = space and (space.name, space.field_names)
    return found


def test_each_row_is_read_with_the_schema_of_its_lsn(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "users", ("id", "unsigned"))
        first = log.insert(512, 1)
        log.insert(280, 512, 1, "people", "memtx", 0, {}, [{"name": "key", "type": "unsigned"}])
        second = log.insert(512, 2)
        log.drop_space(512)
        log.create_space(512, "other", ("code", "string"))
        third = log.insert(512, "a")
    found = names_by_lsn(Reading(production(), [log.path], selection=Selection(spaces=(512,))), 512)
    assert found == {first: ("users", ("id",)), second: ("people", ("key",)), third: ("other", ("code",))}


def test_single_log_is_read_with_the_schema_of_earlier_files(tmp_path: Path) -> None:
    with Log(tmp_path) as first:
        first.create_space(512, "users", ("id", "unsigned"))
        first.insert(512, 1)
    with Log(tmp_path, start=first.lsn) as second:
        lsn = second.insert(512, 2)
    assert names_by_lsn(Reading(production(), [second.path]), 512) == {lsn: ("users", ("id",))}


def test_error_about_an_unknown_space_lists_the_existing_ones(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "users", ("id", "unsigned"))
    with pytest.raises(UnknownSpace, match=r"'orders'.*known spaces: users"):
        rows_of(Reading(production(), [log.path], selection=Selection(spaces=("orders",))))


def test_space_dropped_before_the_end_is_found(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "users", ("id", "unsigned"))
        lsn = log.insert(512, 1)
        log.drop_space(512)
    rows = rows_of(Reading(production(), [log.path], selection=Selection(spaces=("users",))))
    assert [row.lsn for row in rows] == [lsn]


def test_missing_log_between_two_is_a_gap_unless_forced(tmp_path: Path) -> None:
    disk = production().disk
    log = Log(tmp_path)
    for _ in range(2):
        log.insert(512, log.lsn)
        log.writer = log.writer.rotate()
    log.insert(512, log.lsn)
    log.writer.close()
    paths = find_logs(disk, [str(tmp_path)])
    assert len(paths) == 3
    with pytest.raises(LogGap, match=r"\{1: 1\} and \{1: 2\}: LSN 2..2 of replica 1 missing"):
        rows_of(Reading(production(), [paths[0], paths[2]]))
    reading = Reading(production(), [paths[0], paths[2]], force=True)
    assert len(rows_of(reading)) == 2
    assert [gap.missing for gap in reading.report.gaps] == [((1, 2, 2),)]


def test_torn_log_before_another_log_is_a_gap(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.insert(512, 1)
    end = log.writer.size
    log.insert(512, 2)
    torn = Path(log.path)
    log.writer = log.writer.rotate()
    log.insert(512, 3)
    log.writer.close()
    torn.write_bytes(torn.read_bytes()[: end + 5])
    with pytest.raises(LogGap, match=r"LSN 2..2 of replica 1 missing"):
        rows_of(Reading(production(), [str(torn), log.path]))


def test_log_that_starts_after_its_snapshot_is_a_gap(tmp_path: Path) -> None:
    disk = production().disk
    with SnapWriter(disk, str(tmp_path), Meta(FileType.SNAP, INSTANCE, {1: 3}, version="2.11.9"), 1.0):
        pass
    with Log(tmp_path, start=50) as log:
        log.insert(512, 1)
    with pytest.raises(LogGap, match=r"LSN 4..50 of replica 1 missing"):
        rows_of(Reading(production(), find_logs(disk, [str(tmp_path)])))


def test_snapshot_names_the_owner_of_the_queue(tmp_path: Path) -> None:
    """A PROMOTE of an outdated term has no effect."""
    disk = production().disk
    with SnapWriter(disk, str(tmp_path), Meta(FileType.SNAP, INSTANCE, {1: 10}, version="2.11.9"), 1.0) as snapshot:
        snapshot.add_row(RequestType.RAFT_PROMOTE, pack({0x02: 1, 0x03: 10, 0x53: 5}))
    with Log(tmp_path, start=10) as log:
        kept = log.insert(512, 1, flags=SYNC_FLAGS)
        log.write((RequestType.RAFT_PROMOTE, {0x02: 2, 0x03: 0, 0x53: 4}))
        log.confirm(kept)
    reading = Reading(production(), find_logs(disk, [str(tmp_path)]), selection=Selection(spaces=(512,)), settled=True)
    assert [row.lsn for row in rows_of(reading)] == [kept]


def test_truncate_is_included_with_its_space_on_request(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "a", ("id", "unsigned"))
        log.create_space(513, "b", ("id", "unsigned"))
        truncate = log.write((RequestType.UPSERT, {0x10: 330, 0x28: (("+", 1, 1),), 0x21: (512, 1)}))
        log.write((RequestType.UPSERT, {0x10: 330, 0x28: (("+", 1, 1),), 0x21: (513, 1)}))
    for truncates, expected in ((True, [truncate]), (False, [])):
        selection = Selection(spaces=("a",), truncates=truncates)
        assert [row.lsn for row in rows_of(Reading(production(), [log.path], selection=selection))] == expected


def test_snapshot_before_the_logs_precedes_any_lsn(tmp_path: Path) -> None:
    disk = production().disk
    with SnapWriter(disk, str(tmp_path), Meta(FileType.SNAP, INSTANCE, {1: 3}, version="2.11.9"), 1.0) as snapshot:
        snapshot.add_tuples(512, [pack((number,)) for number in range(20)])
    with Log(tmp_path, start=3) as log:
        log.insert(512, 100)
    paths = find_logs(disk, [str(tmp_path)])
    from_four = Selection(from_lsn=4)
    assert [row.lsn for row in rows_of(Reading(production(), paths, selection=from_four))] == [4]
    assert len(rows_of(Reading(production(), paths[:1], selection=from_four))) == 16  # alone, by row number as in tt


def test_damage_in_a_file_read_for_definitions_is_reported(tmp_path: Path) -> None:
    with Log(tmp_path) as first:
        first.create_space(512, "users", ("id", "unsigned"))
    with Log(tmp_path, start=first.lsn) as second:
        second.insert(512, 1)
    content = bytearray(Path(first.path).read_bytes())
    content[content.index(b"users")] ^= 0xFF
    Path(first.path).write_bytes(content)
    reading = Reading(production(), [second.path])
    assert len(rows_of(reading)) == 1
    assert any(first.path in line and "definitions may be missing" in line for line in reading.report.warnings())


def test_rolled_back_rows_are_omitted_and_pending_rows_deferred(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "money", ("id", "unsigned"), is_sync=True)
        kept = log.insert(512, 1, flags=SYNC_FLAGS)
        verdict = log.confirm(kept)
        withdrawn = log.insert(512, 2, flags=SYNC_FLAGS)
        second = log.rollback(withdrawn)
        log.insert(512, 3, flags=SYNC_FLAGS)
        log.insert(513, 1, flags=SYNC_FLAGS & ~4)
    reading = Reading(production(), [log.path], settled=True)
    assert [row.lsn for row in rows_of(reading)] == [kept, verdict, second]
    assert (reading.report.rows_rolled_back, reading.report.rows_pending) == (1, 2)


def test_rolled_back_definition_has_no_effect(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.create_space(512, "users", ("id", "unsigned"))
        first = log.insert(512, 1, flags=SYNC_FLAGS)
        layout = [{"name": "other", "type": "unsigned"}]
        log.write((RequestType.REPLACE, {0x10: 280, 0x21: (512, 1, "renamed", "memtx", 0, {}, layout)}), flags=2)
        log.rollback(first)
        second = log.insert(512, 2)
    reading = Reading(production(), [log.path], selection=Selection(spaces=(512,)), settled=True)
    assert names_by_lsn(reading, 512) == {second: ("users", ("id",))}


def test_pending_transactions_survive_an_upgrade_of_the_server(tmp_path: Path) -> None:
    with Log(tmp_path, version="2.6.0") as old:
        old.create_space(512, "money", ("id", "unsigned"), is_sync=True)
        waiting = old.insert(512, 1)
    with Log(tmp_path, version="2.11.9", start=old.lsn) as new:
        new.confirm(waiting)
        after = new.insert(512, 2)
    paths = find_logs(production().disk, [str(tmp_path)])
    rows = rows_of(Reading(production(), paths, selection=Selection(spaces=("money",)), settled=True))
    assert [row.lsn for row in rows] == [waiting, after]


def test_old_log_with_an_undefined_space_cannot_be_settled(tmp_path: Path) -> None:
    with Log(tmp_path, version="2.6.0") as log:
        log.insert(512, 1)
    with pytest.raises(UnknownSpace, match="cannot tell whether rows of space 512 are settled"):
        rows_of(Reading(production(), [log.path], settled=True))


def test_old_logs_are_settled_by_their_schema(tmp_path: Path) -> None:
    with Log(tmp_path, version="2.6.0-0-g47aa4e01e") as log:
        log.create_space(512, "money", ("id", "unsigned"), is_sync=True)
        withdrawn = log.insert(512, 1)
        log.rollback(withdrawn)
        kept = log.insert(512, 2)
        log.confirm(kept)
    rows = rows_of(Reading(production(), [log.path], selection=Selection(spaces=("money",)), settled=True))
    assert [row.lsn for row in rows] == [kept]


@pytest.mark.parametrize("chunk_size", [64, 1 << 20], ids=["a block per chunk", "one chunk"])
@pytest.mark.parametrize("directory", RECORDED, ids=lambda path: "-".join(path.parts[-4:]))
def test_recorded_logs_are_settled_like_by_the_tracker_alone(
    directory: Path, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "CHUNK_SIZE", chunk_size)
    disk = production().disk
    logs = [path for path in find_logs(disk, [str(directory)]) if path.endswith(".xlog")]
    everything = Selection(show_system=True)
    read = rows_of(Reading(production(), logs, selection=everything, settled=True))
    by_schema = "tarantool-2.6" in str(directory)
    schema_of = {}
    for piece in Reading(production(), logs, selection=everything).pieces():
        for row in piece.slab.rows(piece.rows):
            schema_of[row.raw] = piece.schema
    tracker: SettledTracker[Any] = SettledTracker(
        is_synchronous=(lambda txn: any(touches(row, schema_of[row.raw]) for row in txn.rows)) if by_schema else None
    )
    expected: list[Row] = []
    for path in logs:
        with LogFile.open(disk, path) as log:
            for transaction in group(log.rows()):
                for decision in tracker.push(transaction):
                    expected.extend(decision.transaction.rows if decision.kept else ())
    assert [row.raw for row in read] == [row.raw for row in expected]


def touches(row: Row, schema: Any) -> bool:
    return bool(row.body) and unpack_body(row.body).get(0x10) in schema.synchronous


def test_end_of_a_torn_log_is_reported(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        log.insert(512, 1)
        end = log.writer.size
        log.insert(512, 2)
    content = Path(log.path).read_bytes()
    Path(log.path).write_bytes(content[: end + 5])
    reading = Reading(production(), [log.path])
    assert len(rows_of(reading)) == 1
    ending = reading.report.endings[log.path]
    assert (ending.kind, ending.offset, ending.lost) == (EndingKind.TORN, end, 5)


def test_damage_is_skipped_only_with_force_and_reported(tmp_path: Path) -> None:
    with Log(tmp_path) as log:
        starts = []
        for number in range(3):
            starts.append(log.writer.size)
            log.insert(512, number)
    content = bytearray(Path(log.path).read_bytes())
    content[starts[1] + 25] ^= 0xFF
    Path(log.path).write_bytes(content)
    with pytest.raises(DamagedLog, match=f"byte {starts[1]}"):
        rows_of(Reading(production(), [log.path]))
    reading = Reading(production(), [log.path], force=True)
    assert [row.lsn for row in rows_of(reading)] == [1, 3]
    assert [(skipped.offset, skipped.end) for skipped in reading.report.skipped] == [(starts[1], starts[2])]


def test_schema_changes_of_a_real_server_are_followed(tarantool: Any, tmp_path: Path) -> None:
    tarantool.run(
        """
        box.cfg{log='server.log'}
        local s = box.schema.space.create('a', {format={{'id', 'unsigned'}}})
        s:create_index('pk') s:insert{1}
        s:format({{'key', 'unsigned'}, {name='note', type='string', is_nullable=true}}) s:insert{2, 'x'}
        s:rename('b') s:insert{3}
        s:drop()
        s = box.schema.space.create('c', {id=512, format={{'code', 'string'}}})
        s:create_index('pk', {parts={1, 'string'}}) s:insert{'q'}
        box.snapshot() s:insert{'r'}
        os.exit(0)
        """,
        tmp_path / "server",
    )
    logs = [path for path in find_logs(production().disk, [str(tmp_path / "server")]) if path.endswith(".xlog")]
    expected = [("a", ("id",)), ("a", ("key", "note")), ("b", ("key", "note")), ("c", ("code",)), ("c", ("code",))]
    found = names_by_lsn(Reading(production(), logs, selection=Selection(spaces=(512,))), 512)
    assert list(found.values()) == expected
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "server", alone)
    last = names_by_lsn(Reading(production(), [str(alone / Path(logs[1]).name)]), 512)
    assert list(last.values()) == expected[-1:]
