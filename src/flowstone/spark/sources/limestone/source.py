"""Source `limestone`: durable changes of a Limestone data directory, as a batch or as a stream, and its states.

Imports pyspark. Readers are created in one process and used in others: only the planning process opens the directory.
The directory is read, never changed or locked: a master or a replica may write it at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from flowstone.outside import production
from flowstone.spark.index.limestone_index import SLICE_SIZE, LimestoneIndex, NotDurable, PieceSlice
from flowstone.spark.sources.limestone.entry_columns import EntryContract
from flowstone.spark.sources.limestone.entry_reader import chunks_of, counted
from flowstone.spark.sources.limestone.entry_states import Contract, StateShare, plan_state, read_state
from flowstone.spark.sources.limestone.table_contract import TableContract, table_between
from flowstone.spark.sources.options import LimestoneOptions, WrongOption, limestone_options
from flowstone.spark.worker_errors import clear_errors

if TYPE_CHECKING:
    from flowstone.spark.sources.limestone.stream import LimestoneStreamReader

SLICE_SIZE_MIN: Final = 512 * 1024
SLICES_WANTED: Final = 16
"""Number of partitions of a small batch, as long as each has enough work."""


@dataclass
class ChangesOfFile(InputPartition):
    """The changes that one task reads: after epoch `start` up to `end`."""

    part: PieceSlice
    start: int
    end: int
    contract: Contract


@dataclass
class EntryStateOfKeys(InputPartition):
    """The part of a state that one task reads."""

    share: StateShare


class LimestoneSource(DataSource):
    """Durable changes, or the state at a durable epoch, of the data directory of a Limestone master or replica.

    `path` is the directory. Options:

    - `mode`: changes (default) or state; `asOf` for a state: a durable epoch, by default the newest.
    - `storage`: storage ids, separated by commas; default: all.
    - `table`: one of Tsurugi's tables, by name: its columns with their types, instead of keys and values.
    - `columns`: column names, separated by commas, in the desired order.
    - `unsignedAs`: int64 (default) or decimal, for ids and major versions; minor versions are always decimals.
    - `startingOffsets`: earliest (default), latest, or an epoch after which to begin; for a stream also snapshot: its
      first batch is the state at the durable epoch. `endingOffsets`, for a batch: latest or an epoch.
    - `maxRowsPerTrigger`, `maxBytesPerTrigger`: size of a stream's batch; always whole epochs.
    - `failOnDataLoss`: true (default): the query fails if compaction removed epochs; false: it continues after them.
    """

    @classmethod
    def name(cls) -> str:
        return "limestone"

    @clear_errors()
    def schema(self) -> str:
        options = limestone_options(self.options, streaming=None)
        if options.table is None:
            return contract_of(options, LimestoneIndex(production().disk, options.path)).spark_schema
        index = LimestoneIndex.open(production().disk, options.path)
        epoch = next((each for each in (options.as_of, options.ending) if each is not None), index.durable)
        return table_contract(options, index, epoch).spark_schema

    @clear_errors()
    def reader(self, schema: Any) -> DataSourceReader:
        return LimestoneReader(limestone_options(self.options))

    @clear_errors()
    def streamReader(self, schema: Any) -> LimestoneStreamReader:  # noqa: N802
        from flowstone.spark.sources.limestone.stream import LimestoneStreamReader

        return LimestoneStreamReader(limestone_options(self.options, streaming=True))


class LimestoneReader(DataSourceReader):
    """Reads the changes between two epochs, or the state at one."""

    def __init__(self, options: LimestoneOptions) -> None:
        self._options = options

    @clear_errors()
    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        index = LimestoneIndex.open(production().disk, options.path)
        if options.mode == "state":
            epoch = index.durable if options.as_of is None else options.as_of
            return state_parts(options, index, epoch)
        start, end = self._bounds(index)
        return change_parts(options, index, start, end)

    def _bounds(self, index: LimestoneIndex) -> tuple[int, int]:
        options = self._options
        end = index.durable if options.ending is None else options.ending
        if end > index.durable:
            raise NotDurable(f"{index.directory}: epoch {end} is not durable; the durable epoch is {index.durable}")
        named = {"earliest": -1 if not index.earliest else index.earliest, "latest": index.durable}
        start = named[options.starting] if isinstance(options.starting, str) else options.starting
        if start > end:
            raise WrongOption(
                f"batch starts at {start}, but ends at {end}", hint="endingOffsets must not precede startingOffsets"
            )
        if options.fail_on_data_loss:
            index.check_changes(max(start, 0), end)
        return start, end

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_part(partition)


def contract_of(options: LimestoneOptions, index: LimestoneIndex) -> EntryContract:
    contract = EntryContract(index.instance_uuid, options.mode, options.wanted, options.unsigned_as, options.storages)
    _ = contract.schema  # report an unknown column before a query starts
    return contract


def table_contract(options: LimestoneOptions, index: LimestoneIndex, epoch: int) -> TableContract:
    """Return the columns of option `table` as they are at an epoch."""
    assert options.table is not None
    contract = TableContract(index.sql_schema(epoch).table(options.table), options.mode, options.wanted)
    _ = contract.schema
    return contract


def state_parts(options: LimestoneOptions, index: LimestoneIndex, epoch: int) -> list[InputPartition]:
    """Return tasks that together read the state at an epoch."""
    contract = contract_of(options, index) if options.table is None else table_contract(options, index, epoch)
    return [EntryStateOfKeys(share) for share in plan_state(index, epoch, contract)]


def change_parts(options: LimestoneOptions, index: LimestoneIndex, start: int, end: int) -> list[InputPartition]:
    """Return tasks that together read each change after `start` up to `end` once."""
    if options.table is None:
        return parts_between(index, start, end, contract_of(options, index))
    found = table_between(index, options.table, start, end)
    return parts_between(index, found.start, end, TableContract(found.table, options.mode, options.wanted))


def parts_between(index: LimestoneIndex, start: int, end: int, contract: Contract) -> list[InputPartition]:
    """Return tasks that together read each change after `start` up to `end` once."""
    size = max(SLICE_SIZE_MIN, min(SLICE_SIZE, index.size_between(start, end) // SLICES_WANTED))
    return [ChangesOfFile(part, start, end, contract) for part in index.slices(start, end, size=size)]


def read_part(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    """In executors: yield the batches of one partition."""
    disk = production().disk
    with clear_errors():
        if type(partition) is InputPartition:  # for a plan without tasks, Spark creates an empty one
            return
        if isinstance(partition, EntryStateOfKeys):
            yield from read_state(disk, partition.share)
            return
        assert isinstance(partition, ChangesOfFile)
        contract = partition.contract
        for chunk in chunks_of(disk, partition.part):
            rows = contract.chosen(chunk, counted(chunk, partition.start, min(partition.end, partition.part.limit)))
            if len(rows):
                yield contract.batch(chunk, rows)
