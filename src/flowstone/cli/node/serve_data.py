"""Checks whether the options of a node match its directories and the data in them.

Both `serve` and `serve --check` use it, so that they report the same problems in the same words. Each problem is a
UsageError, because it would persist at the next start. Reads file names and headers only, and writes nothing; damage is
left to the recovery.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from uuid import UUID

from flowstone.box.bootstrap import bootstrap_rows
from flowstone.box.dialect import Dialect
from flowstone.cli.console import UsageError
from flowstone.iproto.errors import TarantoolError
from flowstone.node.configuration import Configuration
from flowstone.node.wal.recovery import dialect_of, find_files, is_empty
from flowstone.outside import production
from flowstone.xlog.directory import LogDirectory


class DataPlace:
    """The directories that a configuration names."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self.wal_dir = os.path.normpath(os.path.join(configuration.work_dir, configuration.wal_dir))
        self.memtx_dir = os.path.normpath(os.path.join(configuration.work_dir, configuration.memtx_dir))

    def missing(self) -> Iterator[str]:
        """Yield the directories that a start would create; raise UsageError if one cannot be created or accessed."""
        for path in dict.fromkeys((self.wal_dir, self.memtx_dir)):
            if os.path.isdir(path):
                if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                    hint = "change its owner to the user that runs the node"
                    raise UsageError(f"cannot access {path}: permission denied", hint=hint)
                continue
            parent = _existing(path)
            if not os.path.isdir(parent):
                raise UsageError(f"cannot create {path}: {parent} is not a directory", hint="choose another work_dir")
            if not os.access(parent, os.W_OK | os.X_OK):
                hint = "change its owner to the user that runs the node, or choose another work_dir"
                raise UsageError(f"cannot create {path}: {parent} is not writable", hint=hint)
            yield path

    def files(self) -> LogDirectory | None:
        """Return the snapshots and logs; None if there is no data to recover."""
        if not os.path.isdir(self.memtx_dir) or not os.path.isdir(self.wal_dir):
            return None
        files = find_files(production().disk, self.memtx_dir, self.wal_dir)
        return None if is_empty(files) else files

    def check(self, files: LogDirectory | None, user: tuple[str, str] | None) -> None:
        """Raise UsageError if the options, or the first user, do not match these files."""
        if files is None:
            self._check_birth(user)
            return
        snapshot = files.newest_snapshot()
        if snapshot is not None:
            self._check_identity(snapshot.meta.instance_uuid, dialect_of(files))

    def _check_birth(self, user: tuple[str, str] | None) -> None:
        wanted = self._configuration
        if wanted.read_only and not wanted.replication:
            hint = "unset read_only for the first start, or set replication to join other members"
            raise UsageError(f"read_only is set, but there is no data in {self.memtx_dir} yet", hint=hint)
        if user is not None:
            dialect = Dialect(wanted.dialect) if wanted.dialect is not None else Dialect.V2_11
            for _ in bootstrap_rows(dialect, UUID(int=0), UUID(int=0), (user[0], b"")):
                pass  # raises if the name is not allowed

    def _check_identity(self, instance_uuid: str, dialect: Dialect | None) -> None:
        wanted, place = self._configuration, self.memtx_dir
        if wanted.instance_uuid is not None and wanted.instance_uuid.lower() != instance_uuid.lower():
            message = f"instance_uuid is {wanted.instance_uuid}, but the data in {place} belongs to {instance_uuid}"
            raise UsageError(message, hint="unset instance_uuid, or choose another work_dir")
        if dialect is None:
            return
        if wanted.dialect not in (None, dialect.value):
            message = f"dialect is {wanted.dialect}, but the data in {place} has dialect {dialect.value}"
            raise UsageError(message, hint="unset dialect, or choose another work_dir")
        try:
            wanted.check_dialect(dialect)
        except TarantoolError as error:
            where = f"{error.message}: the data in {place} has dialect {dialect.value}"
            raise UsageError(where, hint=error.hint) from None


def _existing(path: str) -> str:
    """Return the nearest existing ancestor of `path`, or `path` itself."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
