"""Instances in memory or in a directory, for tests of the server."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from flowstone.box.bootstrap import bootstrap_rows
from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.node.configuration import configure
from flowstone.node.instance import Instance
from flowstone.node.synchro.elections import Elections
from flowstone.node.wal.commits import Commits
from flowstone.node.wal.journal import Journal, WalMode
from flowstone.outside import Outside, production
from flowstone.replication.vclock import VClock

UUID = uuid.UUID("11111111-1111-4111-8111-111111111111")
REPLICASET_UUID = uuid.UUID("22222222-2222-4222-8222-222222222222")


def bootstrapped_box(dialect: Dialect = Dialect.V2_11) -> Box:
    """Return a box as after the bootstrap of a replica set."""
    box = Box(dialect)
    box.is_recovering = True
    for space_id, raw in bootstrap_rows(dialect, UUID, REPLICASET_UUID, None):
        statements.replace(box.begin(), box.space(space_id), raw)
    box.is_recovering = False
    return box


def make_instance(
    directory: Path | None = None,
    dialect: Dialect = Dialect.V2_11,
    *,
    outside: Outside | None = None,
    mode: WalMode | None = None,
    **options: Any,
) -> Instance:
    """Return a running instance with its log in `directory`; without one it writes no log."""
    outside = outside or production()
    box = bootstrapped_box(dialect)
    mode = mode or (WalMode.NONE if directory is None else WalMode.WRITE)
    journal = Journal(
        outside, str(directory or "."), instance_uuid=str(UUID), vclock=VClock({1: 1}), replica_id=1, mode=mode
    )
    configuration = configure({"work_dir": str(directory or "."), **options})
    commits = Commits(box, journal, outside.clock)
    commits.queue.registered(1)
    elections = Elections(outside, journal, commits.queue)
    instance = Instance(
        outside, box, journal, commits, UUID, REPLICASET_UUID, configuration, elections, status="running"
    )
    instance.started = outside.clock.monotonic()
    box.is_read_only = configuration.read_only
    return instance
