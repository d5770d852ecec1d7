"""Checks whether an instance may start from its files: an expelled instance has to join again first.

A start checks the recovered data with `check_membership`. `check_files` does the same without a start, for
`serve --check`: it writes nothing, and recovers the data only if the rows of `_cluster` alone do not decide.
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
from flowstone.node.wal.recovery import RecoveredBox, advice, dialect_of, recover
from flowstone.outside import Disk, Outside
from flowstone.replication.membership.membership import not_anonymous, unregistered
from flowstone.xlog.directory import ListedFile, LogDirectory
from flowstone.xlog.reader import LogFile


def check_membership(box: Box, recovered: RecoveredBox, *, is_anonymous: bool) -> None:
    """Raise TarantoolError if the instance was expelled, even if it now starts as an anonymous replica."""
    uuid = recovered.instance_uuid
    if recovered.replica_id:
        return
    was_member = any(former == uuid for _, former in box.deleted_members)
    if not is_anonymous:
        raise unregistered(uuid, recovered.replicaset_uuid, was_member=was_member)
    if was_member:
        raise not_anonymous(uuid)


async def check_files(outside: Outside, files: LogDirectory, *, is_anonymous: bool, force: bool) -> None:
    """Raise the error that a start from `files`, which include a snapshot, would raise; write nothing."""
    with advice():
        is_doubtful = await outside.blocking(_is_doubtful, outside.disk, files, is_anonymous, force)
    if not is_doubtful:
        return
    box = Box(dialect_of(files) or Dialect.V2_11)
    recovered = await recover(outside, replace(files, leftovers=()), box, force=force)  # a start deletes leftovers
    check_membership(box, recovered, is_anonymous=is_anonymous)


def _is_doubtful(disk: Disk, files: LogDirectory, is_anonymous: bool, force: bool) -> bool:
    """Return False if the start is certain to be accepted.

    It is if the logs only insert rows into `_cluster`, and the newest snapshot registers the instance, or it is
    anonymous.
    """
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
    """Return True if `_cluster` in the snapshot has the instance. Rows of a snapshot are ordered by space id."""
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
