"""What an archive tells whoever watches it, one message per event; as JSON each is an object with its kind in `event`.

`docs/reference/archive.md` tells the fields. Vclocks are objects of replica id and LSN.
"""

from __future__ import annotations

import msgspec

from flowstone.node.archive_manifest import Lsns, rows_text
from flowstone.replication.vclock import VClock


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """`str` of one is a sentence for a person."""


class Opened(Event, frozen=True):
    """The directory is ours; of a new archive, whose `position` is {}, it is told when the upstream has let us in."""

    directory: str
    position: Lsns
    settled: Lsns

    def __str__(self) -> str:
        if not self.position:
            return f"new archive in {self.directory}"
        return f"archive in {self.directory}, at {VClock(self.position)}, settled {VClock(self.settled)}"


class Connected(Event, frozen=True):
    """The upstream has let us in: rows come from `position` on; it is at `upstream_position`."""

    address: str
    instance_uuid: str
    version: str
    position: Lsns
    upstream_position: Lsns

    def __str__(self) -> str:
        return (
            f"following {self.address} ({self.instance_uuid}, Tarantool {self.version}) from {VClock(self.position)};"
            f" it is at {VClock(self.upstream_position)}"
        )


class Registered(Event, frozen=True):
    """The archive has a number in `_cluster`."""

    replica_id: int

    def __str__(self) -> str:
        return (
            f"registered as replica {self.replica_id}: the server keeps its logs until the archive has them, and counts"
            " the archive in N of the quorum formula; to end that, delete its row from _cluster"
        )


class Disconnected(Event, frozen=True):
    """It is tried again by itself."""

    address: str
    error: str

    def __str__(self) -> str:
        return f"{self.error}; trying again"


class Snapshotted(Event, frozen=True, tag="snapshot"):
    """A snapshot is complete; `reason` is first, interval or gap."""

    file: str
    vclock: Lsns
    rows: int
    reason: str

    def __str__(self) -> str:
        return f"snapshot {self.file} at {VClock(self.vclock)}, {self.rows} rows"


class SnapshotFailed(Event, frozen=True, tag="snapshot_failed"):
    """One by interval; the log goes on, and it is tried again after the interval."""

    error: str

    def __str__(self) -> str:
        return f"no snapshot: {self.error}"


class GapFound(Event, frozen=True, tag="gap"):
    """Rows that the upstream no longer has: a new snapshot stands for them."""

    missing: tuple[tuple[int, int, int], ...]
    after: Lsns
    until: Lsns
    why: str

    def __str__(self) -> str:
        return (
            f"gap: the archive lacks {rows_text(self.missing)} ({self.why});"
            f" the snapshot at {VClock(self.until)} stands for them"
        )


class Progress(Event, frozen=True):
    """Where the archive is. `rows` and `bytes` of logs since the start, `lag` in seconds (None while nobody knows)."""

    position: Lsns
    settled: Lsns
    rows: int
    rows_per_second: float
    lag: float | None
    state: str
    bytes: int = 0

    def __str__(self) -> str:
        lag = "?" if self.lag is None else f"{self.lag:.1f} s"
        behind = "" if self.settled == self.position else f", settled {VClock(self.settled)}"
        return f"{self.rows_per_second:,.0f} rows/s, lag {lag}, at {VClock(self.position)}{behind}, {self.rows:,} rows"


class CaughtUp(Event, frozen=True, tag="caught_up"):
    """All that the upstream had when it was asked first is here."""

    position: Lsns
    settled: Lsns

    def __str__(self) -> str:
        return f"caught up at {VClock(self.position)}, settled {VClock(self.settled)}"


class Stopped(Event, frozen=True):
    """The end, in good order."""

    position: Lsns
    settled: Lsns
    rows: int

    def __str__(self) -> str:
        return f"stopped at {VClock(self.position)}, settled {VClock(self.settled)}, {self.rows} rows taken"
