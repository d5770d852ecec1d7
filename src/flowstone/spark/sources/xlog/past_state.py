"""The state of a space at a settled moment, for readers that cannot run jobs: each task folds a share of the keys.

A snapshot has the tuples of a space in the order of its primary key, so a slice of it is a range of keys. A task takes
the changes of its range from the log and passes unchanged tuples through. If the snapshot is not ordered, or is small
compared to the changes, keys are divided by a hash and each task reads everything. Jobs that have a session use
`spark/fold/state_frames.py`, which shuffles instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from flowstone.archive.archive_log import version_of
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import UnknownSpace
from flowstone.box.system import SCHEMA_SPACE_IDS, TRUNCATE_ID
from flowstone.box.update.update import UpdateRules
from flowstone.columns.arrow_columns import span_column
from flowstone.columns.change_contract import RAW_COLUMNS, ChangeContract
from flowstone.columns.sort_keys import sort_keys
from flowstone.history.secrets import USER_SPACES, hidden_tuple
from flowstone.iproto import scan
from flowstone.iproto.scan import Cells
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.key_fold import Place, fold, keys_needing_old, upsert_rules
from flowstone.spark.fold.state_frames import BEFORE_ALL, DEFINING, SpacePlan, plan_spaces
from flowstone.spark.index.log_index import ArchiveIndex, Slice
from flowstone.spark.index.log_runs import SnapshotFile
from flowstone.spark.sources.change_batches import read_slice
from flowstone.spark.sources.options import XlogOptions
from flowstone.spark.sources.state_contract import StateContract
from flowstone.spark.sources.xlog.log_directories import LogDirectories, check_alike
from flowstone.xlog.reader import LogFile
from flowstone.xlog.walk import checksums

SLICE_SIZE: Final = 16 * 1024 * 1024
"""Bytes of a snapshot per task."""

SHARE_SIZE: Final = 32 * 1024 * 1024
"""Bytes of logs per task if each task reads everything."""

SHARES_MAX: Final = 8


@dataclass(frozen=True)
class StatePart:
    """The input of one task, and its keys: the half-open range from `low` to `high`, or one of several hash shares."""

    snapshot: tuple[Slice, ...]
    changes: tuple[Slice, ...]
    start: VClock
    end: VClock
    contract: StateContract
    plan: SpacePlan
    rules: UpdateRules
    low: bytes | None = None
    high: bytes | None = None
    share: tuple[int, int] = (0, 1)


# --- planning, in the driver --------------------------------------------------------------------------------------


def state_contracts(directories: LogDirectories, options: XlogOptions) -> dict[str, StateContract]:
    """Return the columns by replica set, as the space has them at the requested moment."""
    found = {}
    for logs in directories:
        index, position = logs.resolve(options.as_of)
        found[logs.replicaset_uuid] = _contract(index, position, options)
    check_alike({uuid: contract.schema for uuid, contract in found.items()})
    return found


def plan_state(directories: LogDirectories, options: XlogOptions) -> list[StatePart]:
    """Return the tasks, which together read each tuple of the space once."""
    state_contracts(directories, options)
    return [part for logs in directories for part in _planned(*logs.resolve(options.as_of), options)]


def _contract(index: ArchiveIndex, position: VClock, options: XlogOptions) -> StateContract:
    changes = options.changes
    assert changes.space is not None
    space = index.definition_at(position, changes.space)
    if space is None:
        names = [each.name for each in index.schema_at(position).schema if each.id >= 512]
        known = f"known spaces: {', '.join(names[:20])}" if names else "the log has no user space"
        raise UnknownSpace(f"no space {changes.space!r} in {index.directory} at {position}", hint=known)
    return StateContract(index.replicaset_uuid, space, changes.columns, changes.wanted, changes.show_system)


def _planned(index: ArchiveIndex, position: VClock, options: XlogOptions) -> list[StatePart]:
    contract = _contract(index, position, options)
    space = contract.space
    assert space is not None
    snapshot = index.snapshot_at(position)
    plan = _plan_of(index, snapshot, position, space.id)
    if plan is None:
        return []
    changes = tuple(index.slices(snapshot.vclock, position, spaces=(space.id,)))
    with LogFile.open(index.disk, snapshot.path) as log:
        rules = upsert_rules(version_of(log.meta.version))
    # A space that was truncated or recreated keeps nothing of the snapshot.
    slices = index.snapshot_slices(snapshot, size=SLICE_SIZE) if plan.void == BEFORE_ALL else []
    firsts = [_first_row(index.disk, part, space) for part in slices]
    chosen = _holding(firsts, space.id)
    whole = StatePart(tuple(slices[chosen]), changes, snapshot.vclock, position, contract, plan, rules)
    if plan.rekeyed:
        return [whole]
    ranges = _ranges(space, firsts[chosen])
    size = sum(part.end - part.offset for part in (*whole.changes, *(() if ranges else whole.snapshot)))
    count = max(1, min(SHARES_MAX, size // SHARE_SIZE))
    if count >= len(ranges):
        return [replace(whole, share=(number, count)) for number in range(count)]
    return [
        replace(whole, snapshot=(part,), low=low, high=high)
        for part, (low, high) in zip(whole.snapshot, ranges, strict=True)
    ]


def _plan_of(index: ArchiveIndex, snapshot: SnapshotFile, position: VClock, space_id: int) -> SpacePlan | None:
    contract = ChangeContract(index.replicaset_uuid, wanted=DEFINING, show_system=True)
    rows: list[pa.RecordBatch] = []
    for part in index.slices(snapshot.vclock, position, spaces=(TRUNCATE_ID,)):
        for batch in read_slice(index.disk, part, snapshot.vclock, position, contract, show_secrets=True):
            is_defining = pc.is_in(batch["_space_id"], pa.array([*SCHEMA_SPACE_IDS], pa.int32()))
            rows.append(batch.filter(pc.or_(is_defining, pc.equal(batch["_operation"], "truncate"))))
    table = pa.Table.from_batches(rows, contract.schema)
    return plan_spaces(index.schema_at(snapshot.vclock), table, [space_id]).get(space_id)


def _first_row(disk: Disk, part: Slice, space: SpaceDefinition) -> tuple[int, bytes | None]:
    """Return the space id of the first row of a slice and, if it is `space`, the key of the row."""
    with LogFile.open(disk, part.path) as log:
        chunk = next(log.chunks(part.offset, part.end))
        slab = replace(chunk, blocks=chunk.blocks[:1]).decode()
    space_id = int(slab.cells[scan.SPACE_ID, 0])
    if space_id != space.id:
        return space_id, None
    tuples = span_column(slab.buf, slab.cells[scan.TUPLE_AT, :1], slab.cells[scan.TUPLE_END, :1])
    definition = part.definitions.schema.get(space.id)
    return space_id, sort_keys(definition or space, tuples)[0].as_py()


def _holding(firsts: Sequence[tuple[int, bytes | None]], space_id: int) -> slice:
    """Return the slices that can contain rows of a space. The space may begin inside the slice of an earlier space."""
    ids = [each for each, _ in firsts]
    if ids != sorted(ids):
        return slice(None)
    first = max((number for number, each in enumerate(ids) if each < space_id), default=0)
    stop = max((number for number, each in enumerate(ids) if each <= space_id), default=-1) + 1
    return slice(first, stop)


def _ranges(
    space: SpaceDefinition, firsts: Sequence[tuple[int, bytes | None]]
) -> list[tuple[bytes | None, bytes | None]]:
    """Return the key range of each slice, or an empty list if the slices are not in key order."""
    key = space.primary_key
    edges = [edge for _, edge in firsts[1:]]
    if key is None or key.type.lower() != "tree" or None in edges or not firsts:
        return []
    known = [edge for edge in edges if edge is not None]
    if any(not before < behind for before, behind in pairwise(known)):
        return []
    return list(zip([None, *known], [*known, None], strict=True))


# --- reading, in executors ----------------------------------------------------------------------------------------


def read_state(disk: Disk, part: StatePart, *, show_secrets: bool = False) -> Iterator[pa.RecordBatch]:
    """Yield the tuples of the task's keys, in the columns of its contract."""
    space = part.contract.space
    assert space is not None
    is_hidden = space.id in USER_SPACES and not show_secrets
    for tuples in _tuples(disk, part, space):
        if len(tuples):
            shown = pa.array([hidden_tuple(each) for each in tuples.to_pylist()], pa.binary()) if is_hidden else tuples
            yield part.contract.of_tuples(shown)


