"""The events that an archive reports. As JSON, each event is an object with its kind in `event`.

`docs/reference/archive.md` describes the fields. Vclocks are objects that map replica ids to LSNs.
"""

from __future__ import annotations

import msgspec

from flowstone.archive.manifest import Lsns, rows_text
from flowstone.replication.vclock import VClock


class ArchiveEvent(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """Base of all events. `str` returns the event as one line of text."""


class Opened(ArchiveEvent, frozen=True):
    """The archive is open. For a new archive `position` is {}, and the upstream has granted its first snapshot."""

    directory: str
    position: Lsns
    settled: Lsns

    def __str__(self) -> str:
        if not self.position:
            return f"new archive in {self.directory}"
        return f"archive in {self.directory}, at {VClock(self.position)}, settled {VClock(self.settled)}"


class Connected(ArchiveEvent, frozen=True):
    """The upstream accepted the subscription and sends rows after `position`; it is at `upstream_position`."""

    address: str
    instance_uuid: str
    version: str
    position: Lsns
    upstream_position: Lsns

    def __str__(self) -> str:
        return (
            f"following {self.address} ({self.instance_uuid}, Tarantool {self.version}) from {VClock(self.position)};"
            f" upstream is at {VClock(self.upstream_position)}"
        )


class Registered(ArchiveEvent, frozen=True):
    """The archive is a member of the replica set, with the id `replica_id` in `_cluster`."""

    replica_id: int

    def __str__(self) -> str:
        return (
            f"registered as replica {self.replica_id}: the server keeps its logs until the archive has them, and counts"
            " the archive in N of the quorum formula; to unregister the archive, delete its row from _cluster"
        )


class Disconnected(ArchiveEvent, frozen=True):
    """The archive does not follow the upstream, and retries."""

    address: str
    error: str

    def __str__(self) -> str:
        return f"{self.error}; retrying"


class Snapshotted(ArchiveEvent, frozen=True, tag="snapshot"):
    """A snapshot is complete. `reason` is `first`, `interval` or `gap`."""

    file: str
    vclock: Lsns
    rows: int
    reason: str

    def __str__(self) -> str:
        return f"snapshot {self.file} at {VClock(self.vclock)}, {self.rows} rows"


class SnapshotFailed(ArchiveEvent, frozen=True, tag="snapshot_failed"):
    """A snapshot by interval failed. The log continues, and the next attempt follows after the interval."""

    error: str

    def __str__(self) -> str:
        return f"snapshot failed: {self.error}"


class GapFound(ArchiveEvent, frozen=True, tag="gap"):
    """The upstream no longer has the next rows: a new snapshot replaces them."""

    missing: tuple[tuple[int, int, int], ...]
    after: Lsns
    until: Lsns
    why: str

    def __str__(self) -> str:
        return f"gap: missing {rows_text(self.missing)} ({self.why}); replaced by the snapshot at {VClock(self.until)}"


class Progress(ArchiveEvent, frozen=True):
    """The progress of the archive: `rows` and `bytes` written since its start, `lag` in seconds (None if unknown)."""

    position: Lsns
    settled: Lsns
    rows: int
    rows_per_second: float
    lag: float | None
    state: str
    bytes: int = 0

    def __str__(self) -> str:
        lag = "?" if self.lag is None else f"{self.lag:.1f} s"
        settled = "" if self.settled == self.position else f", settled {VClock(self.settled)}"
        return f"{self.rows_per_second:,.0f} rows/s, lag {lag}, at {VClock(self.position)}{settled}, {self.rows:,} rows"


class CaughtUp(ArchiveEvent, frozen=True, tag="caught_up"):
    """The archive has everything that the upstream had at the first subscription."""

    position: Lsns
    settled: Lsns

    def __str__(self) -> str:
        return f"caught up at {VClock(self.position)}, settled {VClock(self.settled)}"


class Stopped(ArchiveEvent, frozen=True):
    """The archive stopped cleanly."""

    position: Lsns
    settled: Lsns
    rows: int

    def __str__(self) -> str:
        return f"stopped at {VClock(self.position)}, settled {VClock(self.settled)}, {self.rows} rows received"
