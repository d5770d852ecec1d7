"""Checkpoints: the state of the box as a `.snap` file, by time, by size of the log, or on request.

Reads a view of the moment it begins, ends the log at that position, and writes the file in slices, so that nobody waits
for it. A checkpoint that fails leaves everything as it was. What becomes of older files is `node/gc.py`'s part.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.read_view import ReadView
from flowstone.box.space import Space
from flowstone.box.system import FIRST_USER_SPACE_ID, SEQUENCE_DATA_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.node.gc import GarbageCollector
from flowstone.node.journal import Journal
from flowstone.node.settling import settle_indexes
from flowstone.node.synchro_queue import SynchroQueue
from flowstone.outside import Outside
from flowstone.outside.worker import by_worker
from flowstone.replication.synchro import Promote, RaftState
from flowstone.replication.vclock import VClock
from flowstone.xlog.errors import WriteFailed
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.writer import SnapWriter

LOG = logging.getLogger("flowstone.node")

T = TypeVar("T")

CHECKPOINT_INTERVAL = 3600.0
CHECKPOINT_WAL_THRESHOLD = 10**18

SLICE = 500
"""Tuples that are taken from a view at once: a fraction of a millisecond."""

SLICE_WHILE_LOADING = 20_000
"""The same while nobody is served yet: each slice costs a way to a worker and back."""

_KEPT_ENGINES = frozenset(("memtx", "vinyl"))
"""Others have no tuples of their own. Vinyl's are in memory here, and nowhere else."""


class States(NamedTuple):
    """What a snapshot keeps besides tuples: term and vote, and whose the queue of synchronous transactions is."""

    raft: RaftState = RaftState(term=1)
    queue: Promote = Promote(0, 0, 0, VClock())