def _tuples(disk: Disk, part: StatePart, space: SpaceDefinition) -> Iterator[pa.Array]:
    changes = _changes(disk, part, space)
    if part.plan.rekeyed:
        yield _in_stages(part, changes, pa.concat_tables([_empty_old(), *_snapshot_rows(disk, part, space)]))
        return
    if not len(changes) and part.share == (0, 1):
        contract = ChangeContract(
            "", wanted=("_tuple_msgpack",), show_system=True, only=(space.id,), keeps_truncate=True
        )
        for each in part.snapshot:
            for batch in read_slice(disk, each, part.start, part.start, contract, show_secrets=True):
                yield batch.column(0)
        return
    changed = pc.unique(changes["_sort_key"].combine_chunks()) if len(changes) else pa.array([], pa.binary())
    old: list[pa.Table] = [_empty_old()]
    for rows in _snapshot_rows(disk, part, space):
        is_changed = pc.is_in(rows["sort_key"], changed)
        old.append(rows.filter(is_changed))
        yield _one_array(rows.filter(pc.invert(is_changed))["tuple"])
    folded = fold(part.plan.definitions, changes, pa.concat_tables(old), rules=part.rules)
    yield _one_array(folded.filter(folded["tuple"].is_valid())["tuple"])


def _in_stages(part: StatePart, changes: pa.Table, state: pa.Table) -> pa.Array:
    """Return the tuples of a space whose primary key was altered, folded from one alteration to the next."""
    plan = part.plan
    edges: list[Place | None] = [*plan.rekeyed, None]
    before: Place | None = None
    tuples = _one_array(state["tuple"])
    for stage, until in enumerate(edges):
        mine = changes.filter(_between(changes, before, until))
        needed = keys_needing_old(mine, last_only=True)
        folded = fold(plan.definitions, mine, state.filter(pc.is_in(state["sort_key"], needed)), rules=part.rules)
        rest = state.filter(pc.invert(pc.is_in(state["sort_key"], _one_array(folded["sort_key"]))))
        kept = folded.filter(folded["tuple"].is_valid()).select(["sort_key", "tuple"])
        tuples = _one_array(pa.concat_tables([rest, kept.cast(_OLD)])["tuple"])
        if until is not None:
            state = pa.table([sort_keys(plan.space_behind(stage + 1), tuples), tuples], schema=_OLD)
        before = until
    return tuples


