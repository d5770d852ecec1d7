"""One run of a mirror: settled changes of replica sets into the tables of a lake, batch by batch, exactly once.

It is a loop of Spark jobs. A batch lies between two settled positions with one schema in force. Executors fold its
changes, the driver commits them table by table and then saves the progress. Each table records its vclock, so after
a crash between two commits the next run skips the changes that are already there. This module never reads rows;
`batch.py` does.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal

from flowstone.archive.definitions_file import rows_of
from flowstone.archive.manifest import Lsns
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.schema import Schema, SchemaTracker
from flowstone.columns.arrow_columns import ColumnOptions
from flowstone.lake.masks import Masking
from flowstone.lake.quarantine import Quarantine, Quarantined
from flowstone.lake.table import Moment
from flowstone.lake.table_schema import LakeError
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.key_fold import upsert_rules
from flowstone.spark.index.log import BatchPlan, Log
from flowstone.spark.index.log_index import DataLoss
from flowstone.spark.index.log_runs import SnapshotFile
from flowstone.spark.index.slice_bytes import SliceServer, Transport
from flowstone.spark.lake import Lake
from flowstone.spark.lake import LakeProgress as Saved
from flowstone.spark.mirror import progress as events
from flowstone.spark.mirror.batch import BatchJob, Executors, Truncation, at
from flowstone.spark.mirror.choice import MirrorChoice, Spaces, TableChanges, changes_between, names
from flowstone.spark.mirror.field_types import FieldTypes
from flowstone.spark.mirror.sources import DirectorySource, LiveSource, MirrorSource
from flowstone.spark.mirror.start_checks import (
    Origin,
    OtherSettings,
    Source,
    WrongPlace,
    effective_types,
    first_snapshot,
    is_local,
    keeps_changes,
    lake_lock,
    local_path,
    made,
    origins_of,
    schema_of,
)
from flowstone.spark.mirror.tables import MirrorTables, check_catalog
from flowstone.spark.sources.options import LOOPBACK
from flowstone.spark.spark_session import is_one_process

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OnMisfit = Literal["quarantine", "stop"]
"""The reaction to a value that does not fit its column: null and a row in the quarantine, or the mirror stops."""

MISFIT_SECONDS: Final = 60.0
"""Interval between two reports of misfits of one field: every change may bring one."""

EXTENSIONS_MAX: Final = 1000
"""Maximum number of times that a batch is extended past a definition that changes no table."""

PROGRESS_SECONDS: Final = 1.0
"""Interval between two progress events while nothing else happens."""

BATCH_BYTES: Final = 64 << 20
"""Limit on the compressed log bytes of a batch: the driver holds the folded result in memory."""

KEEP_HOURS: Final = 168
"""Default retention of old table versions: a week, the same as Delta's default."""

VACUUM_SECONDS: Final = 24 * 3600.0
"""Longest interval between two vacuums: files expire even in a table that no longer changes."""

FIRST_VACUUM_SECONDS: Final = 3600.0
"""Delay before the first vacuum, so that it does not slow down the start."""

COLLECT_SECONDS: Final = 5.0
"""Interval between two garbage collections of a spool."""


@dataclass(frozen=True, slots=True)
class LakePlace:
    """The path of the lake, and the mirror's own directory for spooled logs and exact tuples of masked spaces."""

    lake: str
    spool: str | None = None
    storage_options: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, lake: str, spool: str | None, *, is_masked: bool, has_live: bool) -> LakePlace:
        """Return the place. Raise WrongPlace if spool and lake do not suit the sources and the masks."""
        if spool is None and is_masked:
            raise WrongPlace(
                "--mask needs --spool: the unmasked tuples are kept there, outside of the lake",
                hint="specify a directory that only the mirror can read",
            )
        if spool is None and has_live:
            if not is_local(lake):
                raise WrongPlace(f"--spool is required: {lake} is not a local path", hint="specify a local directory")
            spool = os.path.join(local_path(lake), "_flowstone_spool")
        elif spool is not None and is_masked and is_local(lake):
            inside = os.path.realpath(spool).startswith(os.path.join(os.path.realpath(local_path(lake)), ""))
            if inside:
                raise WrongPlace(
                    f"--spool {spool} is inside the lake, where it would expose the data that --mask hides",
                    hint="specify a directory outside of the lake that only the mirror can read",
                )
        return cls(lake, spool)


