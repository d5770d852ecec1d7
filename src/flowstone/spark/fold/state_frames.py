"""Rebuild the state of spaces at a settled moment: the newest snapshot before it, with later changes folded in.

The driver reads the definitions and truncations after the snapshot and decides from which place the rows of each space
count (`SpacePlan`). Executors shuffle the snapshot and the changes by key, sort and fold them. If a primary key was
altered, the changes before the alteration are folded first, and the resulting tuples are sorted again under the new
key. No tuple passes through the driver.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.archive.archive_log import version_of
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import SchemaTracker
from flowstone.box.system import SCHEMA_SPACE_IDS, TRUNCATE_ID
from flowstone.box.update.update import UpdateRules
from flowstone.columns.arrow_columns import MOMENT
from flowstone.columns.change_contract import ChangeContract, spark_ddl
from flowstone.columns.sort_keys import sort_keys
from flowstone.iproto.constants import Key
from flowstone.iproto.row import encode_uint
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.change_frames import slice_size, slices_frame
from flowstone.spark.fold.key_fold import FoldDefinitions, Place, fold, upsert_rules
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.index.log_runs import SnapshotFile
from flowstone.spark.index.slice_bytes import Transport
from flowstone.spark.worker_errors import clear_errors
from flowstone.xlog.reader import LogFile

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

STATE: Final = pa.schema(
    [
        pa.field("space_id", pa.int64(), nullable=False),
        pa.field("sort_key", pa.binary(), nullable=False),
        pa.field("tuple", pa.binary(), nullable=False),
    ]
)

CHANGES: Final = (
    "_space_id",
    "_sort_key",
    "_operation",
    "_commit_version",
    "_lsn",
    "_tuple_msgpack",
    "_operations_msgpack",
    "_index_base",
)
"""The columns of a change that determine the state."""

DEFINING: Final = (*CHANGES, "_key_msgpack", "_index_id")

FOLD_ROWS: Final = 100_000
"""Approximate number of rows that are folded at once."""

BEFORE_ALL: Final = (-1, -1)
_TYPES: Final = {"insert": 2, "replace": 3, "update": 4, "delete": 5, "upsert": 9}


@dataclass(frozen=True)
class SpacePlan:
    """The plan for folding the rows of a space between a snapshot and a position.

    Rows at or before `void` are ignored, because the space was truncated, dropped or recreated at `void`. `rekeyed`
    lists the later positions at which the primary key was altered.
    """

    definitions: FoldDefinitions
    void: Place = BEFORE_ALL
    rekeyed: tuple[Place, ...] = ()

    @property
    def space(self) -> SpaceDefinition:
        """The definition of the space at the position."""
        return self.definitions.spaces[-1]

    def space_behind(self, stage: int) -> SpaceDefinition:
        """Return the definition of the space after the first `stage` alterations in `rekeyed`."""
        return self.definitions.at(self.rekeyed[stage - 1]) if stage else self.definitions.at(self.void)


Plans = Mapping[int, SpacePlan]


def state_frame(
    spark: SparkSession,
    index: ArchiveIndex,
    position: VClock,
    *,
    spaces: Collection[int] | None = None,
    transport: Transport = "file",
    is_ordered: bool = False,
    plans: Plans | None = None,
) -> DataFrame:
    """Return the tuples of `spaces`, or of all including system spaces, at a settled position: columns of STATE.

    With `is_ordered` they are in snapshot order, by space and key, across all partitions; otherwise in no order. A
    caller that already has the result of `state_plans` passes it as `plans`.
    """
    snapshot = index.snapshot_at(position)
    if plans is None:
        plans = state_plans(spark, index, snapshot, position, spaces=spaces, transport=transport)
    return _StateJob(spark, index, snapshot, position, plans, spaces, transport, is_ordered).frame()


def state_plans(
    spark: SparkSession,
    index: ArchiveIndex,
    snapshot: SnapshotFile,
    position: VClock,
    *,
    spaces: Collection[int] | None = None,
    transport: Transport = "file",
) -> dict[int, SpacePlan]:
    """Return the plans of the spaces that exist at `position` and have a primary key."""
    from pyspark.sql import functions

    before = index.schema_at(snapshot.vclock)
    rows = None
    slices = index.slices(
        snapshot.vclock, position, size=_size(spark, index, snapshot, position), spaces=(TRUNCATE_ID,)
    )
    if slices:
        contract = ChangeContract(index.replicaset_uuid, wanted=DEFINING, show_system=True)
        frame = slices_frame(spark, slices, snapshot.vclock, position, contract, transport=transport)
        is_defining = functions.col("_space_id").isin([*SCHEMA_SPACE_IDS]) | (functions.col("_operation") == "truncate")
        rows = frame.filter(is_defining).toArrow()
    return plan_spaces(before, rows, spaces)


def plan_spaces(
    tracker: SchemaTracker, rows: pa.Table | None, spaces: Collection[int] | None = None
) -> dict[int, SpacePlan]:
    """Return the plans, from the schema at the snapshot and the later rows (DEFINING) that define and truncate.

    Modifies `tracker`. With `spaces`, only their plans are returned.
    """
    courses: dict[int, list[tuple[Place, SpaceDefinition | None]]] = {
        space.id: [(BEFORE_ALL, space)] for space in tracker.schema
    }
    truncated: dict[int, Place] = {}
    for row in _ordered(rows):
        place = row["_commit_version"], row["_lsn"]
        if row["_operation"] == "truncate":
            truncated[row["_space_id"]] = place
            continue
        changed = tracker.apply(_TYPES[row["_operation"]], _body(row))
        if changed is not None:
            course = courses.setdefault(changed, [(BEFORE_ALL, None)])
            course.append((place, tracker.schema.get(changed)))
    wanted = courses.keys() if spaces is None else courses.keys() & {*spaces}
    plans = {space_id: _plan(courses[space_id], truncated.get(space_id, BEFORE_ALL)) for space_id in sorted(wanted)}
    return {space_id: plan for space_id, plan in plans.items() if plan is not None}


def _plan(course: list[tuple[Place, SpaceDefinition | None]], truncated: Place) -> SpacePlan | None:
    """Return the plan, or None for a space that does not exist or cannot hold tuples at the end."""
    void = truncated
    kept: list[tuple[Place, SpaceDefinition]] = []
    for place, space in course:
        if space is None or space.primary_key is None:
            # Dropping the primary key deletes all tuples of a space.
            void, kept = max(void, place), []
        else:
            kept.append((place, space))
    if not kept:
        return None
    definitions = FoldDefinitions(tuple(space for _, space in kept), tuple(place for place, _ in kept[1:]))
    rekeyed = [place for (_, was), (place, now) in pairwise(kept) if place > void and _parts(was) != _parts(now)]
    return SpacePlan(definitions, void, tuple(rekeyed))


def _parts(space: SpaceDefinition) -> object:
    assert space.primary_key is not None
    return space.primary_key.parts


def _ordered(rows: pa.Table | None) -> list[dict[str, Any]]:
    if rows is None:
        return []
    found: list[dict[str, Any]] = rows.sort_by([("_commit_version", "ascending"), ("_lsn", "ascending")]).to_pylist()
    return found


def _body(row: Mapping[str, Any]) -> bytes:
    """Encode the request body of the row in the log."""
    is_update = row["_operation"] == "update"
    fields = {
        Key.SPACE_ID: encode_uint(row["_space_id"]),
        Key.INDEX_ID: encode_uint(row["_index_id"]),
        Key.INDEX_BASE: encode_uint(row["_index_base"]),
        Key.KEY: row["_key_msgpack"],
        Key.TUPLE: row["_operations_msgpack"] if is_update else row["_tuple_msgpack"],
        Key.OPS: None if is_update else row["_operations_msgpack"],
    }
    there = {key: value for key, value in fields.items() if value is not None}
    return bytes([0x80 + len(there)]) + b"".join(bytes([key]) + value for key, value in there.items())


# --- the job ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StateJob:
    spark: SparkSession
    index: ArchiveIndex
    snapshot: SnapshotFile
    position: VClock
    plans: Plans
    spaces: Collection[int] | None
    transport: Transport
    is_ordered: bool

    def frame(self) -> DataFrame:
        from pyspark.sql import functions

        rows = self._snapshot_rows()
        if self.snapshot.vclock == self.position:
            # There is nothing to fold, and a snapshot is already ordered.
            names = {"space_id": "_space_id", "sort_key": "_sort_key", "tuple": "_tuple_msgpack"}
            found = rows.select(*(functions.col(theirs).alias(ours) for ours, theirs in names.items()))
            return found.withColumn("space_id", functions.col("space_id").cast("bigint"))
        rows = rows.unionAll(self._change_rows())
        stages = max((len(plan.rekeyed) for plan in self.plans.values()), default=0)
        if not stages:
            return self._folded(rows, is_ordered=self.is_ordered)
        rekeyed = [space_id for space_id, plan in self.plans.items() if plan.rekeyed]
        is_rekeyed = functions.col("_space_id").isin(rekeyed)
        found = self._folded(rows.filter(~is_rekeyed)).unionAll(self._in_stages(rows.filter(is_rekeyed), stages))
        if not self.is_ordered:
            return found
        return found.repartitionByRange("space_id", "sort_key").sortWithinPartitions("space_id", "sort_key")

    def _in_stages(self, rows: DataFrame, stages: int) -> DataFrame:
        """Fold the rows of spaces whose primary key was altered, from one alteration to the next."""
        rows = rows.withColumn("stage", self._stage())
        state = None
        for stage in range(stages + 1):
            part = rows.filter(rows["stage"] == stage).drop("stage")
            if state is not None:
                renewed = partial(_rekey, dict(self.plans), stage)
                part = part.unionAll(state.mapInArrow(renewed, _changes_ddl()))
            state = self._folded(part)
        assert state is not None
        return state

    def _folded(self, rows: DataFrame, *, is_ordered: bool = False) -> DataFrame:
        divided = rows.repartitionByRange if is_ordered else rows.repartition
        ordered = divided("_space_id", "_sort_key").sortWithinPartitions(
            "_space_id", "_sort_key", "_commit_version", "_lsn"
        )
        return ordered.mapInArrow(partial(fold_sorted, dict(self.plans), self._rules()), spark_ddl(STATE))

    def _rules(self) -> UpdateRules:
        with LogFile.open(self.index.disk, self.snapshot.path) as log:
            return upsert_rules(version_of(log.meta.version))

    def _snapshot_rows(self) -> DataFrame:
        slices = self.index.snapshot_slices(self.snapshot, size=slice_size(self.spark, self.snapshot.size))
        at = self.snapshot.vclock
        return self._counting(slices_frame(self.spark, slices, at, at, self._contract(), transport=self.transport))

    def _change_rows(self) -> DataFrame:
        start, end = self.snapshot.vclock, self.position
        size = _size(self.spark, self.index, self.snapshot, end)
        spaces = () if self.spaces is None else tuple(self.plans) or (TRUNCATE_ID,)
        slices = self.index.slices(start, end, size=size, spaces=spaces)
        return self._counting(slices_frame(self.spark, slices, start, end, self._contract(), transport=self.transport))

    def _contract(self) -> ChangeContract:
        only = None if self.spaces is None else tuple(self.plans)
        uuid = self.index.replicaset_uuid
        return ChangeContract(uuid, wanted=CHANGES, show_system=True, only=only, keeps_truncate=True)

    def _counting(self, rows: DataFrame) -> DataFrame:
        """Filter the rows that change tuples and are not void."""
        from pyspark.sql import functions

        space_id = functions.col("_space_id")
        rows = rows.filter(space_id.isin([*self.plans]) & (functions.col("_operation") != "truncate"))
        rows = rows.filter(functions.col("_sort_key").isNotNull())
        voids = {space_id: plan.void for space_id, plan in self.plans.items() if plan.void != BEFORE_ALL}
        if voids:
            void = functions.create_map(
                *(each for number, place in voids.items() for each in (functions.lit(number), _place(place)))
            )
            rows = rows.filter(functions.coalesce(_place_of_row() > void[space_id], functions.lit(True)))
        return rows

    def _stage(self) -> Column:
        """Return a column with the number of alterations of the space's primary key before a row."""
        from pyspark.sql import functions

        stage = functions.lit(0)
        for space_id, plan in self.plans.items():
            for place in plan.rekeyed:
                is_behind = (functions.col("_space_id") == space_id) & (_place_of_row() > _place(place))
                stage = stage + functions.when(is_behind, 1).otherwise(0)
        return stage


