"""Compute the values of sequences at a settled moment. `_sequence_data` lacks the numbers that inserts have taken.

A server advances an attached sequence with each inserted tuple, but logs only the values that were set explicitly. So
the value is the last one that was set, or the one in the snapshot, advanced by all later inserts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from flowstone.box.definitions import IndexDefinition, IndexPart, SpaceDefinition
from flowstone.box.engine import sequence as box_sequence
from flowstone.box.engine.key_encoding import encode_integer
from flowstone.box.system import SEQUENCE_DATA_ID, SPACE_SEQUENCE_ID
from flowstone.columns.change_contract import spark_ddl
from flowstone.columns.sort_keys import sort_keys
from flowstone.iproto.msgpack import unpack
from flowstone.replication.vclock import VClock
from flowstone.spark.collect import rows_of
from flowstone.spark.fold.change_frames import changes_frame
from flowstone.spark.fold.key_fold import Place
from flowstone.spark.fold.state_frames import BEFORE_ALL, state_frame
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.index.log_runs import SnapshotFile
from flowstone.spark.index.slice_bytes import Transport
from flowstone.spark.worker_errors import clear_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = tuple[Any, ...]

TAKEN: Final = pa.schema(
    [
        pa.field("sequence_id", pa.int64(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("lsn", pa.int64(), nullable=False),
        pa.field("number", pa.binary(), nullable=False),
    ]
)
"""The numbers in inserted tuples, encoded as keys so that their bytes order as the numbers do."""

_BIAS: Final = int.from_bytes(encode_integer(0), "big")


@dataclass(frozen=True, slots=True)
class Attachment:
    """A space whose `field`, at `path` inside it, advances a sequence, for rows after `after` up to `until`."""

    space_id: int
    sequence_id: int
    field: int
    path: str | None
    after: Place
    until: Place | None = None


def attachments(before: Iterable[Row], changes: Iterable[tuple[Place, int, Row | None]]) -> list[Attachment]:
    """Return which space had which sequence when, from `_space_sequence` at a snapshot and its later changes.

    A change is a place, a space id, and the tuple in force from this place on, or None if it was deleted.
    """
    current: dict[int, Attachment] = {row[0]: _attachment(BEFORE_ALL, row) for row in before}
    found: list[Attachment] = []
    for place, space_id, row in changes:
        was = current.pop(space_id, None)
        if was is not None:
            found.append(Attachment(was.space_id, was.sequence_id, was.field, was.path, was.after, place))
        if row is not None:
            current[space_id] = _attachment(place, row)
    return [*found, *current.values()]


def _attachment(after: Place, row: Row) -> Attachment:
    field = row[3] if len(row) > 3 else 0
    return Attachment(row[0], row[1], field, row[4] if len(row) > 4 and row[4] else None, after)


def sequence_rows(
    spark: SparkSession,
    index: ArchiveIndex,
    snapshot: SnapshotFile,
    position: VClock,
    sequences: Sequence[Row],
    logged: Sequence[Row],
    *,
    transport: Transport = "file",
) -> list[Row]:
    """Return the tuples of `_sequence_data` at `position`.

    `sequences` are the tuples of `_sequence` at `position`, `logged` the tuples of `_sequence_data` according to the
    log.
    """
    found = {
        definition.id: box_sequence.Sequence(definition) for definition in map(box_sequence.read_sequence, sequences)
    }
    for sequence_id, value, *_ in logged:
        if sequence_id in found:
            found[sequence_id].set(value)
    if found and snapshot.vclock != position:
        for sequence_id, low, high in _taken(spark, index, snapshot, position, transport):
            if sequence_id in found:
                step = found[sequence_id].definition.step
                found[sequence_id].update(high if step > 0 else low)
    return [(number, each.value) for number, each in sorted(found.items()) if each.value is not None]


def _taken(
    spark: SparkSession, index: ArchiveIndex, snapshot: SnapshotFile, position: VClock, transport: Transport
) -> Iterator[tuple[int, int, int]]:
    """Yield for each sequence the lowest and the highest number that inserts took since it was last set."""
    from pyspark.sql import functions

    own = changes_frame(
        spark,
        index,
        snapshot.vclock,
        position,
        spaces=(SPACE_SEQUENCE_ID, SEQUENCE_DATA_ID),
        show_system=True,
        transport=transport,
    ).toArrow()
    own = own.sort_by([("_commit_version", "ascending"), ("_lsn", "ascending")])
    rows: list[dict[str, Any]] = [row for row in own.to_pylist() if row["_sort_key"] is not None]
    before = state_frame(spark, index, snapshot.vclock, spaces=(SPACE_SEQUENCE_ID,), transport=transport).toArrow()
    attached = attachments(map(unpack, before["tuple"].to_pylist()), _attachment_changes(rows))
    if not attached:
        return
    last_set = {
        decode_number(row["_sort_key"]): (row["_commit_version"], row["_lsn"])
        for row in rows
        if row["_space_id"] == SEQUENCE_DATA_ID
    }
    spaces = tuple({each.space_id for each in attached})
    columns = ("_space_id", "_operation", "_commit_version", "_lsn", "_tuple_msgpack")
    frame = changes_frame(
        spark, index, snapshot.vclock, position, columns=columns, spaces=spaces, show_system=True, transport=transport
    )
    taken = frame.mapInArrow(partial(_numbers, attached, last_set), spark_ddl(TAKEN))
    most = taken.groupBy("sequence_id").agg(functions.min("number"), functions.max("number"))
    for row in rows_of(most):
        sequence_id, low, high = row.values()
        yield sequence_id, decode_number(low), decode_number(high)


def _attachment_changes(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[Place, int, Row | None]]:
    for row in rows:
        if row["_space_id"] == SPACE_SEQUENCE_ID:
            place = row["_commit_version"], row["_lsn"]
            made = None if row["_tuple_msgpack"] is None else unpack(row["_tuple_msgpack"])
            yield place, decode_number(row["_sort_key"]), made


def decode_number(key: bytes) -> int:
    """Decode a sort key that consists of one integer."""
    return int.from_bytes(key, "big") - _BIAS


def _numbers(
    attached: Sequence[Attachment], last_set: dict[int, Place], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yield the numbers in inserts into attached spaces. Runs in executors."""
    with clear_errors():
        for batch in batches:
            space_ids = batch["_space_id"].to_numpy()
            versions, lsns = batch["_commit_version"].to_numpy(), batch["_lsn"].to_numpy()
            is_insert = np.isin(batch["_operation"].to_numpy(zero_copy_only=False), ("insert", "replace"))
            for each in attached:
                mine = is_insert & (space_ids == each.space_id)
                after = max(each.after, last_set.get(each.sequence_id, BEFORE_ALL))
                mine &= (versions > after[0]) | ((versions == after[0]) & (lsns > after[1]))
                if each.until is not None:
                    mine &= (versions < each.until[0]) | ((versions == each.until[0]) & (lsns <= each.until[1]))
                rows = np.flatnonzero(mine)
                if len(rows):
                    yield _taken_batch(each, batch.take(pa.array(rows)))


def _taken_batch(attachment: Attachment, batch: pa.RecordBatch) -> pa.RecordBatch:
    part = IndexPart(attachment.field, "integer", path=attachment.path)
    index = IndexDefinition(attachment.space_id, 0, "sequence", "tree", True, (part,))
    numbers = sort_keys(
        SpaceDefinition(attachment.space_id, str(attachment.space_id), indexes=(index,)), batch["_tuple_msgpack"]
    )
    ids = pa.repeat(pa.scalar(attachment.sequence_id, pa.int64()), len(batch))
    return pa.record_batch([ids, batch["_commit_version"], batch["_lsn"], numbers], schema=TAKEN)
