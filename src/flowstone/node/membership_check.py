"""Checks whether an instance may start from its files: an expelled instance has to join again first.

The start checks the data that it has recovered. `check_files` finds out without a start, for `serve --check`: it writes
nothing, and recovers the data only if the rows of `_cluster` leave a doubt.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.system import CLUSTER_ID
from flowstone.iproto import scan
from flowstone.iproto.constants import Key, RequestType
from flowstone.iproto.msgpack import unpack_body
from flowstone.node.recovery import Recovered, advice, dialect_of, recover
from flowstone.outside import Disk, Outside
from flowstone.replication.membership import not_anonymous, unregistered
from flowstone.xlog.directory import ListedFile, LogDirectory
from flowstone.xlog.reader import LogFile


def check_membership(box: Box, recovered: Recovered, *, is_anonymous: bool) -> None:
    """Refuse files of an expelled instance, also for an anonymous replica; raises TarantoolError."""
    uuid = recovered.instance_uuid
    if recovered.replica_id:
        return
    was_member = any(former == uuid for _, former in box.deleted_members)
    if not is_anonymous:
        raise unregistered(uuid, recovered.replicaset_uuid, was_member=was_member)
    if was_member:
        raise not_anonymous(uuid)


async def check_files(outside: Outside, files: LogDirectory, *, is_anonymous: bool, force: bool) -> None:
    """Raise the error with which a start from `files`, which have a snapshot, would end; write nothing."""
    with advice():
        is_doubtful = await outside.blocking(_is_doubtful, outside.disk, files, is_anonymous, force)
    if not is_doubtful:
        return
    box = Box(dialect_of(files) or Dialect.V2_11)
    recovered = await recover(outside, replace(files, leftovers=()), box, force=force)  # a start deletes leftovers
    check_membership(box, recovered, is_anonymous=is_anonymous)


def _is_doubtful(disk: Disk, files: LogDirectory, is_anonymous: bool, force: bool) -> bool:
    """Return True unless it is certain that the start is not refused: no log does more to `_cluster` than insert rows,
    and the newest snapshot registers the instance, if it has to be a member."""
    snapshot = files.newest_snapshot()
    assert snapshot is not None
    if not is_anonymous and not _is_registered(disk, snapshot, force):
        return True
    for log in files.files_from(snapshot.meta.vclock, force=force):
        with LogFile.open(disk, log.path, force=force) as file:
            for slab in file.slabs():
                types = slab.cells[scan.TYPE, slab.cells[scan.SPACE_ID] == CLUSTER_ID]
                if (types != RequestType.INSERT.value).any():
                    return True
    return False


def _is_registered(disk: Disk, snapshot: ListedFile, force: bool) -> bool:
    """Return True if `_cluster` of the snapshot, whose rows are in the order of spaces, has the instance."""
    with LogFile.open(disk, snapshot.path, force=force) as file:
        for slab in file.slabs():
            spaces = slab.cells[scan.SPACE_ID]
            for row in slab.rows(np.flatnonzero(spaces == CLUSTER_ID)):
                member = unpack_body(row.body).get(Key.TUPLE)
                if isinstance(member, tuple) and str(member[1]).lower() == snapshot.meta.instance_uuid.lower():
                    return True
            if (spaces > CLUSTER_ID).any():
                return False
    return False