def _size(spark: SparkSession, index: ArchiveIndex, snapshot: SnapshotFile, position: VClock) -> int:
    return slice_size(spark, index.size_between(snapshot.vclock, position))


def _place(place: Place) -> Column:
    from pyspark.sql import functions

    version, lsn = place
    return functions.struct(
        functions.lit(version).cast("bigint").alias("version"), functions.lit(lsn).cast("bigint").alias("lsn")
    )


def _place_of_row() -> Column:
    from pyspark.sql import functions

    return functions.struct(functions.col("_commit_version").alias("version"), functions.col("_lsn").alias("lsn"))


# --- folding, in executors ----------------------------------------------------------------------------------------


def fold_sorted(
    plans: Plans, rules: UpdateRules, batches: Iterable[pa.RecordBatch], *, at_once: int = FOLD_ROWS
) -> Iterator[pa.RecordBatch]:
    """Fold changes ordered by space, key and time to the last state of each key.

    All changes of a key are in one partition.
    """
    with clear_errors():
        held: list[pa.RecordBatch] = []
        count = 0
        for batch in batches:
            held.append(batch)
            count += batch.num_rows
            if count < at_once:
                continue
            table = pa.Table.from_batches(held)
            cut = _last_key(table)
            # The changes of one key are never split, even if there are more than `at_once`.
            if cut:
                yield from _fold_spaces(plans, rules, table.slice(0, cut))
                held, count = table.slice(cut).to_batches(), table.num_rows - cut
        if count:
            yield from _fold_spaces(plans, rules, pa.Table.from_batches(held))


