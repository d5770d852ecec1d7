"""Tables of Tsurugi out of a data directory: their definitions and their rows, as of a durable epoch.

Takes no lock and changes nothing, so the directory of a running server can be read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from flowstone.errors import FlowstoneError
from flowstone.limestone.errors import LimestoneError
from flowstone.limestone.format import catalog, epoch_file, manifest
from flowstone.limestone.format.entry_table import (
    FULL,
    KEY_AT,
    KEY_END,
    TABLE_ROWS,
    VALUE_AT,
    VALUE_END,
    Bytes,
)
from flowstone.limestone.format.entry_table_kernels import walk_table
from flowstone.limestone.store.cursor import StoreSnapshot
from flowstone.limestone.store.offline_directory import no_directory
from flowstone.limestone.store.recovery import compacted_path, recover_live
from flowstone.limestone.tsurugi.definitions import METADATA_STORAGE, SqlTable
from flowstone.limestone.tsurugi.sql_schema import SqlSchema, read_schema
from flowstone.outside import Disk, production

if TYPE_CHECKING:
    import pyarrow

    from flowstone.limestone.tsurugi.row_columns import RowSpans

BATCH_ROWS = 1 << 16
"""Rows that are decoded at once: few enough for the caches of a processor."""


def tables(directory: str, *, epoch: int | None = None) -> Mapping[str, SqlTable]:
    """Return Tsurugi's tables in a data directory, by name.

    Tables whose definitions cannot be read are left out, with a warning to the logger "flowstone". Secondary indexes
    and Tsurugi's own tables are left out, too.

    Args:
        directory: A data directory; it may be in use.
        epoch: A durable epoch. By default, the newest.

    Returns:
        The tables, with their columns, types and primary keys.

    Raises:
        LimestoneError: The directory is none, or is damaged, or no longer has the state at `epoch`.

    Example:
        for table in flowstone.limestone.tables("/var/lib/tsurugi/log").values():
            print(table.name, [f"{column.name} {column.type}" for column in table.columns])
    """
    with snapshot_at(production().disk, directory, epoch) as snapshot:
        schema = schema_of(snapshot)
    for storage_id, error in schema.unreadable.items():
        logging.getLogger("flowstone").warning("storage %d has no table: %s", storage_id, error.message)
    return schema.tables


def read_table(
    directory: str,
    table: str,
    *,
    epoch: int | None = None,
    columns: Collection[str] | None = None,
) -> pyarrow.Table:
    """Return the rows of one of Tsurugi's tables as an Arrow table, in the order of the primary key.

    Args:
        directory: A data directory; it may be in use.
        table: Name of the table.
        epoch: A durable epoch. By default, the newest.
        columns: Names of the columns to return. By default, all, in declared order.

    Returns:
        The rows. Timestamps have microseconds; a BLOB or CLOB is the number of its blob.

    Raises:
        NoSuchTable: There is no such table at this epoch.
        BadMetadata: The definition of the table cannot be read.
        BadRow: A row does not fit the definition of the table.
        LimestoneError: The directory is none, or is damaged, or no longer has the state at `epoch`.
        FlowstoneError: A column does not exist, or pyarrow is not installed.

    Example:
        orders = flowstone.limestone.read_table("/var/lib/tsurugi/log", "orders")
    """
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise FlowstoneError(
            "read_table needs pyarrow, which is not installed", hint="pip install 'flowstone[arrow]'"
        ) from None

    from flowstone.limestone.tsurugi.row_columns import RowColumns

    with snapshot_at(production().disk, directory, epoch) as snapshot:
        found = schema_of(snapshot).table(table)
        decoder = RowColumns(found)
        chosen = list(decoder.schema.names if columns is None else columns)
        unknown = [name for name in chosen if name not in decoder.schema.names]
        if unknown:
            raise FlowstoneError(
                f"table {found.name!r} has no column {unknown[0]!r}",
                hint=f"its columns: {', '.join(decoder.schema.names)}",
            )
        batches = [decoder.decode_all(spans).select(chosen) for spans in row_spans(snapshot, found.storage_id)]
    return pyarrow.Table.from_batches(batches, pyarrow.schema([decoder.schema.field(name) for name in chosen]))


@contextmanager
def snapshot_at(disk: Disk, directory: str, epoch: int | None) -> Iterator[StoreSnapshot]:
    """Open the state of a directory at a durable epoch. Raise LimestoneError if it is not, or no longer, available."""
    if disk.kind(directory) != "directory" or manifest.read(disk, directory) is None:
        raise no_directory(directory)
    durable = epoch_file.read(disk, directory).durable
    if epoch is not None and epoch > durable:
        raise LimestoneError(f"{directory}: epoch {epoch} is not durable; the durable epoch is {durable}")
    if epoch is not None and compacted_path(disk, directory) is not None:
        listed = catalog.read(disk, directory)
        oldest = listed.max_epoch_id if listed is not None else durable
        if epoch < oldest:
            raise LimestoneError(
                f"{directory}: the state at epoch {epoch} was removed by compaction",
                hint=f"the oldest available state is at epoch {oldest}",
            )
    snapshot = recover_live(disk, directory, durable if epoch is None else epoch, dict).snapshot
    try:
        yield snapshot
    finally:
        snapshot.close()


def schema_of(snapshot: StoreSnapshot) -> SqlSchema:
    """Return the tables that a state defines."""
    return read_schema(entry.value for entry in snapshot.scan(METADATA_STORAGE))


def row_spans(snapshot: StoreSnapshot, storage_id: int) -> Iterator[RowSpans]:
    """Yield the rows of a storage, in key order."""
    from flowstone.limestone.tsurugi.row_columns import RowSpans

    table = np.empty((TABLE_ROWS, BATCH_ROWS), np.uint64)
    for part in snapshot.gathered(storage_id):
        buf: Bytes = part.data
        at, status = 0, FULL
        while status == FULL:
            count, at, status = walk_table(buf, at, table, 0)
            if count:
                lines = [table[line, :count].astype(np.int64) for line in (KEY_AT, KEY_END, VALUE_AT, VALUE_END)]
                yield RowSpans(buf, *lines)
