"""What is wrong with a replica set, said so that somebody who was just woken up knows what to do."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How bad it is: nothing moves, it moves but not as it should, or it will not for long."""

    STOPPED = "stopped"
    BEHIND = "behind"
    WARNING = "warning"


class Kind(StrEnum):
    """A word for programs. What each means, and what to do, is in `docs/reference/findings.md`."""

    # Why a member does not follow another.
    SPLIT_BRAIN = "split_brain"
    DUPLICATE_KEY = "duplicate_key"
    LOG_GAP = "log_gap"
    LOST_ROWS = "lost_rows"
    WRONG_CLUSTER = "wrong_cluster"
    NOT_REGISTERED = "not_registered"
    NO_RIGHTS = "no_rights"
    WRONG_PASSWORD = "wrong_password"
    VERSION_MISMATCH = "version_mismatch"
    SCHEMA_MISMATCH = "schema_mismatch"
    FOREIGN_QUEUE = "foreign_queue"
    DISK_FULL = "disk_full"
    COPIED_INSTANCE = "copied_instance"
    STARTING = "starting"
    UNREACHABLE = "unreachable"
    REPLICATION_STOPPED = "replication_stopped"
    NOT_FOLLOWING = "not_following"
    NOT_FOLLOWED = "not_followed"
    # How a member or the set is.
    LOG_FAILING = "log_failing"
    ORPHAN = "orphan"
    QUORUM_LOST = "quorum_lost"
    QUEUE_WAITS = "queue_waits"
    QUEUE_ABANDONED = "queue_abandoned"
    NO_LEADER = "no_leader"
    TWO_OWNERS = "two_owners"
    READ_ONLY = "read_only"
    BEHIND = "behind"
    RETENTION = "retention"
    CLOCK_SKEW = "clock_skew"
    # What is found in files.
    DAMAGED_LOG = "damaged_log"
    TORN_LOG = "torn_log"
    NO_SNAPSHOT = "no_snapshot"
    MIXED_DIRECTORY = "mixed_directory"
    LEFTOVER_FILES = "leftover_files"
    UNDECIDED = "undecided"
    FORKED = "forked"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    kind: Kind
    severity: Severity
    member: str
    """The UUID of the member that it is about, its address where it could not be asked, or the path of its files."""

    label: str
    """The same for people."""

    what: str
    """One sentence: what does not work."""

    why: str
    """One or two: the cause, with names, positions and rows."""

    advice: str
    """What to do about it, commands included."""

    evidence: tuple[str, ...] = ()
    """What it was concluded from: rows, positions, messages of servers, a line each."""

    replicaset: str | None = None
    peer: str | None = None
    """The other end of the link, where it is about one; its address where nobody knows who it is."""
