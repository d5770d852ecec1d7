"""Our own writers in place of libraries: merges of tables, JSON and YAML text, each beside the library.

The libraries get a head start: DeltaTable.merge a source table that is decoded already, the text writers rows that are
Python objects already. Text of ours that is not faster even so can go. Our merge need only be as fast: it keeps the
rows of each file in key order, which look-ups and compaction rely on; DeltaTable.merge does not.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from deltalake import DeltaTable

from bench.measure import Result, alternate, million_rows_per_second, seconds
from flowstone.history.log_reading import Piece, Reading
from flowstone.history.records import Records
from flowstone.lake.embedded_table import EmbeddedTable
from flowstone.lake.row_changes import RowChanges
from flowstone.lake.table_schema import LakeSchema
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.text.json_lines import json_text
from flowstone.text.yaml_rows import yaml_documents
from tests.spark.archives import WrittenArchive
from tests.spark.change_rows import insert, whole
from tests.spark.lake_rows_given import ORDERS, UUID, folded, packed

ROUNDS = 5
ROWS = 50_000
"""Rows of the log written as text."""

TABLE_ROWS = 1_000_000
CHANGES = 10_000
"""Random keys changed by one merge: a batch of a busy mirror."""

SEED = 20261118
MERGE_RATIO, TEXT_RATIO = 0.8, 2.0


def run(work: Path, rows: int = ROWS, table_rows: int = TABLE_ROWS, changes: int = CHANGES) -> Iterator[Result]:
    work.mkdir(parents=True, exist_ok=True)
    yield merge(work, table_rows, changes)
    pieces = list(_pieces(work / "archive", rows))
    yield json_lines(pieces, rows)
    yield yaml_text(pieces, rows)


def merge(work: Path, rows: int, changes: int) -> Result:
    """Compare EmbeddedTable.merge with DeltaTable.merge: the same changes to two equal tables."""
    ours, theirs = (_table(work / name, rows) for name in ("ours", "theirs"))
    chance = random.Random(SEED)
    rounds = [sorted(chance.sample(range(rows), min(changes, rows))) for _ in range(ROUNDS)]
    batches = [folded({key: packed(key, f"round {n}", n / 2) for key in keys}) for n, keys in enumerate(rounds)]
    sources = [
        (each := RowChanges.of(batch, theirs.schema.prefix(UUID))).upserts(theirs.schema, 0, len(each.keys))
        for batch in batches
    ]
    their_table = DeltaTable(theirs.path)
    mine, libraries = iter(enumerate(batches)), iter(sources)

    def by_us() -> None:
        number, batch = next(mine)
        ours.merge(batch, ORDERS, VClock({1: rows + number + 1}), UUID)

    def by_library() -> None:
        _delta_merge(their_table, next(libraries))

    taken = alternate(ROUNDS, partial(seconds, by_us), partial(seconds, by_library))
    _check_equal(ours.path, theirs.path)
    what = f"merge {changes / 1000:g} k random keys into a table of {rows / 1e6:g} M rows"
    return _compared(what, "DeltaTable.merge", changes, taken[0], taken[1], MERGE_RATIO)


def _table(path: Path, rows: int) -> EmbeddedTable:
    table = EmbeddedTable.create(str(path), LakeSchema(ORDERS, (UUID,)), {UUID: VClock()}, {})
    states = folded({key: packed(key, f"name {key}", key / 2) for key in range(rows)})
    table.merge(states, ORDERS, VClock({1: rows}), UUID)
    return table


def in_key_order(table: DeltaTable) -> bool:
    """Return True if the rows of each file are in key order."""
    for path in table.file_uris():
        keys = pq.read_table(path, columns=["_key"]).column(0).to_pylist()
        if keys != sorted(keys):
            return False
    return True


def _delta_merge(table: DeltaTable, source: pa.Table) -> None:
    merger = table.merge(source, "t._key = s._key", source_alias="s", target_alias="t")
    merger.when_matched_update_all().when_not_matched_insert_all().execute()


def _check_equal(one: str, other: str) -> None:
    tables = [DeltaTable(path).to_pyarrow_table().sort_by("_key") for path in (one, other)]
    if not tables[0].equals(tables[1]):
        raise RuntimeError("the two merges differ")


def _pieces(directory: Path, rows: int) -> Iterator[Piece]:
    archive = WrittenArchive(production().disk, str(directory))
    archive.define_orders()
    archive.write(*(whole(insert(3 + number, number, f"name {number}")) for number in range(rows)))
    archive.save()
    (log,) = {each.path for each in _slices(directory)}
    return Reading(production(), [log], workers=0).pieces()


def _slices(directory: Path) -> list[Any]:
    index = ArchiveIndex.open(production().disk, str(directory))
    return list(index.slices(VClock(), index.settled))


def json_lines(pieces: list[Piece], rows: int) -> Result:
    """Compare our JSON lines with msgspec's encoder, the fastest known to us."""
    values = [json.loads(line) for piece in pieces for line in bytes(json_text(piece)).splitlines()]
    encode = msgspec.json.Encoder().encode_lines

    def by_us() -> None:
        for piece in pieces:
            json_text(piece)

    return _text("JSON lines of log rows", "msgspec, of Python objects", rows, by_us, lambda: encode(values))


def yaml_text(pieces: list[Piece], rows: int) -> Result:
    """Compare our YAML documents with PyYAML's emitter in C."""
    text = "".join(yaml_documents(Records(pieces)))
    values = list(yaml.load_all(text, yaml.CSafeLoader))

    def by_us() -> None:
        for _ in yaml_documents(Records(pieces)):
            pass

    def by_library() -> None:
        yaml.dump_all(values, Dumper=yaml.CSafeDumper, sort_keys=False)

    return _text("YAML documents of log rows", "PyYAML in C, of Python objects", rows, by_us, by_library)


def _text(what: str, name: str, rows: int, ours: Callable[[], object], theirs: Callable[[], object]) -> Result:
    ours()  # warm: kernels loaded
    return _compared(what, name, rows, *alternate(ROUNDS, partial(seconds, ours), partial(seconds, theirs)))


def _compared(what: str, name: str, rows: int, ours: float, theirs: float, least: float = TEXT_RATIO) -> Result:
    rate = million_rows_per_second
    ratio = theirs / ours
    return Result(what, rate(rows, ours), f"{name}: {rate(rows, theirs)}", ratio, f"≥ {least:g}", ratio >= least)