def _last_key(table: pa.Table) -> int:
    """Return the row at which the changes of the last key begin."""
    is_same = None
    for name in ("_space_id", "_sort_key"):
        equal = pc.equal(table[name], table[name][-1])
        is_same = equal if is_same is None else pc.and_(is_same, equal)
    return int(np.argmax(is_same.to_numpy()))  # type: ignore[union-attr]


def _fold_spaces(plans: Plans, rules: UpdateRules, changes: pa.Table) -> Iterator[pa.RecordBatch]:
    space_ids = changes["_space_id"].to_numpy()
    edges = np.flatnonzero(np.diff(space_ids)) + 1
    for start, stop in zip([0, *edges.tolist()], [*edges.tolist(), len(space_ids)], strict=True):
        part = changes.slice(start, stop - start)
        # `fold` requires these columns; a state does not depend on them.
        part = part.append_column("_replica_id", pa.repeat(pa.scalar(0, pa.int32()), len(part)))
        part = part.append_column("_commit_timestamp", pa.repeat(pa.scalar(0, MOMENT), len(part)))
        space_id = int(space_ids[start])
        states = fold(plans[space_id].definitions, part, rules=rules, is_sorted=True)
        states = states.filter(states["tuple"].is_valid())
        ids = pa.repeat(pa.scalar(space_id, pa.int64()), len(states))
        table = pa.table([ids, states["sort_key"], states["tuple"]], schema=STATE)
        yield from table.to_batches()


