"""The sources of a mirror: an existing directory of logs, or a live replica set through a spool.

Each source provides a growing log index. The mirror asks for its position, waits for more rows, and reports which
rows are in the lake.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from flowstone.archive.definitions_file import DefinitionRow
from flowstone.archive.events import ArchiveEvent
from flowstone.archive.events import Progress as ArchiveProgress
from flowstone.archive.events import Stopped as ArchiveStopped
from flowstone.box.schema import Schema
from flowstone.errors import FlowstoneError
from flowstone.iproto.uri import Uri
from flowstone.outside import production
from flowstone.outside.disk import DIRECTORY_MODE, AlreadyLocked
from flowstone.replication.vclock import VClock
from flowstone.spark.fold.change_frames import SliceRows
from flowstone.spark.fold.state_frames import state_frame
from flowstone.spark.index.limestone_index import is_limestone
from flowstone.spark.index.limestone_log import LimestoneLog
from flowstone.spark.index.log import Log
from flowstone.spark.index.log_index import ArchiveIndex, DataLoss
from flowstone.spark.index.slice_bytes import Transport
from flowstone.spark.mirror.batch import ArchiveJob, BatchJob, Executors
from flowstone.spark.mirror.limestone_batch import LimestoneJob
from flowstone.spark.sources.tarantool.spool import Spool

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

POLL_SECONDS: Final = 0.2


class MirrorBusy(FlowstoneError):
    """Another mirror holds the lock of the lake or the spool."""


class MirrorSource(Protocol):
    """A log and the replica set it belongs to."""

    name: str
    replicaset_uuid: str

    @property
    def index(self) -> Log:
        """The log as of this call. Cheap: the mirror reads it in every iteration."""
        ...

    def job(self, executors: Executors) -> BatchJob:
        """Return the jobs of a batch, over the log as of this call."""
        ...

    @property
    def received(self) -> VClock:
        """The position of the newest received row, settled or not."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until there may be more rows, for at most `seconds`."""
        ...

    def target(self) -> VClock:
        """Return the current position of the source, at which `--once` stops."""
        ...

    def check(self) -> None:
        """Raise the error that ended the source, if any."""
        ...

    def collect(self, position: VClock) -> None:
        """Note that all rows up to `position` are in the lake, so the source may drop them."""
        ...

    def state_of(
        self, spaces: Collection[int], position: VClock, executors: Executors
    ) -> AbstractContextManager[CurrentState]:
        """Return the rows of some spaces at or after a settled position, readable within the block."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class CurrentState:
    """Rows of a snapshot (space id, sort key, tuple), its position and time, and the definitions then in force."""

    rows: SliceRows | DataFrame
    position: VClock
    time: int
    schema: Schema


class DirectorySource:
    """An archive, a log directory of a server, or a Limestone directory. It is only read, never written.

    `is_raw`: Tsurugi's tables are shown as storages, with raw keys and values.
    """

    def __init__(self, directory: str, *, is_raw: bool = False) -> None:
        self.name = directory
        self.notes: tuple[str, ...] = ()
        """What a user should know about the tables of the directory."""
        self._index: Log
        self._make_job: Callable[[Executors], BatchJob]
        if is_limestone(directory):
            self._index = entries = LimestoneLog.open(production().disk, directory, is_raw=is_raw)
            self.notes = entries.tables_at(entries.entries.durable).notes
            self._make_job = partial(LimestoneJob, entries)
        else:
            self._index = rows = ArchiveIndex.open(production().disk, directory)
            self._make_job = partial(ArchiveJob, rows)
        self.replicaset_uuid = self._index.replicaset_uuid
        self._is_fresh = True

    @property
    def index(self) -> Log:
        self._refresh()
        return self._index

    def _refresh(self) -> None:
        if not self._is_fresh:
            self._index.refresh()
        self._is_fresh = False

    def job(self, executors: Executors) -> BatchJob:
        self._refresh()
        return self._make_job(executors)

    @property
    def received(self) -> VClock:
        return self._index.settled

    def wait(self, seconds: float) -> None:
        time.sleep(min(seconds, POLL_SECONDS))

    def target(self) -> VClock:
        return self.index.settled

    def check(self) -> None:
        pass

    def collect(self, position: VClock) -> None:
        pass

    @contextmanager
    def state_of(self, spaces: Collection[int], position: VClock, executors: Executors) -> Iterator[CurrentState]:
        log = self.index
        if isinstance(log, ArchiveIndex):
            transport: Transport = "file" if executors.transport == "file" else "inline"
            rows = state_frame(executors.spark, log, position, spaces=spaces, transport=transport)
            yield CurrentState(rows, position, log.time_at(position), log.schema_at(position).schema)
        else:
            yield _newest_state(log, self.job(executors), spaces)

    def close(self) -> None:
        pass


class LiveSource:
    """A replica set, followed through any member; the spool in `directory` holds rows that are not in the lake yet."""

    def __init__(
        self,
        members: Sequence[Uri],
        replicaset_uuid: str,
        directory: str,
        *,
        begin: VClock | None,
        definitions: Sequence[DefinitionRow] | None,
        fail_on_data_loss: bool,
        register: bool,
        on_event: Callable[[str], object],
    ) -> None:
        self.name = ",".join(member.address for member in members)
        self.replicaset_uuid = replicaset_uuid
        self._members, self._directory = members, directory

        def tell(event: ArchiveEvent) -> None:
            # The mirror reports its own progress and stop; those of its spool would only repeat them.
            if not isinstance(event, (ArchiveProgress, ArchiveStopped)):
                on_event(str(event))

        is_new = not os.path.isdir(directory) or not os.listdir(directory)
        try:
            self._spool = Spool.open(
                members,
                directory,
                begin=begin if begin is not None else "snapshot",
                definitions=definitions,
                fail_on_data_loss=fail_on_data_loss,
                register=register,
                on_event=tell,
            )
        except AlreadyLocked as error:
            raise MirrorBusy(
                f"spool {directory} is in use by another mirror",
                hint="stop the other mirror, or use another lake and --spool",
            ) from error
        except FlowstoneError:
            if is_new:  # a partial snapshot is useless, and may hold values that a mask must hide
                shutil.rmtree(directory, ignore_errors=True)
            raise

    @property
    def index(self) -> ArchiveIndex:
        return self._spool.index

    def job(self, executors: Executors) -> BatchJob:
        return ArchiveJob(self._spool.index, executors)

    @property
    def received(self) -> VClock:
        return self._spool.position

    def wait(self, seconds: float) -> None:
        self._spool.wait(min(seconds, POLL_SECONDS))

    def target(self) -> VClock:
        return self._spool.target()

    def check(self) -> None:
        self._spool.check()

    @contextmanager
    def state_of(self, spaces: Collection[int], position: VClock, executors: Executors) -> Iterator[CurrentState]:
        """Fetch a new snapshot into a spool of its own: the mirror's spool keeps only rows that are not in the lake."""
        directory = f"{self._directory}.resync"
        os.makedirs(directory, mode=DIRECTORY_MODE, exist_ok=True)
        fetched = Spool.open(self._members, directory, begin="snapshot", is_anew=True)
        try:
            state = _newest_state(fetched.index, ArchiveJob(fetched.index, executors), spaces)
            if not position <= state.position:
                raise DataLoss(
                    f"the snapshot of {self.name} is at {state.position}, but the lake is at {position}",
                    hint="that member lags or has lost rows; try again, or name another member first",
                )
            yield state
        finally:
            fetched.close()
            shutil.rmtree(directory, ignore_errors=True)

    def collect(self, position: VClock) -> None:
        self._spool.collect(position)

    def close(self) -> None:
        self._spool.close()


def _newest_state(log: Log, job: BatchJob, spaces: Collection[int]) -> CurrentState:
    """Return the rows of the newest settled snapshot."""
    snapshot = [each for each in log.snapshots if each.vclock <= log.settled][-1]
    position = snapshot.vclock
    return CurrentState(job.load(snapshot, spaces), position, log.time_of(snapshot), log.schema_at(position).schema)
