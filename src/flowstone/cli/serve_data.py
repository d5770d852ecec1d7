"""Whether what a node is told fits the directories it is to use, and the data in them.

`serve` looks before it starts and `serve --check` instead of it, so that both call the same things wrong, in the same
words. What is refused here will be wrong at the next start, too: it is a UsageError. Reads names and headers, writes
nothing; damage in them is for whoever reads the data.
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
from flowstone.node.recovery import dialect_of, find_files, is_empty
from flowstone.outside import production
from flowstone.xlog.directory import LogDirectory


class DataPlace:
    """The directories that a configuration names."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self.wal_dir = os.path.normpath(os.path.join(configuration.work_dir, configuration.wal_dir))
        self.memtx_dir = os.path.normpath(os.path.join(configuration.work_dir, configuration.memtx_dir))

    def missing(self) -> Iterator[str]:
        """Those that would be made; UsageError for what is no directory, or may not be one of the node's."""
        for path in dict.fromkeys((self.wal_dir, self.memtx_dir)):
            if os.path.isdir(path):
                if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
                    raise UsageError(f"{path} cannot be written to", hint="give it to the user of the node")
                continue
            parent = _existing(path)
            if not os.path.isdir(parent):
                raise UsageError(f"{path} cannot be made: {parent} is no directory", hint="choose another work_dir")
            if not os.access(parent, os.W_OK | os.X_OK):
                hint = "give it to the user of the node, or choose another work_dir"
                raise UsageError(f"{path} cannot be made: {parent} cannot be written to", hint=hint)
            yield path

    def files(self) -> LogDirectory | None:
        """What is there; None where there is nothing to recover."""
        if not os.path.isdir(self.memtx_dir) or not os.path.isdir(self.wal_dir):
            return None
        files = find_files(production().disk, self.memtx_dir, self.wal_dir)
        return None if is_empty(files) else files

    def check(self, files: LogDirectory | None, user: tuple[str, str] | None) -> None:
        """UsageError where the options, or the first user, do not go with these files."""
        if files is None:
            self._check_birth(user)
            return
        snapshot = files.newest_snapshot()
        if snapshot is not None:
            self._check_identity(snapshot.meta.instance_uuid, dialect_of(files))

    def _check_birth(self, user: tuple[str, str] | None) -> None:
        wanted = self._configuration
        if wanted.read_only and not wanted.replication:
            hint = "leave read_only out of the first start, or name members to join in replication"
            raise UsageError(f"read_only is set, and there is no data in {self.memtx_dir} yet", hint=hint)
        if user is not None:
            dialect = Dialect(wanted.dialect) if wanted.dialect is not None else Dialect.V2_11
            for _ in bootstrap_rows(dialect, UUID(int=0), UUID(int=0), (user[0], b"")):
                pass  # a name that it cannot have is refused

    def _check_identity(self, instance_uuid: str, dialect: Dialect | None) -> None:
        wanted, place = self._configuration, self.memtx_dir
        if wanted.instance_uuid is not None and wanted.instance_uuid.lower() != instance_uuid.lower():
            message = f"instance_uuid is {wanted.instance_uuid}, the data in {place} is another's, of {instance_uuid}"
            raise UsageError(message, hint="leave instance_uuid out, or choose another work_dir")
        if dialect is None:
            return
        if wanted.dialect not in (None, dialect.value):
            message = f"dialect is {wanted.dialect}, the data in {place} has dialect {dialect.value}"
            raise UsageError(message, hint="leave dialect out, or choose another work_dir")
        try:
            wanted.check_dialect(dialect)
        except TarantoolError as error:
            where = f"{error.message}: the data in {place} has dialect {dialect.value}"
            raise UsageError(where, hint=error.hint) from None


def _existing(path: str) -> str:
    """The nearest directory above that is there."""
    path = os.path.abspath(path)
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