@dataclass(frozen=True, slots=True)
class MirrorOptions:
    """The options of `flowstone mirror`, which documents them."""

    choice: MirrorChoice = field(default_factory=MirrorChoice)
    masking: Masking = field(default_factory=Masking)
    types: ColumnOptions = field(default_factory=ColumnOptions)
    field_types: FieldTypes = field(default_factory=FieldTypes)
    retype: FieldTypes = field(default_factory=FieldTypes)
    resync: tuple[int | str, ...] = ()
    history: bool = False
    changes: bool | None = None
    """Keep change tables; None: as the lake does, and not in a new lake."""
    once: bool = False
    trigger_seconds: float = 1.0
    max_rows: int = 500_000
    register: bool = False
    fail_on_data_loss: bool = True
    compact_every: float | None = 300.0
    vacuum_after: float | None = KEEP_HOURS * 3600.0
    transport: Transport = "auto"
    transport_address: str | None = None
    catalog: str | None = None
    on_misfit: OnMisfit = "quarantine"
    raw: bool = False

    @property
    def keep_hours(self) -> int | None:
        """The retention in whole hours, as Delta counts it; rounded up so that no file is removed too early."""
        return None if self.vacuum_after is None else math.ceil(self.vacuum_after / 3600)

    @property
    def settings(self) -> dict[str, str]:
        """The settings that all tables of a lake share and that never change."""
        columns = ";".join(f"{space}={','.join(names)}" for space, names in sorted(self.choice.columns.items()))
        return {
            "history": str(self.history).lower(),
            "masks": ",".join(sorted(map(str, self.masking.masks))),
            "mask_fingerprint": self.masking.fingerprint,
            "columns": columns,
            "types": f"{self.types.unsigned_as},{self.types.decimal_scale},{self.types.strings_as}",
            "excluded": ",".join(map(str, self.choice.excluded)),
            "field_types": self.field_types.setting,
            "changes": str(bool(self.changes)).lower(),
            "raw": "true" if self.raw else "",
        }


