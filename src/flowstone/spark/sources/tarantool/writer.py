"""Writer `tarantool`: writes the rows of a DataFrame or a stream to a space of a live server.

The driver checks everything that can be checked before the first row is sent: options, server, login, space, columns
and their types. Each task has its own connection. Writes are idempotent, so retrying a task or a micro-batch is safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from flowstone.box.definitions import SpaceDefinition
from flowstone.box.system import FIRST_USER_SPACE_ID
from flowstone.iproto.constants import RequestType
from flowstone.spark.sources.options import WriterOptions, WrongOption
from flowstone.spark.sources.tarantool.live_node import definitions
from flowstone.spark.sources.tarantool.row_sender import RowSender
from flowstone.spark.sources.tarantool.tuple_encoder import CannotWrite, TupleEncoder
from flowstone.spark.worker_errors import clear_errors


@dataclass
class Written(WriterCommitMessage):
    """The number of rows that a task wrote and skipped."""

    row_count: int
    skipped_count: int


class _Writing:
    """The code that both writers share. `onConflict` decides what happens to a row whose key already exists."""

    def __init__(self, options: WriterOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise WrongOption(
                "mode overwrite and output mode complete are not supported",
                hint="use mode append with onConflict=replace; to empty the space first, call "
                "box.space.NAME:truncate()",
            )
        self._options = options
        self._space = _space(options)
        # Raises an error for wrong columns before any task starts.
        TupleEncoder(self._space, to_arrow_schema(schema, timezone="UTC"), self._kind)

    @property
    def _kind(self) -> RequestType:
        return RequestType.REPLACE if self._options.on_conflict == "replace" else RequestType.INSERT

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        with clear_errors():
            sender = RowSender(self._options.uri, self._space, self._options.on_conflict)
            try:
                encoder: TupleEncoder | None = None
                for batch in map(_with_small_offsets, iterator):
                    if encoder is None:
                        encoder = TupleEncoder(self._space, batch.schema, self._kind)
                    if len(batch):
                        sender.send(encoder.requests(batch, sender.sync + 1))
                sender.finish()
                return Written(sender.written, sender.skipped)
            finally:
                sender.close()


class TarantoolWriter(_Writing, DataSourceArrowWriter):
    """`df.write.format("tarantool")`, mode append. Rows written before an error are not removed."""


class TarantoolStreamWriter(_Writing, DataSourceStreamArrowWriter):
    """`df.writeStream.format("tarantool")`. Replaying a micro-batch leaves its own rows unchanged."""


def _with_small_offsets(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Cast large strings and binaries, which some session settings produce, to the normal Arrow types."""
    small = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    if not any(kind in small for kind in batch.schema.types):
        return batch
    return batch.cast(pa.schema([each.with_type(small.get(each.type, each.type)) for each in batch.schema]))


def _space(options: WriterOptions) -> SpaceDefinition:
    there = definitions([options.uri])
    space = there.space(options.space)
    if space.id < FIRST_USER_SPACE_ID or space.is_view:
        raise CannotWrite(f"{space.name!r} is a system space or a view", hint="specify a user space")
    if space.primary_key is None:
        raise CannotWrite(
            f"space {space.name!r} at {there.address} has no primary key and cannot be written to",
            hint=f"box.space.{space.name}:create_index('primary')",
        )
    if any(part.path for part in space.primary_key.parts):
        raise CannotWrite(f"primary key of space {space.name!r} is inside documents, which is not supported")
    return space
