"""The result of `verify`: by space, by key, and as one JSON object. The command prints the table for people."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from flowstone.archive.manifest import rows_text
from flowstone.spark.verification.tuple_differences import FieldDifference

Rows = tuple[tuple[int, int, int], ...]
"""Ranges of rows: replica id, first LSN, last LSN."""


@dataclass(frozen=True, slots=True)
class SideReport:
    """A side, the position at which it is shown, and the rows that it lacks and the other side has."""

    kind: str
    name: str
    replicaset_uuid: str
    position: dict[int, int]
    lacks: Rows = ()


@dataclass(frozen=True, slots=True)
class SpaceResult:
    """The number of rows of one space on both sides, and of keys by kind of difference.

    `encoded` keys have equal values whose numbers or lengths are encoded differently; they do not count as differences.
    `wrong_a` and `wrong_b` are rows of a lake whose columns contradict each other.
    """

    id: int
    name: str
    rows_a: int
    rows_b: int
    missing_in_a: int = 0
    missing_in_b: int = 0
    differing: int = 0
    twice: int = 0
    encoded: int = 0
    wrong_a: int = 0
    wrong_b: int = 0

    @property
    def difference_count(self) -> int:
        """The number of keys that differ, plus inconsistent rows."""
        return self.missing_in_a + self.missing_in_b + self.differing + self.twice + self.wrong_a + self.wrong_b

    @property
    def is_equal(self) -> bool:
        return not self.difference_count


@dataclass(frozen=True, slots=True)
class ShownDifference:
    """A key whose tuples differ, the tuples as JSON, and the fields that differ."""

    space_id: int
    space: str
    key: str
    kind: str
    a: str | None
    b: str | None
    fields: tuple[FieldDifference, ...] = ()
    count_a: int = 1
    count_b: int = 1


@dataclass(frozen=True, slots=True)
class WrongRow:
    """A row of side `side` that contradicts itself."""

    side: Literal["A", "B"]
    space_id: int
    space: str
    key: str
    what: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All results. `differences` and `wrong` have only the first few; `spaces` has the counts."""

    a: SideReport
    b: SideReport
    spaces: tuple[SpaceResult, ...]
    differences: tuple[ShownDifference, ...]
    wrong: tuple[WrongRow, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def is_equal(self) -> bool:
        return not self.a.lacks and not self.b.lacks and all(space.is_equal for space in self.spaces)

    @property
    def difference_count(self) -> int:
        return sum(space.difference_count for space in self.spaces)

    def lateness(self) -> list[str]:
        """Return a sentence for each side that lacks rows."""
        sides = (("A", self.a), ("B", self.b))
        return [f"{letter} ({side.name}) lacks {rows_text(side.lacks)}" for letter, side in sides if side.lacks]

    def to_json(self) -> str:
        """Return the report as one JSON object; docs/reference/verify.md describes its keys."""
        found: dict[str, Any] = {"equal": self.is_equal, "a": _side(self.a), "b": _side(self.b)}
        found["spaces"] = [{**asdict(space), "equal": space.is_equal} for space in self.spaces]
        found["difference_count"] = self.difference_count
        found["differences"] = [_difference(each) for each in self.differences]
        found["wrong_rows"] = [asdict(each) for each in self.wrong]
        found["notes"] = list(self.notes)
        found["seconds"] = round(self.seconds, 3)
        return json.dumps(found, ensure_ascii=True)


def _side(side: SideReport) -> dict[str, Any]:
    return {**asdict(side), "position": {str(number): lsn for number, lsn in side.position.items()}}


def _difference(each: ShownDifference) -> dict[str, Any]:
    found = asdict(each)
    for name in ("a", "b", "key"):
        found[name] = _parsed(found[name])
    return found


def _parsed(text: str | None) -> Any:
    """Parse JSON; return a text that is not JSON, such as a broken tuple, unchanged."""
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return text
