"""A snapshot that is being received from the upstream: it becomes a `.snap` file when it is complete.

All calls block on the disk; call them from one worker at a time. An unfinished snapshot leaves no file.
"""

from __future__ import annotations

import posixpath
from uuid import UUID

import numpy as np

from flowstone.archive.encoded_rows import snapshot_rows
from flowstone.box.system import FIRST_USER_SPACE_ID, SCHEMA_ID
from flowstone.errors import RemoteProtocolError
from flowstone.iproto import scan
from flowstone.iproto.constants import GROUP_LOCAL, RequestType
from flowstone.iproto.msgpack import unpack
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.outside.disk import Disk
from flowstone.replication.vclock import VClock
from flowstone.xlog.meta import FileType, Meta, file_name
from flowstone.xlog.reader import LogFile
from flowstone.xlog.writer import SnapWriter

REPLICASET_KEYS = ("cluster", "replicaset_uuid")
"""Keys of `_schema` with the UUID of the replica set, up to 2.11 and since 3.0."""


class IncomingSnapshot:
    """The snapshot at `vclock`. `replicaset_uuid` is known after its system spaces are received."""

    def __init__(
        self, disk: Disk, directory: str, *, instance_uuid: str, vclock: VClock, version: str, timestamp: float
    ) -> None:
        self.vclock = vclock
        self.row_count = 0
        self.replicaset_uuid: UUID | None = None
        self._timestamp = timestamp
        self._states: list[Row] = []
        self._writer: SnapWriter | None = None
        lsns = vclock.to_mapping()
        self.path = posixpath.join(directory, file_name(lsns, FileType.SNAP))
        if disk.kind(self.path) is None:  # otherwise the archive already has the snapshot of this position
            meta = Meta(FileType.SNAP, instance_uuid, lsns, version=version)
            self._writer = SnapWriter(disk, directory, meta, timestamp)

    def meta(self, row: Row) -> None:
        """Add a RAFT or PROMOTE row. These rows are written between the system spaces and the user spaces."""
        self._states.append(row)

    def add(self, slab: Slab) -> None:
        """Add rows of spaces, in the order of a snapshot. Raise RemoteProtocolError if a row is not an INSERT."""
        cells = slab.cells
        space_ids = cells[scan.SPACE_ID]
        if (cells[scan.TYPE] != RequestType.INSERT).any() or (space_ids < 0).any():
            raise RemoteProtocolError(f"invalid snapshot from {slab.path}: row is not an INSERT")
        self._learn(slab)
        of_users = np.flatnonzero(space_ids >= FIRST_USER_SPACE_ID)
        first = int(of_users[0]) if len(of_users) else len(slab)
        self._put(slab, 0, first)
        if first < len(slab):
            self._put_states()
        self._put(slab, first, len(slab))
        self.row_count += len(slab)

    def finish(self) -> str:
        """Publish the file under its name, durably, and return its path."""
        self._put_states()
        return self._writer.finish() if self._writer is not None else self.path

    def abandon(self) -> None:
        """Delete an unfinished file. No effect after `finish`."""
        if self._writer is not None:
            self._writer.abandon()

    def _put(self, slab: Slab, first: int, stop: int) -> None:
        if self._writer is not None:
            for rows, count in snapshot_rows(slab, first, stop, self._writer.row_count, self._timestamp):
                self._writer.add_encoded(rows, count)

    def _put_states(self) -> None:
        states, self._states = self._states, []
        if self._writer is None:
            return
        for row in states:
            self._writer.add_row(RequestType(row.type), row.body, GROUP_LOCAL if row.type == RequestType.RAFT else 0)

    def _learn(self, slab: Slab) -> None:
        if self.replicaset_uuid is None:
            self.replicaset_uuid = replicaset_uuid_in(slab)


def replicaset_uuid_of(disk: Disk, path: str) -> UUID | None:
    """Return the replica set UUID in a snapshot file; None if it has none."""
    with LogFile.open(disk, path) as log:
        return next((uuid for slab in log.slabs() if (uuid := replicaset_uuid_in(slab)) is not None), None)


def replicaset_uuid_in(slab: Slab) -> UUID | None:
    """Return the replica set UUID if the rows of `_schema` in `slab` have it."""
    for number in np.flatnonzero(slab.cells[scan.SPACE_ID] == SCHEMA_ID).tolist():
        at, end = int(slab.cells[scan.TUPLE_AT, number]), int(slab.cells[scan.TUPLE_END, number])
        pair = unpack(slab.payload[at:end]) if at >= 0 else ()
        if isinstance(pair, tuple) and len(pair) > 1 and pair[0] in REPLICASET_KEYS:
            return UUID(str(pair[1]))
    return None
