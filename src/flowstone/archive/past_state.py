"""The state of a log at a settled position, rebuilt in the memory of this process, and written as a snapshot.

`restore` uses it for states that fit into memory; larger ones, and tables, are built on Spark. The rows are those that
Spark writes, in the same order. Relies on the replay of nodes (`node/wal/replay.py`); never changes a file of the log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flowstone.archive.archive_log import version_of
from flowstone.box.box import Box
from flowstone.box.definitions import SpaceDefinition
from flowstone.box.dialect import Dialect
from flowstone.box.engine.index import WHOLE
from flowstone.box.engine.space import EngineSpace
from flowstone.box.system import FIRST_USER_SPACE_ID, SEQUENCE_DATA_ID
from flowstone.errors import FlowstoneError
from flowstone.iproto import scan
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.slab import Slab
from flowstone.node.wal.checkpoint import SynchroStates
from flowstone.node.wal.recovery import FLAGS_SINCE, dialect_of
from flowstone.node.wal.replay import Replay
from flowstone.outside.disk import Disk
from flowstone.replication.limbo.control_rows import RaftState
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import scan_directory
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.reader import LogFile
from flowstone.xlog.writer import SnapWriter


class CannotRebuild(FlowstoneError):
    """The log does not lead to the position, or a row of it cannot be applied."""


@dataclass
class PastState:
    """The state at `position`. `box` has the tuples; `meta` is the header of the snapshot that it was built from."""

    box: Box
    position: VClock
    meta: Meta
    states: SynchroStates

    def spaces(self) -> list[EngineSpace]:
        """Return the spaces whose tuples a snapshot has, by id."""
        kept = (space for _, space in sorted(self.box.spaces.items()) if space.primary is not None)
        return [space for space in kept if not space.definition.is_temporary]

    def definitions(self) -> list[SpaceDefinition]:
        return [space.definition for space in self.spaces()]

    def write(self, disk: Disk, directory: str, timestamp: float) -> tuple[str, dict[int, int]]:
        """Write the state as a snapshot; return its path, and the number of tuples by space."""
        meta = Meta(FileType.SNAP, self.meta.instance_uuid, self.position.to_mapping(), version=self.meta.version)
        spaces, counts = self.spaces(), dict[int, int]()
        with self.box.open_view() as view, SnapWriter(disk, directory, meta, timestamp) as writer:
            is_state_due = True
            for space in spaces:
                if is_state_due and space.id >= FIRST_USER_SPACE_ID:
                    self._add_states(writer)
                    is_state_due = False
                assert space.primary is not None
                before = writer.row_count
                if space.id == SEQUENCE_DATA_ID:
                    writer.add_tuples(space.id, view.sequence_rows)
                else:
                    group_id = GROUP_LOCAL if space.definition.is_local else 0
                    tuples = (raw for _, raw in view.source(space.primary).scan(WHOLE))
                    writer.add_tuples(space.id, tuples, group_id)
                counts[space.id] = writer.row_count - before
            if is_state_due:
                self._add_states(writer)
        return writer.path, counts

    def _add_states(self, writer: SnapWriter) -> None:
        for kind in self.box.dialect.snapshot_states:
            if kind is RequestType.RAFT:
                writer.add_row(kind, self.states.raft.encode(), GROUP_LOCAL)
            else:
                writer.add_row(kind, self.states.queue.encode())


def rebuild(disk: Disk, directory: str, snapshot: str, position: VClock) -> PastState:
    """Return the state at a settled `position`, from the file `snapshot` and the logs of `directory` after it.

    Raises:
        CannotRebuild: The logs end before the position, or a transaction is pending there.
        FlowstoneError: A file is damaged, or a row cannot be applied.
    """
    files = scan_directory(disk, directory)
    box = Box(dialect_of(files) or Dialect.V2_11)
    box.is_recovering = True
    replay = Replay(box)
    with LogFile.open(disk, snapshot) as log:
        meta = log.meta
        for slab in log.slabs():
            replay.push_snapshot(slab)
    start = VClock(meta.vclock)
    replay.start_logs(start)
    for listed in files.files_from(start.to_mapping()) if start != position else ():
        if position <= replay.vclock:
            break
        has_flags = version_of(listed.meta.version) >= FLAGS_SINCE
        replay.start_log(listed.path, VClock(listed.meta.vclock), has_flags=has_flags)
        with LogFile.open(disk, listed.path) as log:
            for slab in log.slabs():
                replay.push_log(_up_to(slab, position))
    box.is_recovering = False
    if not position <= replay.vclock or replay.pending:
        raise CannotRebuild(f"{directory}: the logs do not lead to a settled state at {position}")
    synchro = replay.synchro
    # A PROMOTE implies its term, even if the log has no Raft row for this term.
    raft = RaftState(term=synchro.term) if synchro.term > synchro.raft.term else synchro.raft
    return PastState(box, position, meta, SynchroStates(raft, synchro.promote()))


def _up_to(slab: Slab, position: VClock) -> Slab:
    """Return the rows up to `position`, which lies between two transactions."""
    origins, lsns = slab.cells[scan.REPLICA_ID], slab.cells[scan.LSN]
    limits = np.zeros(len(slab), np.int64)
    for origin in np.unique(origins).tolist():
        limits[origins == origin] = position.get(origin)
    inside = lsns <= limits
    if inside.all():
        return slab
    return replace(slab, cells=np.ascontiguousarray(slab.cells[:, inside]))