def _changes_ddl() -> str:
    contract = ChangeContract("", wanted=CHANGES)
    return contract.spark_schema


def _rekey(plans: Plans, stage: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Turn tuples into inserts that precede all other changes, under the key that their space has from `stage` on."""
    contract = ChangeContract("", wanted=CHANGES)
    with clear_errors():
        for batch in batches:
            for space_id in pc.unique(batch["space_id"]).to_pylist():
                mine = batch.filter(pc.equal(batch["space_id"], space_id))
                plan = plans[space_id]
                tuples = mine["tuple"]
                keys = sort_keys(plan.space_behind(min(stage, len(plan.rekeyed))), tuples)
                count = len(mine)
                found = {
                    "_space_id": mine["space_id"],
                    "_sort_key": keys,
                    "_operation": pa.repeat("insert", count),
                    "_commit_version": pa.repeat(pa.scalar(-1, pa.int64()), count),
                    "_lsn": pa.repeat(pa.scalar(-1, pa.int64()), count),
                    "_tuple_msgpack": tuples,
                    "_operations_msgpack": pa.nulls(count, pa.binary()),
                    "_index_base": pa.repeat(pa.scalar(0, pa.int32()), count),
                }
                columns = [found[each.name].cast(each.type) for each in contract.schema]
                yield pa.record_batch(columns, schema=contract.schema)
