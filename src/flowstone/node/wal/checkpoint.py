"""Checkpoints: write the state of the box to a `.snap` file, at intervals, by log size, or on request.

A checkpoint opens a read view, rotates the log at its position, and writes the file in slices, so that it blocks no
client. A checkpoint that fails leaves no file. `node/wal/gc.py` deletes old files.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine.read_view import ReadView
from flowstone.box.engine.space import EngineSpace
from flowstone.box.system import FIRST_USER_SPACE_ID, SEQUENCE_DATA_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.node.synchro.limbo_driver import LimboDriver
from flowstone.node.wal.gc import GarbageCollector
from flowstone.node.wal.journal import Journal
from flowstone.outside import Outside
from flowstone.outside.worker import by_worker
from flowstone.replication.limbo.control_rows import Promote, RaftState
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.writer import SnapWriter

LOG = logging.getLogger("flowstone.node")

T = TypeVar("T")

CHECKPOINT_INTERVAL = 3600.0
CHECKPOINT_WAL_THRESHOLD = 10**18

SLICE = 500
"""Tuples read from a view in one step, which takes a fraction of a millisecond."""

SLICE_WHILE_LOADING = 20_000
"""The same before clients are served. Larger, because every slice costs a round trip to a worker."""

_KEPT_ENGINES = frozenset(("memtx", "vinyl"))
"""Engines whose tuples a snapshot has to hold. Vinyl spaces are included, because in a node their tuples are in memory
only."""


class SynchroStates(NamedTuple):
    """State in a snapshot besides tuples: term and vote, and the owner of the synchronous queue."""

    raft: RaftState = RaftState(term=1)
    queue: Promote = Promote(0, 0, 0, VClock())


class Checkpointer:
    """Makes the checkpoints of a node; implements `node.instance.Files`."""

    def __init__(
        self,
        outside: Outside,
        box: Box,
        journal: Journal,
        collector: GarbageCollector,
        *,
        memtx_dir: str,
        instance_uuid: str,
        queue: LimboDriver,
        raft: Callable[[], RaftState],
        checkpoint_interval: float = CHECKPOINT_INTERVAL,
        checkpoint_wal_threshold: int = CHECKPOINT_WAL_THRESHOLD,
        refusal: Callable[[], FlowstoneError | None] = lambda: None,
    ) -> None:
        """`refusal` returns the error that forbids a checkpoint now, or None."""
        self._outside = outside
        self._box = box
        self._journal = journal
        self._collector = collector
        self._memtx_dir = memtx_dir
        self._instance_uuid = instance_uuid
        self._queue = queue
        self._raft = raft
        self._refusal = refusal
        self._interval = checkpoint_interval
        self._wal_threshold = checkpoint_wal_threshold
        self._states = SynchroStates()
        self._is_in_progress = False
        self._timer: asyncio.Task[None] | None = None
        self._by_size: asyncio.Task[None] | None = None
        self._deletion: asyncio.Task[None] | None = None

    # --- lifecycle ---

    def start(self) -> None:
        """Start periodic and size-triggered checkpoints."""
        self._journal.on_size = self._log_has_grown
        self._watch_size()
        self._schedule()

    async def stop(self) -> None:
        """Stop these tasks, and abandon a checkpoint that they have started."""
        self._journal.on_size = None
        for task in (self._timer, self._by_size, self._deletion):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._timer = self._by_size = self._deletion = None

    def reconfigure(
        self,
        *,
        checkpoint_interval: float | None = None,
        checkpoint_wal_threshold: int | None = None,
        checkpoint_count: int | None = None,
    ) -> None:
        """Apply new values of these options; None leaves an option unchanged."""
        if checkpoint_count is not None:
            self._collector.checkpoint_count = checkpoint_count
        if checkpoint_wal_threshold is not None:
            self._wal_threshold = checkpoint_wal_threshold
            self._watch_size()
        if checkpoint_interval is not None:
            self._interval = checkpoint_interval
            self._schedule()

    # --- requests of clients ---

    async def snapshot(self) -> None:
        """Make a checkpoint of the present state, and delete the files that it makes obsolete.

        Raise CheckpointInProgress if a checkpoint is running, and the error of `refusal` if it returns one.
        """
        if self._is_in_progress:
            raise errors.CheckpointInProgress("Snapshot is already in progress")
        self._check_allowed()
        # A new random delay: instances that got this request at the same time must not stay in step.
        self._schedule()
        await self._make()

    def start_backup(self, checkpoint: int) -> list[str]:
        return self._collector.start_backup(checkpoint)

    def stop_backup(self) -> None:
        """Release the files of the backup. Files that are no longer needed are deleted in the background."""
        self._collector.stop_backup()
        self._deletion = asyncio.get_running_loop().create_task(self._collector.collect())

    def gc_info(self) -> dict[str, Any]:
        return self._collector.info() | {"checkpoint_is_in_progress": self._is_in_progress}

    @property
    def gc_vclock(self) -> VClock:
        return self._collector.vclock

    # --- making a checkpoint ---

    async def _make(self) -> None:
        self._is_in_progress = True
        try:
            # No row is submitted between opening the view and rotating the log, so both have the same position. The
            # state of elections and of the queue is read when the rows before that position are written.
            with self._box.open_view() as view:
                # Read it with the view: wait only for transactions that the snapshot contains, not for later ones.
                newest = self._queue.limbo.newest
                vclock = await self._journal.rotate(self._take_states)
                states = self._states
                # Readers of a snapshot treat all its tuples as confirmed.
                await self._queue.decided(newest, self._queue.timeout)
                self._check_allowed()  # a row written in the meantime may forbid it
                checkpoints = self._collector.checkpoints
                # Without new rows, the file would have the name of the last snapshot.
                if not checkpoints or checkpoints[-1].vclock != vclock:
                    path = await write_snapshot(
                        self._outside, self._memtx_dir, view, self._box.dialect, self._instance_uuid, vclock, states
                    )
                    LOG.info("checkpoint written: %s", path)
                    self._collector.add_checkpoint(vclock)
        finally:
            self._is_in_progress = False
            # Reset after a failure, too: the next attempt follows after as many bytes again, not after every write.
            self._watch_size()
        await self._collector.collect()

    def _check_allowed(self) -> None:
        if (error := self._refusal()) is not None:
            raise error

    def _take_states(self) -> None:
        self._states = SynchroStates(self._raft(), self._queue.checkpoint())

    async def _make_unasked(self) -> None:
        if self._is_in_progress or self._refusal() is not None:
            return
        try:
            await self._make()
        except FlowstoneError as error:
            LOG.error("checkpoint failed: %s", error)

    # --- triggers ---

    def _watch_size(self) -> None:
        self._journal.size_limit = self._journal.written_bytes + self._wal_threshold

    def _log_has_grown(self) -> None:
        if not self._is_in_progress and (self._by_size is None or self._by_size.done()):
            self._by_size = asyncio.get_running_loop().create_task(self._make_unasked())

    def _schedule(self) -> None:
        """Restart the timer, unless a checkpoint is running: its task may be the timer itself."""
        if self._timer is not None:
            if self._is_in_progress:
                return
            # A changed interval takes effect at once, not after the old one has passed.
            self._timer.cancel()
            self._timer = None
        if self._interval > 0:
            self._timer = asyncio.get_running_loop().create_task(self._keep_time())

    async def _keep_time(self) -> None:
        # Instances of one machine often start together; the random delay spreads their checkpoints.
        wait = self._interval + self._outside.random.uniform(0, self._interval)
        while True:
            LOG.info("next checkpoint in %.0f s", wait)
            await self._outside.clock.sleep(wait)
            await self._make_unasked()
            wait = self._interval


async def write_snapshot(
    outside: Outside,
    memtx_dir: str,
    view: ReadView,
    dialect: Dialect,
    instance_uuid: str,
    vclock: VClock,
    states: SynchroStates,
    *,
    slice_size: int = SLICE,
) -> str:
    """Write `view` as the snapshot of `vclock` in slices of `slice_size` tuples, and return the path of the file.

    The event loop only reads the tuples of a slice; a worker encodes, compresses and writes them. If an error occurs,
    the incomplete file is removed.
    """
    meta = Meta(FileType.SNAP, instance_uuid, vclock.to_mapping(), version=dialect.version_text)
    try:
        writer = await by_worker(outside, SnapWriter, outside.disk, memtx_dir, meta, outside.clock.wall())
    except OSError as error:
        refused = error.filename if isinstance(error.filename, str) else memtx_dir
        raise WriteFailed(refused, 0, error, is_usable=False) from error
    try:
        for space in _system_first(view):
            if space is None:
                await by_worker(outside, _add_states, writer, dialect, states)
                continue
            assert space.primary is not None
            if space.id == SEQUENCE_DATA_ID:
                # The log has no rows for values that inserts took from sequences; the view computes these rows.
                await by_worker(outside, writer.add_tuples, space.id, view.sequence_rows)
                continue
            group_id = GROUP_LOCAL if space.definition.is_local else 0
            for tuples in view.slices(space.primary, slice_size):
                # An empty slice only yields control: tuples that the view hides take time to skip.
                if tuples:
                    await by_worker(outside, writer.add_tuples, space.id, tuples, group_id)
                else:
                    await outside.clock.sleep(0)
        return await by_worker(outside, writer.finish)
    except BaseException:
        with suppress(OSError):
            # Remove it after a cancellation, too: the next start would take an incomplete file for a leftover of a
            # crash.
            writer.abandon()
        raise


def _system_first(view: ReadView) -> Iterator[EngineSpace | None]:
    """Yield the spaces of a snapshot by id, with None between system and user spaces, where the state rows belong."""
    kept = [
        space
        for _, space in sorted(view.spaces.items())
        if space.primary is not None and not space.definition.is_temporary and space.definition.engine in _KEPT_ENGINES
    ]
    yield from (space for space in kept if space.id < FIRST_USER_SPACE_ID)
    yield None
    yield from (space for space in kept if space.id >= FIRST_USER_SPACE_ID)


def _add_states(writer: SnapWriter, dialect: Dialect, states: SynchroStates) -> None:
    for kind in dialect.snapshot_states:
        if kind is RequestType.RAFT:
            writer.add_row(kind, states.raft.encode(), GROUP_LOCAL)
        else:
            writer.add_row(kind, states.queue.encode())
