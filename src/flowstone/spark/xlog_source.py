"""Source `xlog`: settled changes of an archive, as a batch or as a stream.

Imports pyspark, as the only one of what it rests on. Readers are built in one process and used in others, so they keep
nothing but options and contract; each call opens the archive's index again and sees what came since.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from flowstone.box.schema import UnknownSpace
from flowstone.box.system import TRUNCATE_ID
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.archive_index import ArchiveIndex, Slice
from flowstone.spark.change_batches import FormatChanged, read_slice
from flowstone.spark.clear_errors import clear_errors
from flowstone.spark.contract import ChangeContract, shape_of
from flowstone.spark.offsets import INITIAL, Offset, Position
from flowstone.spark.options import ChangeOptions, Starting, WrongOption, XlogOptions, xlog_options


@dataclass
class ChangePart(InputPartition):
    """What one task reads: a slice, and the settled positions between which its rows lie."""

    part: Slice
    start: VClock
    end: VClock


class XlogSource(DataSource):
    """Settled changes in the directory of an archive. `path` names it; the other options are in `options.py`."""

    @classmethod
    def name(cls) -> str:
        return "xlog"

    @clear_errors()
    def schema(self) -> str:
        options = xlog_options(self.options, streaming=None)
        return _contract(_index(options), options.changes).spark_schema

    @clear_errors()
    def reader(self, schema: Any) -> XlogReader:
        return XlogReader(xlog_options(self.options))

    @clear_errors()
    def streamReader(self, schema: Any) -> XlogStreamReader:  # noqa: N802
        return XlogStreamReader(xlog_options(self.options, streaming=True))


class _Reading:
    """What both readers do in executors."""

    def __init__(self, options: XlogOptions) -> None:
        self._options = options
        self._contract = _contract(_index(options), options.changes)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ChangePart)
        show_secrets = self._options.changes.show_secrets
        disk = production().disk
        with clear_errors():
            yield from read_slice(
                disk, partition.part, partition.start, partition.end, self._contract, show_secrets=show_secrets
            )

    def _parts(self, index: ArchiveIndex, start: VClock, end: VClock) -> list[ChangePart]:
        if self._options.changes.images != "ops":
            index.check_images(start)
        space = self._contract.space
        # Truncations are rows of another space.
        spaces = () if space is None else (space.id, TRUNCATE_ID)
        return [ChangePart(part, start, end) for part in index.slices(start, end, spaces=spaces)]


class XlogReader(_Reading, DataSourceReader):
    """The changes between two positions."""

    @clear_errors()
    def partitions(self) -> Sequence[InputPartition]:
        index = _index(self._options)
        changes = self._options.changes
        start = _position(index, changes.starting, index.earliest)
        return self._parts(index, start, _position(index, changes.ending, index.settled))


class XlogStreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The changes as they are archived and settled. Offsets are settled positions."""

    _target: VClock | None = None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = _index(self._options).settled

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return INITIAL.to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        changes = self._options.changes
        if changes.max_rows is not None:
            return ReadMaxRows(changes.max_rows)
        return ReadMaxBytes(changes.max_bytes) if changes.max_bytes is not None else ReadAllAvailable()

    @clear_errors()
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        index = _index(self._options)
        at = self._place(index, start)
        end = index.cut(
            at,
            max_rows=limit.max_rows if isinstance(limit, ReadMaxRows) else None,
            max_bytes=limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.changes.max_bytes,
        )
        if self._target is not None:
            end = at.merged(end.common(self._target))
        end = self._before_format_change(index, at, end)
        return INITIAL.moved(index.replicaset_uuid, Position(end)).to_json()

    @clear_errors()
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        index = _index(self._options)
        until = Offset.from_json(end).get(index.replicaset_uuid)
        return self._parts(index, self._place(index, start), until.vclock) if until is not None else []

    def _place(self, index: ArchiveIndex, start: Mapping[str, Any]) -> VClock:
        position = Offset.from_json(start).get(index.replicaset_uuid)
        if position is not None:
            return position.vclock
        return _position(index, self._options.changes.starting, index.earliest)

    def _before_format_change(self, index: ArchiveIndex, start: VClock, end: VClock) -> VClock:
        """A query has one schema for life: its last batch ends where that is no longer the space's."""
        space = self._contract.space
        if space is None:
            return end
        for change in index.format_changes(space.id, start, end):
            if shape_of(change.was) != shape_of(space):
                continue
            if change.before == start:
                raise FormatChanged(
                    f"the format of space {space.name!r} changes behind {start}, and this query has its former columns",
                    hint="start the query again: it goes on here, with the new columns",
                )
            return change.before
        return end


def _index(options: XlogOptions) -> ArchiveIndex:
    if len(options.paths) != 1:
        raise WrongOption("path names several directories", hint="read each by itself, and unite what comes")
    if options.mode != "changes":
        raise WrongOption("mode=state is not there yet", hint="leave it out for changes")
    return ArchiveIndex.open(production().disk, options.paths[0])


def _contract(index: ArchiveIndex, options: ChangeOptions) -> ChangeContract:
    space = None
    if options.space is not None:
        space = index.definition_at(index.settled, options.space)
        if space is None:
            raise UnknownSpace(f"no space {options.space!r} in {index.directory}")
    return ChangeContract(
        index.replicaset_uuid, space, options.columns, options.wanted, options.show_system, options.images
    )


def _position(index: ArchiveIndex, given: Starting | None, default: VClock) -> VClock:
    if given is None:
        return default
    if isinstance(given, str):
        return index.settled if given == "latest" else index.earliest
    position = given.get(None, given.get(index.replicaset_uuid))
    if position is None:
        raise WrongOption(f"the offsets say nothing of replica set {index.replicaset_uuid}, whose archive this is")
    return position
