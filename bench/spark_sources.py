"""Source `xlog` beside Spark's own Parquet reader, and beside a source of ready Python tuples, over the same rows.

All three end in a noop sink, in one session on this machine. `python -m bench.spark_sources --rows 500000` is a short
run. `--profile` profiles an executor instead, without Spark.
"""

from __future__ import annotations

import argparse
import cProfile
import itertools
import pstats
import struct
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from bench.measure import Result, alternate, million_rows_per_second, seconds
from flowstone.archive.archive_log import ArchiveLog
from flowstone.archive.manifest import ArchiveManifest, save
from flowstone.archive.settled_tracker import Verdicts
from flowstone.box.definitions import FieldDefinition, IndexDefinition, IndexPart, SpaceDefinition
from flowstone.columns.change_contract import ChangeContract
from flowstone.iproto.msgpack import pack
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark import register
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.sources.change_batches import read_slice
from flowstone.spark.spark_session import session
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.writer import SnapWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CORES: Final = 2
ROWS: Final = 5_000_000
ROUNDS: Final = 3
PARQUET_RATIO, TUPLES_RATIO = 0.4, 4.0
BLOCK_ROWS: Final = 20_000
UUID: Final = "aaaaaaaa-0000-4000-8000-000000000001"
INSTANCE: Final = "11111111-2222-3333-4444-555555555555"
FIELDS: Final = (
    ("id", "unsigned"),
    ("name", "string"),
    ("amount", "unsigned"),
    ("flag", "boolean"),
    ("note", "string"),
)


def write_archive(directory: str, rows: int) -> None:
    """Write an archive of that many INSERTs, each a transaction of its own, as on a busy server."""
    disk = production().disk
    disk.make_directory(directory)
    SnapWriter(disk, directory, Meta(FileType.SNAP, INSTANCE, {}, version="2.11.9"), 1.0).finish()
    verdicts = Verdicts()
    verdicts.start(VClock())
    log = ArchiveLog(disk, directory, instance_uuid=INSTANCE, vclock=VClock(), verdicts=verdicts, version="2.11.9")
    layout = [{"name": name, "type": kind} for name, kind in FIELDS]
    definition: tuple[Any, ...] = (512, 1, "orders", "memtx", len(FIELDS), {}, layout)
    key = (512, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]])
    log.write(_row(1, 280, pack(definition)) + _row(2, 288, pack(key)))
    for first in range(0, rows, BLOCK_ROWS):
        log.write(b"".join(_order(number) for number in range(first, min(first + BLOCK_ROWS, rows))))
    log.close()
    position = log.vclock.to_mapping()
    save(disk, directory, ArchiveManifest(UUID, INSTANCE, UUID, position=position, settled=position))


def _order(number: int) -> bytes:
    flag = b"\xc3" if number % 2 == 0 else b"\xc2"
    name, note = f"customer {number}".encode(), f"note {number % 1000}".encode()
    fields = (
        b"\x95\xce", number.to_bytes(4, "big"), bytes((0xA0 + len(name),)), name,
        b"\xcd", (number * 7 % 1000).to_bytes(2, "big"), flag, bytes((0xA0 + len(note),)), note,
    )  # fmt: skip
    return _row(number + 3, 512, b"".join(fields), 1.7e9 + number / 1e5)


def _row(lsn: int, space_id: int, values: bytes, at: float = 1.7e9) -> bytes:
    header = b"\x84\x00\x02\x02\x01\x03\xcf" + struct.pack(">Q", lsn) + b"\x04\xcb" + struct.pack(">d", at)
    return header + b"\x82\x10\xcd" + struct.pack(">H", space_id) + b"\x21" + values


def run(work: Path, rows: int = ROWS) -> Iterator[Result]:
    """Rounds of all three, interleaved."""
    work.mkdir(parents=True, exist_ok=True)
    archive, parquet = str(work / "archive"), str(work / "parquet")
    write_archive(archive, rows)
    with session("bench", master=f"local[{CORES}]", conf={"spark.python.unix.domain.socket.enabled": "true"}) as spark:
        register(spark)
        spark.dataSource.register(TupleSource)
        from_xlog = spark.read.format("xlog").option("space", "orders")
        from_xlog.load(archive).write.parquet(parquet)
        taken = alternate(
            ROUNDS,
            lambda: seconds(lambda: _drain(from_xlog.load(archive))),
            lambda: seconds(lambda: _drain(spark.read.parquet(parquet))),
            lambda: seconds(lambda: _drain(spark.read.format("tuples").option("rows", rows).load())),
        )
    ours, beside, tuples = taken
    speed = million_rows_per_second(rows, ours)
    what = f"Spark: changes of an archive into a noop sink, {CORES} cores"
    for peer, name, promised in (
        (beside, "Parquet", PARQUET_RATIO),
        (tuples, "a source of Python tuples", TUPLES_RATIO),
    ):
        ratio = peer / ours
        text = f"{name}: {million_rows_per_second(rows, peer)}"
        yield Result(what, speed, text, ratio, f"≥ {promised}×", ratio >= promised)


def _drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


class TupleSource(DataSource):
    """A source with rows as ready Python tuples, and the columns of `xlog`."""

    @classmethod
    def name(cls) -> str:
        return "tuples"

    def schema(self) -> str:
        return _contract().spark_schema

    def reader(self, schema: Any) -> TupleReader:
        return TupleReader(int(self.options["rows"]))


class TupleReader(DataSourceReader):
    def __init__(self, rows: int) -> None:
        self._rows = rows

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(number) for number in range(CORES)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        at = datetime.fromtimestamp(1.7e9, UTC)
        leading = ("insert", 7, at, 1, 7, 7, "orders", UUID)
        fields = (7, "customer 4711", 49, True, "note 7", None)
        row = (*leading, *fields, None, None, None, None, 0, 0, 512)
        return itertools.repeat(row, self._rows // CORES)


def _contract() -> ChangeContract:
    fields = tuple(FieldDefinition(name, kind) for name, kind in FIELDS)
    key = IndexDefinition(512, 0, "pk", "tree", True, (IndexPart(0, "unsigned"),))
    return ChangeContract(UUID, SpaceDefinition(512, "orders", fields=fields, indexes=(key,)))


def profile(rows: int) -> None:
    """Profile the work of an executor in this process: processor time per million rows, by function."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/archive"
        write_archive(path, rows)
        index = ArchiveIndex.open(production().disk, path)
        space = index.definition_at(index.settled, "orders")
        contract = ChangeContract(UUID, space)
        profiler = cProfile.Profile()
        for repeat in range(3):
            begun = time.process_time()
            if repeat == 2:
                profiler.enable()
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, contract.schema) as writer:
                for part in index.slices(VClock({1: 2}), index.settled):
                    for batch in read_slice(index.disk, part, VClock({1: 2}), index.settled, contract):
                        writer.write_batch(batch)
            taken = time.process_time() - begun
            profiler.disable()
            size = len(sink.getvalue())
            print(f"{taken / rows * 1e6:.3f} s of processor time per million rows, {size / rows:.0f} bytes each")
        pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


def main() -> None:
    from bench.__main__ import line

    parser = argparse.ArgumentParser(prog="python -m bench.spark_sources", description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the archive (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="where an executor's time goes")
    options = parser.parse_args()
    if options.profile:
        profile(options.rows)
        return
    with tempfile.TemporaryDirectory(prefix="flowstone-bench-") as work:
        for result in run(Path(work), options.rows):
            print(line(result), flush=True)


if __name__ == "__main__":
    main()
