"""Source `limestone` as a stream: the changes of each epoch once it is durable. The offset is the durable epoch.

Imports pyspark. A batch has whole epochs, and can be read again as long as the log has them: compaction keeps the files
it has replaced until someone deletes them, and rotation only renames files. Missing epochs, and epochs that are no
longer durable, raise an error; they never become a silent gap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from flowstone.limestone.errors import LimestoneError
from flowstone.outside import production
from flowstone.spark.index.limestone_index import LimestoneIndex, NotDurable
from flowstone.spark.sources.limestone.source import change_parts, read_part, state_parts
from flowstone.spark.sources.limestone.table_contract import replaced, table_at
from flowstone.spark.sources.options import LimestoneOptions, WrongOption
from flowstone.spark.worker_errors import clear_errors


class LimestoneStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are `{"<instance UUID>": epoch}`: everything up to this epoch was delivered. `{}` precedes everything."""

    def __init__(self, options: LimestoneOptions) -> None:
        self._options = options

    _index: LimestoneIndex | None = None
    _target: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options}

    @clear_errors()
    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = self._refreshed().durable

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        options = self._options
        if options.max_rows is not None:
            return ReadMaxRows(options.max_rows)
        return ReadMaxBytes(options.max_bytes) if options.max_bytes is not None else ReadAllAvailable()

    @clear_errors()
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        index = self._refreshed()
        at = _epoch_in(start, index)
        if at is None:
            if self._options.starting in ("latest", "snapshot"):
                return {index.instance_uuid: index.durable}
            at = self._first(index, index.durable)
        if at > index.durable:
            if self._options.fail_on_data_loss:
                raise _set_back(index, at)
            return dict(start)
        if self._options.fail_on_data_loss:
            index.check_changes(at, index.durable)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else self._options.max_bytes
        end = index.cut(at, max_rows=rows, max_bytes=size)
        if self._target is not None:
            end = max(at, min(end, self._target))
        return {index.instance_uuid: end} if start or end else {}

    @clear_errors()
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        index = self._refreshed()
        until = _epoch_in(end, index)
        if until is None:
            return []
        if until > index.durable:
            raise _set_back(index, until)
        at = _epoch_in(start, index)
        if at is None and self._options.starting == "snapshot":
            return state_parts(self._options, index, until)
        at = self._first(index, until) if at is None else at
        if self._options.fail_on_data_loss:
            index.check_changes(at, until)
        return change_parts(self._options, index, at, until) if self._has_table(index, at, until) else []

    def _has_table(self, index: LimestoneIndex, start: int, end: int) -> bool:
        """Return False for epochs before the creation of the table that is streamed.

        Raise TableReplaced if the table at `end` has other columns than now: these are the columns of the query.
        """
        name = self._options.table
        if name is None or start == end:
            return name is None
        now, then = (table_at(index, name, epoch) for epoch in (index.durable, end))
        if now is not None and then is not None and now.shape != then.shape:
            raise replaced(index, name, index.definition_epoch(end) or end)
        return then is not None or now is None or table_at(index, name, start) is not None

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_part(partition)

    def _first(self, index: LimestoneIndex, until: int) -> int:
        """Return the epoch after which a stream begins whose first batch ends at `until`."""
        starting = self._options.starting
        if isinstance(starting, int):
            return starting
        return index.earliest if starting == "earliest" else until

    def _refreshed(self) -> LimestoneIndex:
        if self._index is None:
            self._index = LimestoneIndex.open(production().disk, self._options.path)
        else:
            self._index.refresh()
        unnumbered = self._index.has_unnumbered
        if unnumbered is not None:
            raise LimestoneError(
                f"{self._index.directory}/{unnumbered} has sessions of epoch 0, as written by the original replica:"
                " their real epochs are unknown",
                hint="read it as a batch, or stream the master's directory",
            )
        return self._index


def _epoch_in(offset: Mapping[str, Any], index: LimestoneIndex) -> int | None:
    """Return the epoch of an offset; None if nothing was delivered yet."""
    if not offset:
        return None
    ((uuid, epoch),) = offset.items() if len(offset) == 1 else ((None, None),)
    if uuid != index.instance_uuid or not isinstance(epoch, int):
        raise WrongOption(
            f"checkpoint belongs to instance {uuid}, but {index.directory} to {index.instance_uuid}",
            hint="specify the directory that the query was started with, or use another checkpoint",
        )
    return epoch


def _set_back(index: LimestoneIndex, epoch: int) -> NotDurable:
    return NotDurable(
        f"{index.directory}: epoch {epoch} was durable, but the durable epoch is now {index.durable}",
        hint="the directory was reset, as a replica is by a new master; use another checkpoint",
    )
