"""Source and writer `tarantool`: the current rows of a live server, its settled changes as a stream, and writes.

A batch is one consistent snapshot of each replica set, which a task receives and decodes on the fly, or all rows of one
space by SELECT. Filters are left to Spark: its releases 4.2.0, 4.2.1 and 4.3.0 reuse the filters pushed to one scan
of a frame for its other scans, which then miss rows. Imports pyspark; streams and writers have their own modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from flowstone.archive.received_snapshot import replicaset_uuid_in
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import Schema, SchemaTracker
from flowstone.box.system import FIRST_USER_SPACE_ID, SCHEMA_SPACE_IDS
from flowstone.columns.tuple_slabs import slab_of_tuples
from flowstone.history.secrets import USER_SPACES, hidden_tuple, without_secrets
from flowstone.iproto import scan
from flowstone.iproto.slab import Slab
from flowstone.iproto.uri import Uri
from flowstone.spark.sources.options import TarantoolOptions, tarantool_options, writer_options
from flowstone.spark.sources.state_contract import REPLICASET_UUID, FormatDiffers, StateContract
from flowstone.spark.sources.tarantool.index_scan import can_walk, scan_space
from flowstone.spark.sources.tarantool.live_node import CannotUse, LiveDefinitions, definitions
from flowstone.spark.sources.tarantool.live_snapshot import snapshot_slabs
from flowstone.spark.worker_errors import clear_errors

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from flowstone.spark.sources.tarantool.stream import TarantoolStreamReader
    from flowstone.spark.sources.tarantool.writer import TarantoolStreamWriter, TarantoolWriter


@dataclass
class ServerStatePart(InputPartition):
    """The input of one task: the rows of one replica set."""

    members: tuple[Uri, ...]
    contract: StateContract


class TarantoolSource(DataSource):
    """A live Tarantool server or Flowstone node.

    Options of a batch: `uri` (required): `,` separates members of a replica set, `;` separates replica sets; `space`: a
    name or an id, by default all user spaces; `readMode`: snapshot (default) or select (one space, in pages of its
    primary key); `columns`, `unsignedAs`, `decimalScale`, `stringsAs`, `showSystem`, `showSecrets`. A stream has the
    options of `tarantool_stream`; `spoolLocation` marks it as a stream. A writer has `uri`, `space` and `onConflict`.
    docs/reference/spark.md describes all of them.
    """

    @classmethod
    def name(cls) -> str:
        return "tarantool"

    @clear_errors()
    def schema(self) -> str:
        options = tarantool_options(self.options, streaming=None)
        if options.spool_location is not None:
            from flowstone.spark.sources.tarantool.stream import stream_schema

            return stream_schema(options)
        return _contracts(options)[0][1].spark_schema

    @clear_errors()
    def reader(self, schema: StructType) -> TarantoolReader:
        options = tarantool_options(self.options)
        return TarantoolReader(options)

    @clear_errors()
    def streamReader(self, schema: StructType) -> TarantoolStreamReader:  # noqa: N802
        from flowstone.spark.sources.tarantool.stream import TarantoolStreamReader

        return TarantoolStreamReader(tarantool_options(self.options, streaming=True))

    @clear_errors()
    def writer(self, schema: StructType, overwrite: bool) -> TarantoolWriter:
        from flowstone.spark.sources.tarantool.writer import TarantoolWriter

        return TarantoolWriter(writer_options(self.options), schema, overwrite)

    @clear_errors()
    def streamWriter(self, schema: StructType, overwrite: bool) -> TarantoolStreamWriter:  # noqa: N802
        from flowstone.spark.sources.tarantool.writer import TarantoolStreamWriter

        return TarantoolStreamWriter(writer_options(self.options), schema, overwrite)


class TarantoolReader(DataSourceReader):
    """Reads the rows of one space or of all: at one moment (snapshot), or one space page by page (select)."""

    def __init__(self, options: TarantoolOptions) -> None:
        self._options = options
        self._contracts = _contracts(options)

    @clear_errors()
    def partitions(self) -> Sequence[InputPartition]:
        for _, contract in self._contracts:
            if contract.space is not None:
                _check_readable(contract.space, self._options.read_mode)
        return [ServerStatePart(members, contract) for members, contract in self._contracts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ServerStatePart)
        members, contract = partition.members, partition.contract
        read = read_snapshot if self._options.read_mode == "snapshot" else read_pages
        with clear_errors():
            yield from read(members, contract, show_secrets=self._options.changes.show_secrets)


def _check_readable(space: SpaceDefinition, read_mode: str) -> None:
    if read_mode == "snapshot" and (space.is_local or space.is_temporary or space.engine == "sysview"):
        raise CannotUse(
            f"space {space.name!r} is local, temporary or a system view: snapshots do not have its rows",
            hint="read it with readMode=select",
        )
    if read_mode == "select" and not can_walk(space.primary_key):
        raise CannotUse(
            f"space {space.name!r} cannot be read with SELECT: its primary key is not a tree index on plain fields",
            hint="read it with readMode=snapshot",
        )


def read_snapshot(
    members: Sequence[Uri], contract: StateContract, *, show_secrets: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a snapshot that the contract selects. Rows of other spaces are skipped by their headers."""
    tracker = SchemaTracker()
    is_checked = False
    for slab in snapshot_slabs(members):
        space_ids = slab.cells[scan.SPACE_ID]
        uuid = replicaset_uuid_in(slab) if not contract.replicaset_uuid else None
        if uuid is not None:
            contract = replace(contract, replicaset_uuid=str(uuid))
        for row in slab.rows(np.flatnonzero(np.isin(space_ids, (*SCHEMA_SPACE_IDS,)))):
            tracker.apply(row.type, row.body)
        if contract.space is not None:
            rows = np.flatnonzero(space_ids == contract.space.id)
        else:
            rows = np.flatnonzero(space_ids >= (0 if contract.show_system else FIRST_USER_SPACE_ID))
        if not len(rows):
            continue
        if contract.space is not None and not is_checked and contract.space.id >= FIRST_USER_SPACE_ID:
            _check_shape(contract.space, tracker.schema)
            is_checked = True
        shown = slab if show_secrets else without_secrets(slab)
        yield contract.batch(shown, rows, tracker.schema)


