"""The Parquet files of a lake's tables: writing, reading and look-ups, in the driver and in executors.

Each file is sorted by `_key`, and its name gives its key range, so that files without a given key are not opened. Files
of other writers (such as a compaction by Spark) have other names; their ranges are read from their footers. Nothing
here knows Delta's log.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Final
from urllib.parse import unquote
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq

from flowstone.lake.table_schema import IS_CURRENT, KEY, TUPLE, LakeError, prefixed, unprefixed

FILE_SIZE: Final = 32 << 20
"""Approximate size of a file's rows in memory. A merge reads and writes whole files, several at a time."""

ROW_GROUP_ROWS: Final = 1 << 17
RANGE_BYTES: Final = 40
"""Bytes of a key in a file's name: in a lake of several sets, 16 for the UUID and 24 for the key itself."""

TEXT_STATISTICS_SIZE: Final = 32
"""Longest text in Delta's statistics."""

_NAME: Final = re.compile(r"part-([0-9a-f]*)-([0-9a-f]*)-[0-9a-f]{32}\.parquet")
_LOCAL: Final = re.compile(r"(file://)?(/.*)")
LOOKED_UP: Final = pa.schema([pa.field("sort_key", pa.binary()), pa.field("tuple", pa.binary())])


@dataclass(frozen=True, slots=True)
class KeyRange:
    """First and last key, the last one cut to RANGE_BYTES; `last` is None if it is unknown."""

    first: bytes
    last: bytes | None

    def places(self, keys: SortedKeys) -> range:
        """Return the range of keys that may lie in it."""
        start = keys.place(self.first)
        return range(start, len(keys) if self.last is None else max(start, keys.place_behind(self.last)))


class SortedKeys:
    """Ascending keys without nulls, searchable by key."""

    def __init__(self, keys: pa.Array) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def place(self, key: bytes) -> int:
        """Return the place of the first key that is not below `key`."""
        return self._bisect(lambda each: each < key)

    def place_behind(self, last: bytes) -> int:
        """Return the place of the first key above `last`. Only the first RANGE_BYTES bytes of `last` are known."""
        return self._bisect(lambda each: each[:RANGE_BYTES] <= last)

    def _bisect(self, is_before: Any) -> int:
        low, high = 0, len(self.keys)
        while low < high:
            middle = (low + high) // 2
            if is_before(self.keys[middle].as_py()):
                low = middle + 1
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file in the table's log; `path` is relative to the table."""

    path: str
    size: int
    row_count: int
    is_current: bool | None = None
    """In a history table: whether the rows are current states."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that exists but is not part of any commit yet."""

    entry: FileEntry
    statistics: str


