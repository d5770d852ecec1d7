"""Find the position at which two sides can be compared, or the rows that one side lacks to reach it.

Two sides of one replica set meet at the newest settled position that either had at the start. A side that does not
reach this position in time lacks rows, which are reported as a difference. Sides of different replica sets share no
position; each is compared at its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from flowstone.archive.manifest import rows_text
from flowstone.replication.vclock import VClock
from flowstone.spark.sources.options import AsOf
from flowstone.spark.verification.sides import Side, SideError

POLL_SECONDS: Final = 0.2
COMMON: Final = "common"

Rows = tuple[tuple[int, int, int], ...]
"""Ranges of rows: replica id, first LSN, last LSN."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """The position at which each side is shown, and the rows that it lacks and the other side has."""

    a: VClock
    b: VClock
    lacks_a: Rows = ()
    lacks_b: Rows = ()
    is_one_set: bool = True

    @property
    def is_same_position(self) -> bool:
        return self.is_one_set and self.a == self.b


def meet(
    a: Side,
    b: Side,
    *,
    at: AsOf | Literal["common"] | None = None,
    wait: float = 0.0,
    sleep: Callable[[float], None],
    monotonic: Callable[[], float],
    tell: Callable[[str], object] = lambda text: None,
) -> Meeting:
    """Refresh both sides until they can be shown at one position, for at most `wait` seconds.

    `at` fixes the position. With `common` it is the newest position that both sides have now, so later rows do not
    count as differences. Raise SideError if a side cannot show the position.
    """
    ends_at = monotonic() + wait
    for side in (a, b):
        tell(f"reading {side.name}")
        side.refresh()
    for side, other in ((a, b), (b, a)):
        if other.has_past:
            side.choose(other.replicaset_uuid)
    is_one_set = bool(a.replicaset_uuid) and a.replicaset_uuid == b.replicaset_uuid
    # A Limestone master and its replica share epochs but have no UUID.
    is_one_set = is_one_set or a.kind == b.kind == "limestone"
    if not is_one_set:
        if at is not None:
            raise SideError(
                f"{a.name} and {b.name} belong to different replica sets and have no common position",
                hint="omit --at to compare each side at its newest position",
            )
        return Meeting(a.reach, b.reach, is_one_set=False)
    if at == COMMON:
        return _in_common(a, b)
    fixed = a.resolve(at).without_zero() if at is not None else None
    target = a.reach.merged(b.reach)
    while True:
        position = fixed if fixed is not None else _shown_by_both(a, b, target)
        lagging = [side for side in (a, b) if not side.can_show(position)]
        if not lagging:
            return Meeting(position, position)
        if monotonic() >= ends_at:
            break
        tell(f"waiting for {' and '.join(side.name for side in lagging)} to reach {position}")
        sleep(POLL_SECONDS)
        for side in lagging:
            side.refresh()
    if fixed is not None:
        raise _cannot_show(lagging[0], fixed)
    if not a.reach.missing_rows(position) and not b.reach.missing_rows(position):
        raise _cannot_show(lagging[0], position)
    return _late(a, b, position)


def _shown_by_both(a: Side, b: Side, target: VClock) -> VClock:
    """Return `target`, moved forward to the reach of a side that can only be shown at its reach."""
    for side in (a, b):
        if not side.has_past:
            target = target.merged(side.reach)
    return target


def _late(a: Side, b: Side, position: VClock) -> Meeting:
    """Return the meeting of two sides if one side did not reach `position` in time.

    The rows that both sides have are still compared, at one position if both sides can show it.
    """
    lacks_a, lacks_b = a.reach.missing_rows(position), b.reach.missing_rows(position)
    common = a.reach.common(b.reach)
    if a.can_show(common) and b.can_show(common):
        return Meeting(common, common, lacks_a, lacks_b)
    return Meeting(a.reach, b.reach, lacks_a, lacks_b)


def _in_common(a: Side, b: Side) -> Meeting:
    common = a.reach.common(b.reach)
    for side in (a, b):
        if not side.can_show(common):
            raise _cannot_show(side, common)
    return Meeting(common, common)


def _cannot_show(side: Side, position: VClock) -> SideError:
    lacks = side.reach.missing_rows(position)
    why = f"it lacks {rows_text(lacks)}" if lacks else "it has no snapshot or version that is old enough"
    return SideError(f"{side.name} cannot show {position}: {why}", hint=f"its newest position is {side.reach}")