class Checkpointer:
    """Makes the checkpoints of a node and keeps the files that they need: `node.instance.Files`."""

    def __init__(
        self,
        outside: Outside,
        box: Box,
        journal: Journal,
        collector: GarbageCollector,
        *,
        memtx_dir: str,
        instance_uuid: str,
        queue: SynchroQueue,
        raft: Callable[[], RaftState],
        checkpoint_interval: float = CHECKPOINT_INTERVAL,
        checkpoint_wal_threshold: int = CHECKPOINT_WAL_THRESHOLD,
        refusal: Callable[[], FlowstoneError | None] = lambda: None,
    ) -> None:
        """`refusal` returns why no checkpoint may be made, or None."""
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
        self._states = States()
        self._is_in_progress = False
        self._timer: asyncio.Task[None] | None = None
        self._by_size: asyncio.Task[None] | None = None
        self._deletion: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None

    # --- life ---

    def start(self) -> None:
        """Begins to make checkpoints by time and by size, and to keep the indexes in order that these read."""
        self._journal.on_size = self._log_has_grown
        self._watch_size()
        self._schedule()
        self._settling = asyncio.get_running_loop().create_task(settle_indexes(self._outside, self._box))

    async def stop(self) -> None:
        """Ends that; a checkpoint in progress is abandoned."""
        self._journal.on_size = None
        for task in (self._timer, self._by_size, self._deletion, self._settling):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        self._timer = self._by_size = self._deletion = self._settling = None

    def reconfigure(
        self,
        *,
        checkpoint_interval: float | None = None,
        checkpoint_wal_threshold: int | None = None,
        checkpoint_count: int | None = None,
    ) -> None:
        """Takes new values of these options into use; None leaves one as it is."""
        if checkpoint_count is not None:
            self._collector.checkpoint_count = checkpoint_count
        if checkpoint_wal_threshold is not None:
            self._wal_threshold = checkpoint_wal_threshold
            self._watch_size()
        if checkpoint_interval is not None:
            self._interval = checkpoint_interval
            self._schedule()

    # --- what clients ask for ---

    async def snapshot(self) -> None:
        """Returns when there is a checkpoint of now, and what it made superfluous is gone."""
        if self._is_in_progress:
            raise errors.CheckpointInProgress("Snapshot is already in progress")
        self._check_allowed()
        # Instances that are all told to make a snapshot would from then on make them together.
        self._schedule()
        await self._make()

    def start_backup(self, checkpoint: int) -> list[str]:
        return self._collector.start_backup(checkpoint)

    def stop_backup(self) -> None:
        """Lets go of the files; those that are too old by now are deleted soon."""
        self._collector.stop_backup()
        self._deletion = asyncio.get_running_loop().create_task(self._collector.collect())

    def gc_info(self) -> dict[str, Any]:
        return self._collector.info() | {"checkpoint_is_in_progress": self._is_in_progress}

    @property
    def gc_vclock(self) -> VClock:
        return self._collector.vclock

    # --- making one ---

    async def _make(self) -> None:
        self._is_in_progress = True
        try:
            # View and position are of one moment: no row is submitted between these lines. What rows on their way to
            # the disk say of elections and of the queue is part of it, once they are there.
            with self._box.open_view() as view:
                newest = self._queue.limbo.newest
                vclock = await self._journal.rotate(self._take_states)
                states = self._states
                # A snapshot says of all that it holds that it is a fact.
                await self._queue.decided(newest, self._queue.timeout)
                self._check_allowed()  # a row that was being written meanwhile may forbid it
                checkpoints = self._collector.checkpoints
                if not checkpoints or checkpoints[-1].vclock != vclock:
                    path = await write_snapshot(
                        self._outside, self._memtx_dir, view, self._box.dialect, self._instance_uuid, vclock, states
                    )
                    LOG.info("checkpoint %s", path)
                    self._collector.add_checkpoint(vclock)
        finally:
            self._is_in_progress = False
            self._watch_size()
        await self._collector.collect()

    def _check_allowed(self) -> None:
        if (error := self._refusal()) is not None:
            raise error

    def _take_states(self) -> None:
        self._states = States(self._raft(), self._queue.checkpoint())

    async def _make_unasked(self) -> None:
        if self._is_in_progress or self._refusal() is not None:
            return
        try:
            await self._make()
        except FlowstoneError as error:
            LOG.error("checkpoint failed: %s", error)

    # --- when ---

    def _watch_size(self) -> None:
        self._journal.size_limit = self._journal.written_bytes + self._wal_threshold

    def _log_has_grown(self) -> None:
        if not self._is_in_progress and (self._by_size is None or self._by_size.done()):
            self._by_size = asyncio.get_running_loop().create_task(self._make_unasked())

    def _schedule(self) -> None:
        """Starts the clock anew, unless it is just being served."""
        if self._timer is not None:
            if self._is_in_progress:
                return
            self._timer.cancel()
            self._timer = None
        if self._interval > 0:
            self._timer = asyncio.get_running_loop().create_task(self._keep_time())

    async def _keep_time(self) -> None:
        # Instances of one machine start together, and should not make their checkpoints so.
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
    states: States,
    *,
    slice_size: int = SLICE,
) -> str:
    """Writes what `view` shows as the snapshot of `vclock`, piece by piece, and returns its path.

    The loop is held only to take a slice of tuples; encoding, compression and disk are a worker's. If anything goes
    wrong nothing of the file remains.
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
                # Numbers that inserts have taken are in no row of the log: this is where they are kept.
                await by_worker(outside, writer.add_tuples, space.id, view.sequence_rows)
                continue
            group_id = GROUP_LOCAL if space.definition.is_local else 0
            for tuples in view.slices(space.primary, slice_size):
                if tuples:
                    await by_worker(outside, writer.add_tuples, space.id, tuples, group_id)
                else:
                    await outside.clock.sleep(0)
        return await by_worker(outside, writer.finish)
    except BaseException:
        with suppress(OSError):
            writer.abandon()
        raise


def _system_first(view: ReadView) -> Iterator[Space | None]:
    """The spaces of a snapshot by id; None stands where its rows of other types belong."""
    kept = [
        space
        for _, space in sorted(view.spaces.items())
        if space.primary is not None and not space.definition.is_temporary and space.definition.engine in _KEPT_ENGINES
    ]
    yield from (space for space in kept if space.id < FIRST_USER_SPACE_ID)
    yield None
    yield from (space for space in kept if space.id >= FIRST_USER_SPACE_ID)


def _add_states(writer: SnapWriter, dialect: Dialect, states: States) -> None:
    for kind in dialect.snapshot_states:
        if kind is RequestType.RAFT:
            writer.add_row(kind, states.raft.encode(), GROUP_LOCAL)
        else:
            writer.add_row(kind, states.queue.encode())
