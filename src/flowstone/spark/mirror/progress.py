"""The events of a mirror, and the meter that computes the rate and the lag of its tables.

Pure: times are arguments. As JSON each event is an object with its kind in `event`; `docs/reference/mirror.md`
describes the fields.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

import msgspec

from flowstone.archive.manifest import Lsns
from flowstone.replication.vclock import VClock

RATE_SECONDS: Final = 10.0
"""Window over which rates are averaged."""


class MirrorEvent(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """An event of a mirror. Its `str` is a sentence for people."""


class MirrorOpened(MirrorEvent, frozen=True, tag="opened"):
    """The lake is open. `positions` is empty for a new lake."""

    lake: str
    positions: dict[str, Lsns]
    tables: list[str]

    def __str__(self) -> str:
        if not self.positions:
            return f"new lake in {self.lake}"
        places = ", ".join(str(VClock(lsns)) for lsns in self.positions.values())
        return f"lake in {self.lake}, {counted(len(self.tables), 'table')}, at {places}"


class SourceStatus(MirrorEvent, frozen=True, tag="source"):
    """A status message of a source: it connects, waits, or switches to another member."""

    replicaset_uuid: str
    message: str

    def __str__(self) -> str:
        return self.message


class MirrorSnapshot(MirrorEvent, frozen=True, tag="snapshot"):
    """The snapshot at `position` is being loaded or, if `rows` is set, has been loaded."""

    replicaset_uuid: str
    position: Lsns
    rows: int | None = None

    def __str__(self) -> str:
        if self.rows is None:
            return f"loading the snapshot at {VClock(self.position)}"
        return f"loaded the snapshot at {VClock(self.position)}: {counted(self.rows, 'row')}"


class MirrorTable(MirrorEvent, frozen=True, tag="table"):
    """A table followed a definition. `what` is created, altered, renamed, dropped, truncated, replaced, retyped or
    resynced.

    `reset`: the change table of this table lacks changes, and continues from the state of the table.
    """

    table: str
    what: str
    detail: str = ""

    def __str__(self) -> str:
        return f"table {self.table} {self.what}" + (f": {self.detail}" if self.detail else "")


class MirrorMisfits(MirrorEvent, frozen=True, tag="misfits"):
    """Values of a field did not fit its column. The column is null, and the values are in the quarantine. `key` is the
    key of the first value.

    The first misfits of a field are reported at once, later ones at most once a minute. `rows` is their number since
    the last report.
    """

    table: str
    field: str
    reason: str
    rows: int
    key: str

    def __str__(self) -> str:
        return (
            f"{counted(self.rows, 'value')} of {self.table}.{self.field} {'does' if self.rows == 1 else 'do'} not fit"
            f" the column ({self.reason}), first key {self.key}; see the quarantine of the lake"
        )


class MirrorDataLoss(MirrorEvent, frozen=True, tag="data_loss"):
    """Rows are lost for good; with --no-fail-on-data-loss a snapshot replaces them."""

    replicaset_uuid: str
    message: str

    def __str__(self) -> str:
        return self.message


class TableProgress(msgspec.Struct, frozen=True):
    """The progress of one table. `changes` and `misfits` count from the start of the mirror."""

    changes: int
    changes_per_second: float
    version: int | None = None
    misfits: int = 0


class MirrorProgress(MirrorEvent, frozen=True, tag="progress"):
    """The progress of the mirror, sent about every second, and after each batch if batches take longer.

    `lag` is the age of the newest change when it was committed to the lake, 0 if no rows are pending, and None while it
    is unknown. `lag_lsn` is the number of known log rows that are not in the lake yet. `quarantine_rows` is the number
    of misfits in the quarantine that are not healed.
    """

    positions: dict[str, Lsns]
    changes: int
    changes_per_second: float
    lag: float | None
    lag_lsn: int
    tables: dict[str, TableProgress]
    batch_seconds: float | None = None
    batches: int = 0
    quarantine_rows: int = 0

    def __str__(self) -> str:
        lag = "?" if self.lag is None else f"{self.lag:.1f} s"
        places = ", ".join(str(VClock(lsns)) for lsns in self.positions.values())
        return (
            f"{self.changes_per_second:,.0f} changes/s, lag {lag} and {counted(self.lag_lsn, 'row')}, at"
            f" {places or 'the start'}, {counted(self.changes, 'change')}"
        )


class MirrorCaughtUp(MirrorEvent, frozen=True, tag="caught_up"):
    """The lake has all rows that the sources had at the start."""

    positions: dict[str, Lsns]

    def __str__(self) -> str:
        return "caught up at " + ", ".join(str(VClock(lsns)) for lsns in self.positions.values())


class MirrorStopped(MirrorEvent, frozen=True, tag="stopped"):
    """The mirror stopped without an error."""

    positions: dict[str, Lsns]
    changes: int
    batches: int
    seconds: float

    def __str__(self) -> str:
        places = ", ".join(str(VClock(lsns)) for lsns in self.positions.values())
        done = f"{counted(self.changes, 'change')} in {counted(self.batches, 'batch', 'es')}, {self.seconds:.1f} s"
        return f"stopped at {places or 'the start'}: {done}"


class _Rate:
    """A total, and its rate over the last `RATE_SECONDS`."""

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
    """Counts the changes written to the lake. `begun` and `now` come from the same monotonic clock."""

    begun: float
    batches: int = 0
    lag: float | None = None
    batch_seconds: float | None = None
    quarantine_rows: int = 0
    _all: _Rate = field(init=False)
    _tables: dict[str, _Rate] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)
    _misfits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all = _Rate(self.begun)

    def batch(self, now: float, seconds: float, lag: float | None) -> None:
        """Record a committed batch that took `seconds`; its newest change is `lag` seconds old."""
        self.batches += 1
        self.batch_seconds, self.lag = seconds, lag

    def idle(self) -> None:
        """Record that no rows are pending."""
        self.lag = 0.0 if self.lag is not None else None

    def table(self, now: float, name: str, changes: int, version: int | None) -> None:
        """Record the changes that a batch wrote to a table."""
        self._all.add(now, changes)
        self._tables.setdefault(name, _Rate(self.begun)).add(now, changes)
        if version is not None:
            self._versions[name] = version

    def misfits(self, name: str, count: int) -> None:
        """Record values of a table that were added to the quarantine."""
        self._tables.setdefault(name, _Rate(self.begun))
        self._misfits[name] = self._misfits.get(name, 0) + count
        self.quarantine_rows += count

    def healed(self, count: int) -> None:
        """Record misfits that fit after a change of types."""
        self.quarantine_rows -= count

    @property
    def changes(self) -> int:
        return self._all.total

    def progress(self, now: float, positions: dict[str, VClock], known: dict[str, VClock]) -> MirrorProgress:
        """Return the current progress. `known` has the newest settled position of each source."""
        tables = {
            name: TableProgress(
                rate.total, round(rate.per_second(now), 1), self._versions.get(name), self._misfits.get(name, 0)
            )
            for name, rate in sorted(self._tables.items())
        }
        behind = sum(max(0, known[uuid].signature - at.signature) for uuid, at in positions.items() if uuid in known)
        return MirrorProgress(
            lsns(positions),
            self.changes,
            round(self._all.per_second(now), 1),
            None if self.lag is None else round(self.lag, 3),
            behind,
            tables,
            None if self.batch_seconds is None else round(self.batch_seconds, 3),
            self.batches,
            self.quarantine_rows,
        )


def counted(count: int, word: str, ending: str = "s") -> str:
    """Return a count with its noun, such as `1 batch` or `2,000 batches`."""
    return f"{count:,} {word}{'' if count == 1 else ending}"


def lsns(positions: dict[str, VClock]) -> dict[str, Lsns]:
    """Return positions in the form that events use."""
    return {uuid: vclock.to_mapping() for uuid, vclock in sorted(positions.items())}