@dataclass
class _Stream:
    """One replica set being mirrored. `position` is None until its first rows are in the lake."""

    source: MirrorSource
    position: VClock | None = None
    spaces: Spaces = field(default_factory=dict)
    target: VClock | None = None
    collected_at: float = 0.0

    @property
    def uuid(self) -> str:
        return self.source.replicaset_uuid

    @property
    def is_done(self) -> bool:
        """True once the target is mirrored. Rows that still wait for a quorum do not count: they may never get one."""
        if self.target is None or self.position is None:
            return False
        is_received = self.target <= self.source.received
        return self.target <= self.position or (is_received and self.position == self.source.index.settled)


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch, the mirrored spaces at its end, and what it does to their tables besides changing rows."""

    plan: BatchPlan
    spaces: Spaces
    changes: TableChanges
    truncated: Mapping[int, Truncation]

    @property
    def affects_tables(self) -> bool:
        return bool(self.changes or self.truncated)


@dataclass
class _MisfitReport:
    """Misfits of one field and reason: the number since the last report, and its monotonic time."""

    unsaid: int = 0
    said_at: float | None = None


class MirrorRun:
    """One run of a mirror: from opening the lake until `stopping` is set or, with `once`, until the lake has caught up.

    A source is the members of a replica set, or a directory.
    """

    def __init__(
        self,
        spark: SparkSession,
        sources: Sequence[Source],
        place: LakePlace,
        options: MirrorOptions,
        *,
        on_event: Callable[[events.MirrorEvent], object] = lambda event: None,
        stopping: threading.Event | None = None,
    ) -> None:
        self._spark = spark
        self._places = sources
        self._place = place
        self._options = options
        self._tell = on_event
        self._stopping = stopping if stopping is not None else threading.Event()
        self._meter = events.Meter(time.monotonic())
        self._streams: list[_Stream] = []
        self._told_at = 0.0
        self._compacted_at = time.monotonic()
        self._vacuum_at = self._compacted_at + FIRST_VACUUM_SECONDS
        self._touched: set[str] = set()
        self._misfits: dict[tuple[str, str, str], _MisfitReport] = {}

    def run(self) -> events.MirrorStopped:
        """Run until `stopping` is set; with `once`, until the lake has all rows that the sources have at the start."""
        begun = time.monotonic()
        with ExitStack() as stack:
            stack.enter_context(lake_lock(self._place.lake))
            self._open(stack)
            for stream in self._streams:
                self._resync(stream)
            self._loop()
        seconds = time.monotonic() - begun
        done = events.MirrorStopped(self._positions, self._meter.changes, self._meter.batches, round(seconds, 3))
        self._tell(done)
        return done

    @property
    def _positions(self) -> dict[str, Lsns]:
        return events.lsns({each.uuid: each.position for each in self._streams if each.position is not None})

    # --- the beginning ---

    def _open(self, stack: ExitStack) -> None:
        lake = Lake.open(
            self._place.lake,
            spark=self._spark,
            storage_options=self._place.storage_options,
            several_sets=len(self._places) > 1,
            keep_hours=self._options.keep_hours or KEEP_HOURS,
        )
        if self._options.catalog is not None and lake.engine != "spark":
            raise OtherSettings(
                "--catalog needs the Delta jars, which the Spark session does not have",
                hint="add --conf spark.jars.packages=io.delta:delta-spark_4.0_2.13:…, or omit --catalog",
            )
        if self._options.catalog is not None:
            check_catalog(self._spark, self._options.catalog)
        saved = lake.progress
        quarantine = Quarantine(lake.path, lake.storage_options, self._note_misfits, self._meter.healed)
        origins = origins_of(self._places, self._place.lake, self._options, saved)
        exact = self._make_directories(origins, stack)
        self._options = replace(
            self._options,
            field_types=effective_types(self._options, saved, self._place.lake),
            changes=keeps_changes(self._options, saved),
        )
        self._lake, self._quarantine = lake, quarantine
        quarantine.roll_back({uuid: each.position for uuid, each in saved.items()}, lake.all_tables)
        self._meter.quarantine_rows = quarantine.open_count()
        if self._meter.quarantine_rows:
            self._heal()
        if self._options.on_misfit == "quarantine":
            lake.quarantine = quarantine
        self._tables = MirrorTables(
            self._spark,
            lake,
            exact,
            self._options.masking,
            self._options.choice,
            types=self._options.types,
            field_types=self._options.field_types,
            history=self._options.history,
            changes=bool(self._options.changes),
            catalog=self._options.catalog,
            on_event=self._tell,
        )
        self._retype(saved)
        self._executors = self._make_executors(stack)
        for origin in origins:
            stream = self._open_source(origin, saved.get(origin.replicaset_uuid))
            stack.callback(stream.source.close)
            self._streams.append(stream)
        self._tell(events.MirrorOpened(self._place.lake, self._positions, sorted(lake.tables())))
        if self._options.once:
            for stream in self._streams:
                stream.target = stream.source.target()

    def _heal(self) -> None:
        """Finish the healing that a crash interrupted after a table was rewritten."""
        for table in self._lake.tables().values():
            self._quarantine.heal(table)

    def _retype(self, saved: Mapping[str, Saved]) -> None:
        """Give tables their declared types, from `--retype` or from an earlier start that did not finish.

        The types are saved first, so that a start without `--retype` finishes what a crash interrupted.
        """
        settings = {"field_types": self._options.field_types.setting}
        for each in saved.values():
            if each.settings.get("field_types", "") != settings["field_types"]:
                self._lake.save(replace(each, settings={**each.settings, **settings}))
        if saved:
            self._tables.retype()

    def _make_directories(self, origins: Sequence[Origin], stack: ExitStack) -> Lake | None:
        """Create the mirror's own directories and return the lake of exact tuples, or None if it needs none.

        The directories are private because the spool holds `_user`.
        """
        live = [each.replicaset_uuid for each in origins if not isinstance(each.source, DirectorySource)]
        is_masked = bool(self._options.masking)
        if not (live or is_masked):
            return None
        spool = self._place.spool
        assert spool is not None, "live sources and masks have a spool"
        exact = os.path.join(spool, "exact")
        within = [os.path.join(spool, uuid) for uuid in live] + ([exact] if is_masked else [])
        stack.enter_context(made(spool, *within, is_private=True))
        return Lake.open(exact, spark=self._spark, several_sets=len(self._places) > 1) if is_masked else None

    def _make_executors(self, stack: ExitStack) -> Executors:
        """Describe the executors, with a slice server if they may need one.

        The server listens on the address at which executors reach the driver unless an address is configured.
        """
        context = self._spark.sparkContext
        transport, server = self._options.transport, None
        if transport == "auto" and is_one_process(context.master or ""):
            transport = "file"
        if transport in ("auto", "tcp"):
            driver = context.getConf().get("spark.driver.host")
            server = SliceServer(self._options.transport_address or driver or LOOPBACK)
            stack.callback(server.close)
        return Executors(self._spark, int(context.defaultParallelism), transport, server)

    def _open_source(self, origin: Origin, known: Saved | None) -> _Stream:
        if isinstance(origin.source, DirectorySource):
            stream = _Stream(origin.source)
            for note in origin.source.notes:
                self._tell(events.SourceStatus(origin.replicaset_uuid, note))
        else:
            uuid = origin.replicaset_uuid
            assert self._place.spool is not None, "live sources have a spool"
            source = LiveSource(
                origin.source,
                uuid,
                os.path.join(self._place.spool, uuid),
                begin=known.position if known is not None else None,
                definitions=known.definitions if known is not None else None,
                fail_on_data_loss=self._options.fail_on_data_loss,
                register=self._options.register,
                on_event=lambda message: self._tell(events.SourceStatus(uuid, message)),
            )
            stream = _Stream(source)
        if known is not None:
            schema = schema_of(known.definitions)
            found = {space_id: schema.get(space_id) for space_id in known.tables}
            stream.position = known.position
            stream.spaces = {space_id: space for space_id, space in found.items() if space is not None}
        return stream

    # --- the loop ---

    def _loop(self) -> None:
        while not self._stopping.is_set():
            begun = time.monotonic()
            has_moved = False
            for stream in self._streams:
                stream.source.check()
                if not stream.is_done and not self._stopping.is_set():
                    has_moved |= self._turn(stream)
            if self._options.once and all(stream.is_done for stream in self._streams):
                self._report(force=True)
                self._tell(events.MirrorCaughtUp(self._positions))
                self._run_maintenance(is_end=True)
                return
            self._run_maintenance()
            if has_moved and self._is_behind():
                continue  # more rows are already settled
            self._rest(begun, has_moved=has_moved)

    def _is_behind(self) -> bool:
        return any(each.position is not None and each.position != each.source.index.settled for each in self._streams)

    def _rest(self, begun: float, *, has_moved: bool) -> None:
        """Wait for new rows, or, after a batch, for the rest of the trigger interval."""
        if not has_moved:
            self._meter.idle()
            self._report()
            self._streams[0].source.wait(0.2)
        while has_moved and not self._stopping.is_set():
            left = begun + self._options.trigger_seconds - time.monotonic()
            if left <= 0:
                return
            self._report()
            self._stopping.wait(min(left, 0.2))

    def _report(self, *, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._told_at < PROGRESS_SECONDS:
            return
        self._told_at = now
        positions = {each.uuid: each.position for each in self._streams if each.position is not None}
        known = {each.uuid: each.source.index.settled for each in self._streams}
        self._tell(self._meter.progress(now, positions, known))

    def _turn(self, stream: _Stream) -> bool:
        """Load the snapshot or mirror one batch. Return True if there was anything to do."""
        job = stream.source.job(self._executors)
        if stream.position is None:
            self._begin(stream, job, first_snapshot(job.log, is_history=self._options.history))
            return True
        try:
            batch = self._next_batch(stream, stream.position, job)
        except DataLoss as error:
            if self._options.fail_on_data_loss:
                raise
            self._tell(events.MirrorDataLoss(stream.uuid, str(error)))
            self._begin(stream, job, _snapshot_behind(job.log, stream.position, error))
            return True
        if batch is None:
            return False
        self._mirror(stream, batch, job)
        return True

    def _next_batch(self, stream: _Stream, start: VClock, job: BatchJob) -> _Batch | None:
        """Return the next batch, or None if there are no rows. Definitions that do not affect tables do not end it."""
        most = self._options.max_rows
        batch = self._batch_of(stream, job, job.log.plan(start, max_rows=most, max_bytes=BATCH_BYTES))
        if batch.plan.end == start:
            return None
        for _ in range(EXTENSIONS_MAX):
            end, left = batch.plan.end, most - batch.plan.row_count
            if batch.affects_tables or left <= 0 or end == job.log.settled:
                break
            following = self._batch_of(stream, job, job.log.plan(end, max_rows=left, max_bytes=BATCH_BYTES))
            if following.plan.end == end or following.affects_tables:
                break
            batch = replace(following, plan=batch.plan.extended(following.plan))
        return batch

    def _batch_of(self, stream: _Stream, job: BatchJob, plan: BatchPlan) -> _Batch:
        spaces = self._options.choice.spaces_of(plan.definitions.schema, stream.spaces)
        truncated = job.truncations(plan.start, plan.end, stream.spaces.keys() | spaces.keys())
        return _Batch(plan, spaces, changes_between(stream.spaces, spaces), truncated)

    # --- snapshots ---

    def _begin(self, stream: _Stream, job: BatchJob, snapshot: SnapshotFile | None) -> None:
        """Replace the tables with the state of a snapshot. Without one they start empty: the log is complete."""
        index = job.log
        position = snapshot.vclock if snapshot is not None else index.earliest
        self._tell(events.MirrorSnapshot(stream.uuid, position.to_mapping()))
        begun = time.monotonic()
        tracker = index.schema_at(position)
        choice = self._options.choice
        if stream.position is None:
            choice.check(index.schema_at(index.settled).schema)
        spaces = choice.spaces_of(tracker.schema, stream.spaces)
        changes = changes_between(stream.spaces, spaces)
        self._check_masks(changes)
        time_us = index.time_of(snapshot) if snapshot is not None else index.time_at(position)
        self._tables.drop(changes.dropped, stream.uuid, position, time_us)
        rows = 0
        if spaces and snapshot is not None:
            loaded = job.load(snapshot, spaces)
            rows = self._tables.load(loaded, spaces, stream.uuid, position, time_us)
        self._tables.leave(changes.renamed, spaces, stream.uuid, position, time_us)
        self._tables.finish(stream.uuid, position)
        self._tables.list_tables(time_us)
        self._save(stream, position, tracker, spaces, time_us)
        self._meter.batch(time.monotonic(), time.monotonic() - begun, None)
        self._tell(events.MirrorSnapshot(stream.uuid, position.to_mapping(), rows))
        self._report(force=True)

    def _resync(self, stream: _Stream) -> None:
        """Replace the tables of `--resync` by the current rows of their spaces.

        A table may then be ahead of the others: its changes up to the new position are skipped, as after a crash.
        """
        chosen = {
            space_id: space
            for space_id, space in stream.spaces.items()
            if any(names(each, space) for each in self._options.resync)
        }
        if not chosen or stream.position is None:
            return
        with stream.source.state_of(sorted(chosen), stream.position, self._executors) as state:
            for space in chosen.values():
                now = state.schema.get(space.id)
                if now is None or (now.name, now.shape) != (space.name, space.shape):
                    raise LakeError(
                        f"space {space.name!r} has another definition now than in the lake",
                        hint="mirror without --resync until the lake has caught up, then try again",
                    )
            self._tables.load(state.rows, chosen, stream.uuid, state.position, state.time, is_forced=True)
        self._touched |= {space.name for space in chosen.values()}
        for space in chosen.values():
            self._tell(events.MirrorTable(space.name, "resynced", f"at {state.position}"))
        self._tables.list_tables(state.time)

    # --- batches ---

    def _mirror(self, stream: _Stream, batch: _Batch, job: BatchJob) -> None:
        """Commit a batch to the tables, then save the progress."""
        plan, spaces, changes, truncated = batch.plan, batch.spaces, batch.changes, batch.truncated
        start, end, time_us = plan.start, plan.end, plan.time
        begun = time.monotonic()
        self._check_masks(changes)
        rekeyed = [now for was, now in changes.altered if key_parts(was) != key_parts(now)]
        for space in rekeyed:
            if job.has_two_keys(start, end, space.id, truncated.get(space.id)):
                raise LakeError(
                    f"transaction after {start} changes both the primary key of space {space.name!r} and its"
                    " rows, which tables do not support",
                    hint="mirror into a new lake, from a snapshot taken after that transaction",
                )
        if changes.created:
            self._check_created(stream, job.log.schema_at(start).schema, changes.created, start)
        self._tables.drop(changes.dropped, stream.uuid, end, time_us)
        self._tables.rename(changes.renamed, stream.uuid, start, Moment(end.signature, at(time_us)))
        rules = upsert_rules(job.log.server_version)
        targets = self._tables.targets(spaces, stream.uuid, truncated, rules, created=changes.created)
        folded = job.run(start, end, targets, plan.row_count)
        newest = None
        versions = self._tables.create(changes.created, stream.uuid, end, folded, truncated)
        for space_id, space in spaces.items():
            found, version = folded.get(space_id), versions.get(space_id)
            if version is None:
                is_altered = any(now.id == space_id for _, now in changes.altered)
                truncation = truncated.get(space_id)
                version = self._tables.commit(
                    space, found, stream.uuid, end, truncation=truncation, is_altered=is_altered
                )
            if version is None:
                continue
            self._touched.add(space.name)
            count = found.change_count if found is not None else 0
            self._meter.table(time.monotonic(), space.name, count, version)
            if found is not None and found.newest is not None:
                newest = max(newest or 0, found.newest)
        self._tables.finish(stream.uuid, end)
        if changes:
            self._tables.list_tables(time_us)
        self._save(stream, end, plan.definitions, spaces, time_us)
        now = time.monotonic()
        lag = None if newest is None else max(0.0, time.time() - newest / 1e6)
        self._meter.batch(now, now - begun, lag if lag is not None else self._meter.lag)
        self._report(force=now - begun > PROGRESS_SECONDS)

    def _check_masks(self, changes: TableChanges) -> None:
        """Raise WrongMask if a change of definitions would unmask a value."""
        for was, now in (*changes.renamed, *changes.altered):
            self._options.masking.follow(was, now)

    def _check_created(
        self, stream: _Stream, before: Schema, created: Sequence[SpaceDefinition], start: VClock
    ) -> None:
        """Raise OtherSettings if a rename adds a space that already has rows: those rows are not in the lake."""
        for space in created:
            was = before.get(space.id)
            if was is not None and was.primary_key is not None and space.id not in stream.spaces:
                raise OtherSettings(
                    f"space {was.name!r} is renamed to {space.name!r} after {start}, and its rows are not in the lake",
                    hint=f"skip it with --exclude {space.id}, or mirror into a new lake",
                )

    def _save(self, stream: _Stream, position: VClock, tracker: SchemaTracker, spaces: Spaces, time_us: int) -> None:
        tables = {space_id: space.name for space_id, space in spaces.items()}
        self._lake.save(Saved(stream.uuid, position, time_us, rows_of(tracker), tables, self._options.settings))
        stream.position, stream.spaces = position, spaces
        now = time.monotonic()
        if now - stream.collected_at > COLLECT_SECONDS:
            stream.collected_at = now
            stream.source.collect(position)

    def _note_misfits(self, added: Sequence[Quarantined]) -> None:
        """Count misfits, and report the misfits of each field at most once in MISFIT_SECONDS."""
        now = time.monotonic()
        for each in added:
            self._meter.misfits(each.space, each.count)
            place = (each.space, each.field, each.reason)
            report = self._misfits.setdefault(place, _MisfitReport())
            report.unsaid += each.count
            if report.said_at is None or now - report.said_at >= MISFIT_SECONDS:
                self._tell(events.MirrorMisfits(each.space, each.field, each.reason, report.unsaid, each.key))
                report.unsaid, report.said_at = 0, now

    # --- house-keeping ---

    def _run_maintenance(self, *, is_end: bool = False) -> None:
        """Compact and vacuum the tables that are due.

        At the end of a run with `once` all tables are due, because the next run may be just as short.
        """
        now = time.monotonic()
        every, hours = self._options.compact_every, self._options.keep_hours
        if every is not None and (is_end or now - self._compacted_at >= every):
            self._compacted_at = now
            self._tables.compact(sorted(self._touched))
            self._touched.clear()
        if hours is not None and (is_end or now >= self._vacuum_at):
            self._vacuum_at = now + min(hours * 3600.0, VACUUM_SECONDS)
            self._tables.vacuum(hours)


def key_parts(space: SpaceDefinition) -> tuple[object, ...]:
    return space.primary_key.parts if space.primary_key is not None else ()


def _snapshot_behind(log: Log, position: VClock, loss: DataLoss) -> SnapshotFile:
    """Return the newest settled snapshot, which replaces the lost rows. Raise DataLoss if none is after `position`."""
    settled = [each for each in log.snapshots if each.vclock <= log.settled and position <= each.vclock]
    if not settled or settled[-1].vclock == position:
        raise DataLoss(loss.message, hint="no snapshot replaces these rows yet; take one, then restart the mirror")
    return settled[-1]
