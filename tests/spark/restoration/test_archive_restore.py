"""Restored data: a snapshot in the order and with the rows of a real one, tables, or no files at all."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from flowstone.box.ddl import functions as ddl
from flowstone.box.engine import statements
from flowstone.cli import run
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.msgpack import pack, unpack_body
from flowstone.iproto.row import Row
from flowstone.outside.disk import SystemDisk
from flowstone.replication.limbo.control_rows import Promote, RaftState, decode_control
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.state_frames import STATE
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.restoration import archive_restore
from flowstone.spark.restoration.archive_restore import (
    OutputTaken,
    VinylSpaces,
    _refuse_vinyl,
    check_output,
    destination,
    encode_tuples,
    restore_archive,
)
from flowstone.xlog.errors import WriteFailed
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import LogFile
from flowstone.xlog.writer import SnapWriter
from tests.box.spaces import definition, on
from tests.node.archived_rows import INSTANCE
from tests.spark.box_archive import BoxArchive
from tests.spark.change_rows import UUID
from tests.spark.fold.test_state_frames import put, step

SYSTEM_END = 512


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> BoxArchive:
    made = BoxArchive(tmp_path_factory.mktemp("restore") / "archive")
    made.commit(step(ddl.create_space, "orders", format=[("id", "unsigned"), ("name", "string")]))
    made.commit(step(ddl.create_index, "orders", "pk", parts=[1, "unsigned"]))
    made.commit(step(ddl.create_space, "numbered"), step(ddl.create_index, "numbered", "pk", sequence=True))
    made.commit(*(put("orders", number, f"name {number}") for number in range(300)))
    made.commit(lambda txn: statements.insert(txn, txn.space("numbered"), pack((None, "one"))))
    made.commit(lambda txn: statements.insert(txn, txn.space("numbered"), pack((40, "forty"))))
    made.commit(step(ddl.truncate, "orders"), put("orders", 7, "seven"))
    made.commit(put("orders", 8, "eight"))
    made.save()
    return made


@pytest.fixture
def index(archive: BoxArchive) -> ArchiveIndex:
    return ArchiveIndex.open(SystemDisk(), archive.directory)


def rows_of(path: Path) -> tuple[Meta, list[Row]]:
    with LogFile.open(SystemDisk(), str(path)) as log:
        return log.meta, [row for slab in log.slabs() for row in slab.rows(range(len(slab)))]  # type: ignore[arg-type]


def test_all_formats_are_restored_at_once(
    spark: SparkSession, archive: BoxArchive, index: ArchiveIndex, tmp_path: Path
) -> None:
    position, out = archive.position, tmp_path / "out"
    told: list[str] = []
    found = restore_archive(spark, index, position, str(out), formats=("snap", "delta", "parquet"), tell=told.append)
    assert told
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == ["delta", "parquet", "snap"]
    assert {each.name: each.row_count for each in found.spaces if each.id >= SYSTEM_END} == {"orders": 2, "numbered": 2}
    assert found.notes == ()
    _check_snapshot(archive, Path(found.files["snap"]))
    orders = [{"id": 7, "name": "seven"}, {"id": 8, "name": "eight"}]
    (delta,) = DeltaTable(out / "delta" / "orders").to_pyarrow_table(columns=["id", "name"]).sort_by("id").to_batches()
    assert delta.to_pylist() == orders
    parquet = pq.read_table(out / "parquet" / "orders").sort_by("id").to_pylist()
    assert parquet == [{**row, "_extra": None} for row in orders]


def _check_snapshot(archive: BoxArchive, path: Path) -> None:
    meta, rows = rows_of(path)
    assert path.name == f"{archive.lsn:020d}.snap"
    assert (meta.instance_uuid, meta.vclock, meta.version) == (INSTANCE, {1: archive.lsn}, "2.11.9")
    assert [row.lsn for row in rows] == list(range(len(rows)))
    assert {row.timestamp for row in rows} == {100.0 + archive.lsn}
    tuples = [
        (request[0x10], pack(request[0x21])) for row in rows if (request := unpack_body(row.body)) and row.type == 2
    ]
    held = dict(archive.held[archive.lsn])
    # Only snapshots contain the values to which inserts advanced the sequences.
    held[285] = [pack((1, 40))]
    assert tuples == [(space_id, raw) for space_id in sorted(held) for raw in held[space_id]]
    states = [number for number, row in enumerate(rows) if row.type != RequestType.INSERT]
    first_of_users = next(number for number, row in enumerate(rows) if unpack_body(row.body).get(0x10, 0) >= SYSTEM_END)
    assert states == [first_of_users - 2, first_of_users - 1]
    raft, promote = (rows[number] for number in states)
    assert (raft.type, raft.group_id, promote.type) == (RequestType.RAFT, GROUP_LOCAL, RequestType.RAFT_PROMOTE)
    assert decode_control(raft.type, raft.body) == RaftState(term=1)
    assert decode_control(promote.type, promote.body) == Promote(0, 0, 0, VClock())


def test_restore_command_writes_a_snapshot(
    spark: SparkSession, archive: BoxArchive, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lsn = archive.lsn - 1  # after the truncation and the later rows of its transaction
    arguments = ["restore", archive.directory, "--to", str(lsn), "--out", str(tmp_path / "out"), "--json"]
    assert run(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["position"] == {"1": lsn}
    assert told["files"] == {"snap": str(tmp_path / "out" / f"{lsn:020d}.snap")}
    assert told["replicaset_uuid"] == UUID
    assert {"id": 512, "name": "orders", "rows": 1} in told["spaces"]
    _, rows = rows_of(Path(told["files"]["snap"]))
    # The snapshot also has two states.
    assert sum(each["rows"] for each in told["spaces"]) == told["rows"] == len(rows) - 2
    assert run(arguments) == 2
    assert "is not empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("to", "has_manifest", "notes"),
    [
        ("newest", True, []),
        ("newest", False, []),
        ("1970-01-01T12:00:00Z", False, ["rows written between then and 1970-01-01T12:00:00"]),
    ],
)
def test_restore_command_accepts_the_end_of_a_log(
    spark: SparkSession,
    archive: BoxArchive,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    to: str,
    has_manifest: bool,
    notes: list[str],
) -> None:
    """A plain directory does not record until when it was written: the command reports that it uses the end
    of the log.
    """
    directory = shutil.copytree(archive.directory, tmp_path / "logs")
    if not has_manifest:
        (directory / "manifest.json").unlink()
    assert run(["restore", str(directory), "--to", to, "--out", str(tmp_path / "out"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["position"] == {"1": archive.lsn}
    assert len(told["notes"]) == len(notes)
    assert all(part in note for part, note in zip(notes, told["notes"], strict=True))


def test_failed_restore_leaves_no_files(
    spark: SparkSession, index: ArchiveIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(SnapWriter):
        def add_blocks(self, blocks: bytes, row_count: int) -> None:
            raise WriteFailed(self.path, 0, OSError(28, "No space left on device"), is_usable=False)

    monkeypatch.setattr(archive_restore, "SnapWriter", FullDisk)
    with pytest.raises(WriteFailed, match="No space left"):
        restore_archive(spark, index, index.settled, str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


# --- without Spark ------------------------------------------------------------------------------------------------


def test_output_must_be_new_or_empty(tmp_path: Path) -> None:
    check_output(str(tmp_path / "new"))
    check_output(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(OutputTaken, match="is not empty"):
        check_output(str(tmp_path))
    with pytest.raises(OutputTaken, match="is not a directory"):
        check_output(str(tmp_path / "file"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    with pytest.raises(OutputTaken, match="is a symbolic link and cannot be replaced by a rename"):
        check_output(str(tmp_path / "link"))


def test_output_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    with destination(SystemDisk(), str(out)) as unfinished:
        (Path(unfinished) / "file").touch()
        assert not out.exists()
        with pytest.raises(OutputTaken, match="another process"), destination(SystemDisk(), str(out)):
            pass
    assert [path.name for path in out.iterdir()] == ["file"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty directory
    (tmp_path / "out.inprogress" / "delta").mkdir(parents=True)
    (tmp_path / "out.inprogress" / "00000000000000000007.snap.inprogress").touch()
    with destination(SystemDisk(), str(out)) as unfinished:
        assert list(Path(unfinished).iterdir()) == []
    assert list(tmp_path.iterdir()) == [out]


def test_interrupted_restore_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), destination(SystemDisk(), str(tmp_path / "out")):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_vinyl_spaces_are_refused_by_name() -> None:
    plain, vinyl = definition(512, on("0:unsigned")), definition(513, on("0:unsigned"), name="cold", engine="vinyl")
    _refuse_vinyl([plain])
    with pytest.raises(VinylSpaces, match=r"cold.*--format delta"):
        _refuse_vinyl([plain, vinyl])


@pytest.mark.parametrize("size", [1, 30, 5000])
def test_snapshot_blocks_equal_those_of_the_writer(tmp_path: Path, size: int) -> None:
    """LSNs continue, local rows are marked, and blocks are complete across the boundaries of batches and spaces."""
    tuples = [(512 + (number > 700), pack((number, "x" * size))) for number in range(1000)]
    columns = ([space for space, _ in tuples], [b"key"] * len(tuples), [raw for _, raw in tuples])
    arrays = [pa.array(column, field.type) for column, field in zip(columns, STATE, strict=True)]
    batches = pa.Table.from_arrays(arrays, schema=STATE).to_batches(max_chunksize=333)
    meta = Meta(FileType.SNAP, INSTANCE, {1: 5})
    found: dict[str, list[Any]] = {}
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        with SnapWriter(SystemDisk(), str(tmp_path / name), meta, 9.0) as writer:
            writer.add_tuples(280, [pack((1,))])
            if name == "ours":
                for batch in encode_tuples(1, frozenset((513,)), 9.0, batches):
                    (made,) = batch.to_pylist()
                    writer.add_blocks(made["blocks"], made["row_count"])
            else:
                for space, raw in tuples:
                    writer.add_tuples(space, [raw], GROUP_LOCAL if space == 513 else 0)
        assert writer.row_count == 1001
        found[name] = rows_of(Path(writer.path))[1]
    assert found["ours"] == found["theirs"]
