"""What a mirror tells whoever watches it: one message per event, and how fast and how far behind each table is.

Pure: times are arguments. As JSON each event is an object with its kind in `event`; `docs/reference/mirror.md`
tells the fields.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec

from flowstone.node.archive_manifest import Lsns
from flowstone.replication.vclock import VClock

RATE_SECONDS: Final = 10.0
"""Rates are those of the last so many seconds."""


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """`str` of one is a sentence for a person."""


class Opened(Event, frozen=True):
    """The lake is ours. `positions` is empty where it is a new one."""

    lake: str
    positions: dict[str, Lsns]
    tables: list[str]

    def __str__(self) -> str:
        if not self.positions:
            return f"new lake in {self.lake}"
        places = ", ".join(str(VClock(lsns)) for lsns in self.positions.values())
        return f"lake in {self.lake}, {counted(len(self.tables), 'table')}, at {places}"


class Source(Event, frozen=True):
    """What a source says about itself: that it connects, waits, changes from one member to another."""

    replicaset_uuid: str
    message: str

    def __str__(self) -> str:
        return self.message


class Snapshot(Event, frozen=True):
    """The state at `position` is being loaded, or (`rows` is there) was loaded."""

    replicaset_uuid: str
    position: Lsns
    rows: int | None = None

    def __str__(self) -> str:
        if self.rows is None:
            return f"loading the snapshot at {VClock(self.position)}"
        return f"loaded the snapshot at {VClock(self.position)}: {counted(self.rows, 'row')}"


class Table(Event, frozen=True):
    """A table followed a definition: `what` is created, altered, renamed, dropped, truncated, replaced."""

    table: str
    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"table {self.table} {self.what}" + (f": {self.detail}" if self.detail else "")


class Lost(Event, frozen=True, tag="data_loss"):
    """Rows are gone for good; with --no-fail-on-data-loss a snapshot stands for them."""

    replicaset_uuid: str
    message: str

    def __str__(self) -> str:
        return self.message


class TableProgress(msgspec.Struct, frozen=True):
    """`changes` since the start."""

    changes: int
    changes_per_second: float
    version: int | None = None


class Progress(Event, frozen=True):
    """Where the mirror is: about every second, and behind each batch where batches take longer.

    `lag` is how old the newest change was when it was in the lake, or, where nothing waits, 0; None while nobody knows.
    `lag_lsn` is how many rows of the log are known and not in the lake yet.
    """

    positions: dict[str, Lsns]
    changes: int
    changes_per_second: float
    lag: float | None
    lag_lsn: int
    tables: dict[str, TableProgress]
    batch_seconds: float | None = None
    batches: int = 0

    def __str__(self) -> str:
        lag = "?" if self.lag is None else f"{self.lag:.1f} s"
        places = ", ".join(str(VClock(lsns)) for lsns in self.positions.values())
        return (
            f"{self.changes_per_second:,.0f} changes/s, lag {lag} and {counted(self.lag_lsn, 'row')}, at"
            f" {places or 'nothing'}, {counted(self.changes, 'change')}"
        )


class CaughtUp(Event, frozen=True, tag="caught_up"):
    """All that the sources had when they were asked first is in the lake."""

    positions: dict[str, Lsns]

    def __str__(self) -> str:
        return "caught up at " + ", ".join(str(VClock(lsns)) for lsns in self.positions.values())


class Stopped(Event, frozen=True):
    """The end, in good order."""

    positions: dict[str, Lsns]
    changes: int
    batches: int
    seconds: float

    def __str__(self) -> str:
        places = ", ".join(str(VClock(lsns)) for lsns in self.positions.values())
        done = f"{counted(self.changes, 'change')} in {counted(self.batches, 'batch', 'es')}, {self.seconds:.1f} s"
        return f"stopped at {places or 'nothing'}: {done}"


class _Rate:
    """Amounts of the last seconds."""

    def __init__(self, begun: float) -> None:
        self.total = 0
        self._begun = begun
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, now: float, amount: int) -> None:
        self.total += amount
        self._recent.append((now, amount))

    def per_second(self, now: float) -> float:
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()
        seconds = min(RATE_SECONDS, max(now - self._begun, 0.001))
        return sum(amount for _, amount in self._recent) / seconds


@dataclass
class Meter:
    """Counts what goes into the lake. `begun` and `now` are of one monotonic clock."""

    begun: float
    batches: int = 0
    lag: float | None = None
    batch_seconds: float | None = None
    _all: _Rate = field(init=False)
    _tables: dict[str, _Rate] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all = _Rate(self.begun)

    def batch(self, now: float, seconds: float, lag: float | None) -> None:
        """A batch is in the lake; its newest change is `lag` seconds old."""
        self.batches += 1
        self.batch_seconds, self.lag = seconds, lag

    def idle(self) -> None:
        """Nothing waits."""
        self.lag = 0.0 if self.lag is not None else None

    def table(self, now: float, name: str, changes: int, version: int | None) -> None:
        """Changes of a batch that went into a table."""
        self._all.add(now, changes)
        self._tables.setdefault(name, _Rate(self.begun)).add(now, changes)
        if version is not None:
            self._versions[name] = version

    @property
    def changes(self) -> int:
        return self._all.total

    def progress(self, now: float, positions: dict[str, VClock], known: dict[str, VClock]) -> Progress:
        """`known` is how far the sources are, as they have told."""
        tables = {
            name: TableProgress(rate.total, round(rate.per_second(now), 1), self._versions.get(name))
            for name, rate in sorted(self._tables.items())
        }
        behind = sum(max(0, known[uuid].signature - at.signature) for uuid, at in positions.items() if uuid in known)
        return Progress(
            lsns(positions),
            self.changes,
            round(self._all.per_second(now), 1),
            None if self.lag is None else round(self.lag, 3),
            behind,
            tables,
            None if self.batch_seconds is None else round(self.batch_seconds, 3),
            self.batches,
        )


def counted(count: int, word: str, ending: str = "s") -> str:
    """As `1 batch`, and `2,000 batches`."""
    return f"{count:,} {word}{'' if count == 1 else ending}"


def lsns(positions: dict[str, VClock]) -> dict[str, Lsns]:
    """Positions as events have them."""
    return {uuid: vclock.to_mapping() for uuid, vclock in sorted(positions.items())}