@dataclass(frozen=True)
class TableFiles:
    """Location of the files of one table, and access to them. Picklable."""

    path: str
    storage_options: dict[str, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return TableFiles, (self.path, self.storage_options)

    @cached_property
    def place(self) -> tuple[pyarrow.fs.FileSystem, str]:
        """The file system, and the prefix of the table's paths in it."""
        local = _LOCAL.fullmatch(self.path)
        if local:
            return pyarrow.fs.LocalFileSystem(use_mmap=True), local[2].rstrip("/") + "/"
        from deltalake.fs import DeltaStorageHandler

        handler = DeltaStorageHandler(self.path, self.storage_options or None)
        return pyarrow.fs.PyFileSystem(handler), ""

    def make_directory(self) -> None:
        """Create the directory before the first file is written; only local file systems need it."""
        system, root = self.place
        if isinstance(system, pyarrow.fs.LocalFileSystem):
            system.create_dir(root, recursive=True)

    def write(self, rows: pa.Table, is_current: bool | None = None) -> WrittenFile:
        """Write rows, which are in key order, as one file."""
        keys = rows.column(KEY.name)
        first, last = keys[0].as_py()[:RANGE_BYTES].hex(), keys[-1].as_py()[:RANGE_BYTES].hex()
        name = f"part-{first}-{last}-{uuid4().hex}.parquet"
        system, root = self.place
        collected: list[pq.FileMetaData] = []
        # Keys and tuples hardly repeat, so dictionaries do not pay off. Statistics of tuples are never used.
        pq.write_table(
            rows,
            root + name,
            filesystem=system,
            compression="zstd",
            compression_level=1,
            use_dictionary=False,
            column_encoding={KEY.name: "DELTA_BYTE_ARRAY"},
            write_statistics=[each for each in rows.schema.names if each != TUPLE.name],
            row_group_size=ROW_GROUP_ROWS,
            coerce_timestamps="us",
            metadata_collector=collected,
            store_schema=False,
        )
        size = system.get_file_info(root + name).size
        return WrittenFile(FileEntry(name, size, rows.num_rows, is_current), statistics_json(collected[0], rows.schema))

    def write_split(self, rows: pa.Table, is_current: bool | None = None, size: int = FILE_SIZE) -> list[WrittenFile]:
        """Write rows as several files if one would exceed `size` by more than half, else as one."""
        if not rows.num_rows:
            return []
        parts = 1 if rows.nbytes <= size * 3 // 2 else math.ceil(rows.nbytes / size)
        step = math.ceil(rows.num_rows / parts)
        return [self.write(rows.slice(at, step), is_current) for at in range(0, rows.num_rows, step)]

    def open(self, path: str) -> pq.ParquetFile:
        system, root = self.place
        try:
            return pq.ParquetFile(system.open_input_file(root + unquote(path)))
        except FileNotFoundError:
            raise LakeError(
                f"{self.path}: file {path} is missing, but the table's log lists it",
                hint="a vacuum with a short retention removed it; read a newer version",
            ) from None

    def read(self, path: str, schema: pa.Schema) -> pa.Table:
        """Return all rows of a file in key order, with exactly the columns of `schema`."""
        with self.open(path) as file:
            rows = file.read(use_threads=False)
        rows = rows.select(schema.names).cast(schema)
        return rows if _NAME.fullmatch(PurePosixPath(path).name) else rows.sort_by(KEY.name)

    def read_exact(self, path: str) -> Iterator[pa.RecordBatch]:
        """Yield the keys and tuples of a file in batches, in the file's order."""
        with self.open(path) as file:
            for batch in file.iter_batches(columns=[KEY.name, TUPLE.name], use_threads=False):
                yield _exact(pa.Table.from_batches([batch])).to_batches()[0] if len(batch) else batch

    def range_of(self, path: str) -> KeyRange:
        """Return the key range of a file, from its name or, for a file of another writer, from its footer."""
        named = _NAME.fullmatch(PurePosixPath(path).name)
        if named:
            return KeyRange(bytes.fromhex(named[1]), bytes.fromhex(named[2]))
        with self.open(path) as file:
            return _range_in_footer(file.metadata)

    def copy_to(self, other: TableFiles, path: str) -> None:
        """Copy a file under the same name into another table of the same lake."""
        (system, root), (other_system, other_root) = self.place, other.place
        name = unquote(path)
        pyarrow.fs.copy_files(
            root + name, other_root + name, source_filesystem=system, destination_filesystem=other_system
        )


@dataclass(frozen=True)
class PinnedTable:
    """The current rows of a table at one version, for look-ups in executors without Delta's log. Picklable."""

    files: TableFiles
    paths: tuple[str, ...]
    prefix: bytes = b""

    def lookup(self, keys: pa.Array, *, threads: int = 1) -> pa.Table:
        """Return `sort_key` and `tuple` of the given sort keys that exist in the table, in no particular order."""
        distinct = pc.unique(prefixed(self.prefix, keys)).drop_null()
        ordered = SortedKeys(distinct.take(pc.sort_indices(distinct)))
        wanted = [(path, places) for path in self.paths if (places := self.files.range_of(path).places(ordered))]
        with ThreadPoolExecutor(threads) as pool:
            found = list(pool.map(lambda each: self._lookup_in(each[0], ordered, each[1]), wanted))
        return pa.concat_tables([LOOKED_UP.empty_table(), *found])

    def scan(self) -> Iterator[pa.RecordBatch]:
        """Yield `sort_key` and `tuple` of all rows of the set in batches; each file is in key order."""
        for path in self.paths:
            for batch in self.files.read_exact(path):
                keys, tuples = batch.columns
                if self.prefix:
                    ours = pc.equal(pc.binary_slice(keys, 0, len(self.prefix)), pa.scalar(self.prefix, pa.binary()))
                    keys, tuples = unprefixed(len(self.prefix), keys.filter(ours)), tuples.filter(ours)
                yield pa.RecordBatch.from_arrays([keys, tuples], schema=LOOKED_UP)

    def _lookup_in(self, path: str, ordered: SortedKeys, places: range) -> pa.Table:
        keys = ordered.keys.slice(places.start, len(places))
        chosen = SortedKeys(keys)
        with self.files.open(path) as file:
            groups = [
                number
                for number in range(file.metadata.num_row_groups)
                if _group_range(file.metadata, number).places(chosen)
            ]
            rows = _exact(file.read_row_groups(groups, columns=[KEY.name, TUPLE.name], use_threads=False))
        rows = rows.filter(pc.is_in(rows.column(KEY.name), value_set=keys))
        found = unprefixed(len(self.prefix), rows.column(KEY.name))
        return pa.Table.from_arrays([found.cast(pa.binary()), rows.column(TUPLE.name)], schema=LOOKED_UP)


def _exact(rows: pa.Table) -> pa.Table:
    """Return keys and tuples as plain Arrow types: files by delta-rs have views, which no kernel supports."""
    plain = pa.schema([pa.field(KEY.name, pa.binary()), pa.field(TUPLE.name, pa.binary())])
    return rows.select(plain.names).cast(plain).combine_chunks()


# --- key ranges and statistics ------------------------------------------------------------------------------------


def _key_column(metadata: pq.FileMetaData) -> int:
    names = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    return names.index(KEY.name)


def _group_range(metadata: pq.FileMetaData, group: int) -> KeyRange:
    statistics = metadata.row_group(group).column(_key_column(metadata)).statistics
    if statistics is None or not statistics.has_min_max:
        return KeyRange(b"", None)
    # A writer may cut the greatest key and increment it, so that it is not below any key; its prefix is not below
    # either.
    return KeyRange(bytes(statistics.min), bytes(statistics.max)[:RANGE_BYTES])


def _range_in_footer(metadata: pq.FileMetaData) -> KeyRange:
    ranges = [_group_range(metadata, group) for group in range(metadata.num_row_groups)]
    lasts = [each.last for each in ranges if each.last is not None]
    return KeyRange(
        min((each.first for each in ranges), default=b""), max(lasts) if ranges and len(lasts) == len(ranges) else None
    )


def statistics_json(metadata: pq.FileMetaData, schema: pa.Schema) -> str:
    """Return Delta's statistics of a file, by which readers skip files."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for number, each in enumerate(schema):
        found = [metadata.row_group(group).column(number).statistics for group in range(metadata.num_row_groups)]
        if any(one is None or not one.has_null_count for one in found):
            continue
        nulls[each.name] = sum(one.null_count for one in found)
        bounded = [one for one in found if one.has_min_max]
        if bounded and (pa.types.is_integer(each.type) or pa.types.is_timestamp(each.type)):
            with suppress(OverflowError):  # outside of Python's years; a missing bound skips no file
                least[each.name] = _bound(min(one.min for one in bounded), up=False)
            with suppress(OverflowError):
                greatest[each.name] = _bound(max(one.max for one in bounded), up=True)
        elif bounded and pa.types.is_string(each.type):
            lower, upper = min(one.min for one in bounded), max(one.max for one in bounded)
            least[each.name] = lower[:TEXT_STATISTICS_SIZE]
            if len(upper) <= TEXT_STATISTICS_SIZE:
                greatest[each.name] = upper
    rows = sum(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
    return json.dumps({"numRecords": rows, "minValues": least, "maxValues": greatest, "nullCount": nulls})


def _bound(value: Any, *, up: bool) -> Any:
    """Return a bound as Delta writes it; times are in milliseconds, rounded so that they still bound the values."""
    if not hasattr(value, "isoformat"):
        return value
    if up and value.microsecond % 1000:
        value += timedelta(milliseconds=1)
    return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def milliseconds_now() -> int:
    """Return the current time for actions of Delta's log."""
    return int(time.time() * 1000)


def is_current_value(entry: FileEntry) -> dict[str, str | None]:
    """Return the file's partition values for Delta's log."""
    return {} if entry.is_current is None else {IS_CURRENT.name: "true" if entry.is_current else "false"}


def in_order(entries: Sequence[FileEntry], files: TableFiles) -> list[tuple[FileEntry, KeyRange]]:
    """Return the files and their key ranges, ordered by first key."""
    ranged = [(each, files.range_of(each.path)) for each in entries]
    return sorted(ranged, key=lambda pair: pair[1].first)
