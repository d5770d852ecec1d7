"""Findings: what is wrong with a replica set or a data directory, why, and what an operator should do about it."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """`stopped`: does not work; `behind`: works, but too slowly; `warning`: will fail soon, or could not be checked."""

    STOPPED = "stopped"
    BEHIND = "behind"
    WARNING = "warning"


class Kind(StrEnum):
    """Code of a finding, for programs. `docs/reference/findings.md` describes each code and what to do about it."""

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
    # The state of a member or of the replica set.
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
    # Problems in files.
    DAMAGED_LOG = "damaged_log"
    TORN_LOG = "torn_log"
    NO_SNAPSHOT = "no_snapshot"
    MIXED_DIRECTORY = "mixed_directory"
    LEFTOVER_FILES = "leftover_files"
    UNDECIDED = "undecided"
    FORKED = "forked"
    # The tables of lakes.
    MISFITS = "misfits"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem, its cause, and what to do about it."""

    kind: Kind
    severity: Severity
    member: str
    """UUID of the affected member, its address if it could not be queried, or the path of its files."""

    label: str
    """The member's name for people: its name, address or path."""

    what: str
    """One sentence: what does not work."""

    why: str
    """One or two sentences: the cause, with names, positions and rows."""

    advice: str
    """What to do, including the commands to run."""

    evidence: tuple[str, ...] = ()
    """The facts that the finding is based on (rows, positions, messages of servers), one per line."""

    replicaset: str | None = None
    peer: str | None = None
    """UUID of the other end, if the finding is about a link; its address if the UUID is unknown."""