def read_pages(
    members: Sequence[Uri], contract: StateContract, *, show_secrets: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the contract's space, in pages of its primary key."""
    space = contract.space
    assert space is not None
    for slab in scan_space(members, space):
        if space.id in USER_SPACES and not show_secrets:
            slab = _hidden(slab, space)
        yield contract.batch(slab, np.arange(len(slab), dtype=np.int64), Schema({space.id: space}))


def _hidden(slab: Slab, space: SpaceDefinition) -> Slab:
    spans = zip(slab.cells[scan.TUPLE_AT].tolist(), slab.cells[scan.TUPLE_END].tolist(), strict=True)
    tuples = [hidden_tuple(slab.buf[at:end].tobytes()) for at, end in spans]
    return slab_of_tuples(pa.array(tuples, pa.binary()), space.id, slab.path)


def _check_shape(space: SpaceDefinition, schema: Schema) -> None:
    now = schema.get(space.id)
    if now is None or now.shape != space.shape:
        raise FormatDiffers(
            f"format of space {space.name!r} has changed since the query was planned",
            hint="run the query again to get the new columns",
        )


def _contracts(options: TarantoolOptions) -> list[tuple[tuple[Uri, ...], StateContract]]:
    """Return the contract of each replica set. Raise an error if the space or its columns cannot be read."""
    changes = options.changes
    found: list[tuple[tuple[Uri, ...], StateContract]] = []
    first: LiveDefinitions | None = None
    for members in options.members:
        there = definitions(members)
        space = there.space(changes.space) if changes.space is not None else None
        if space is not None and space.is_view:
            raise CannotUse(f"{space.name!r} at {there.address} is an SQL view", hint="read the underlying spaces")
        contract = StateContract(there.replicaset_uuid, space, changes.columns, changes.wanted, changes.show_system)
        _check_uuid(contract, options, there)
        if first is not None and contract.schema != found[0][1].schema:
            raise FormatDiffers(
                f"columns of space {changes.space!r} differ between {there.address} and {first.address}",
                hint="use the same format everywhere, or read each replica set separately",
            )
        first = first or there
        found.append((members, contract))
    return found


def _check_uuid(contract: StateContract, options: TarantoolOptions, there: LiveDefinitions) -> None:
    """Raise CannotUse if the UUID is selected but unknown: a snapshot contains it, a SELECT does not."""
    is_wanted = REPLICASET_UUID.name in contract.schema.names
    if is_wanted and not there.replicaset_uuid and options.read_mode == "select":
        raise CannotUse(
            f"user {there.user or 'guest'!r} cannot read the replica set UUID from _schema at {there.address}",
            hint=f"omit column {REPLICASET_UUID.name}, or grant the user the right to read _schema",
        )