_OLD: Final = pa.schema([pa.field("sort_key", pa.binary()), pa.field("tuple", pa.binary())])


def _empty_old() -> pa.Table:
    return _OLD.empty_table()


def _changes(disk: Disk, part: StatePart, space: SpaceDefinition) -> pa.Table:
    """Return the changes of the task's keys, without truncations and void changes."""
    contract = ChangeContract("", wanted=RAW_COLUMNS, show_system=True, only=(space.id,), keeps_truncate=True)
    found: list[pa.RecordBatch] = []
    for each in part.changes:
        for batch in read_slice(disk, each, part.start, part.end, contract, show_secrets=True):
            counts = pc.and_(pc.not_equal(batch["_operation"], "truncate"), batch["_sort_key"].is_valid())
            if part.plan.void != BEFORE_ALL:
                counts = pc.and_(counts, _between(batch, part.plan.void, None))
            batch = batch.filter(counts)
            found.append(batch.filter(_own(batch["_sort_key"], part)))
    return pa.Table.from_batches(found, contract.schema)


def _snapshot_rows(disk: Disk, part: StatePart, space: SpaceDefinition) -> Iterator[pa.Table]:
    wanted = ("_sort_key", "_tuple_msgpack")
    contract = ChangeContract("", wanted=wanted, show_system=True, only=(space.id,), keeps_truncate=True)
    for each in part.snapshot:
        for batch in read_slice(disk, each, part.start, part.start, contract, show_secrets=True):
            if part.share != (0, 1):
                batch = batch.filter(_own(batch["_sort_key"], part))
            yield pa.table(batch.columns, schema=_OLD)


def _between(rows: pa.Table | pa.RecordBatch, before: Place | None, until: Place | None) -> pa.Array:
    """Return a mask of the rows after place `before`, up to and including place `until`."""
    versions, lsns = _numbers(rows["_commit_version"]), _numbers(rows["_lsn"])
    inside = np.ones(len(versions), np.bool_)
    if before is not None:
        inside &= (versions > before[0]) | ((versions == before[0]) & (lsns > before[1]))
    if until is not None:
        inside &= (versions < until[0]) | ((versions == until[0]) & (lsns <= until[1]))
    return pa.array(inside)


def _numbers(column: pa.Array | pa.ChunkedArray) -> Cells:
    found: Cells = _one_array(column).to_numpy(zero_copy_only=False)
    return found


def _own(keys: pa.Array, part: StatePart) -> pa.Array:
    """Return a mask of the keys that belong to the task."""
    number, count = part.share
    if count > 1:
        out: Cells = np.empty(len(keys), np.int64)
        _, offsets, data = keys.buffers()
        edges = np.frombuffer(offsets, np.int32, len(keys) + 1, 4 * keys.offset).astype(np.int64)
        buf = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1, np.uint8)
        checksums(buf, edges, out)  # the same on every machine
        return pa.array(out % count == number)
    own = pa.array(np.ones(len(keys), np.bool_))
    if part.low is not None:
        own = pc.and_(own, pc.greater_equal(keys, pa.scalar(part.low, pa.binary())))
    if part.high is not None:
        own = pc.and_(own, pc.less(keys, pa.scalar(part.high, pa.binary())))
    return own


def _one_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if isinstance(column, pa.Array):
        return column
    whole = column.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole
