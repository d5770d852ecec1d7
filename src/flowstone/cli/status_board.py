"""How `flowstone status` shows replica sets: in the shape of `tt replicaset status`, grown by tables.

Fits 80 columns where addresses do; long ones are folded, never cut off. Where a terminal has too few lines, it is told
how many are missing. Text of servers is shown as it is, without markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from flowstone.observation.health import complaints
from flowstone.observation.replica_set import Link, Member, ReplicaSet, missing_rows
from flowstone.observation.wording import position, seconds_text

if TYPE_CHECKING:
    from flowstone.observation.report import Report

STAR, DOT = "★", "•"
UNKNOWN: Final = "–"
MODE_STYLES: Final = {"rw": "green", "unknown": "red"}


def board(sets: Sequence[ReplicaSet], *, explained: str) -> Group:
    """All sets, one below the other; `explained` is what `explain` is to be called with where something is wrong."""
    parts: list[RenderableType] = []
    for one in sets:
        parts += (Text(), *_set_parts(one)) if parts else _set_parts(one)
    if any(map(complaints, sets)):
        parts.append(Text(f"\nflowstone explain {explained} says why, and what to do."))
    return Group(*parts)


class Window:
    """What of a board fits on the terminal, and how many lines do not: what is drawn in place cannot be scrolled."""

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options, pad=False)
        room = options.size.height
        fitting = lines if len(lines) <= room else lines[: room - 1]
        for line in fitting:
            yield from (*line, Segment.line())
        if len(fitting) < len(lines):
            note = f"… {len(lines) - len(fitting)} more lines: make the terminal higher, or leave out --watch"
            yield Text(note, style="bold yellow", no_wrap=True, overflow="ellipsis")


def _set_parts(one: ReplicaSet) -> Iterator[RenderableType]:
    yield Text(f"{DOT} {one.label}", style="bold")
    election = "" if one.term is None or one.failover != "election" else f", term {one.term}, {_leader(one)}"
    yield Text(f"  Failover: {one.failover}{election}")
    yield Text(f"  Master:   {one.master}")
    yield Text(f"  Queue:    {_queue(one)}")
    for complaint in complaints(one):
        yield Text(f"  ! {complaint}", style="red")
    for table in (_members(one), _links(one), _retention(one)):
        if table.row_count:
            yield Text()
            yield Padding(table, (0, 0, 0, 2), expand=False)


def _leader(one: ReplicaSet) -> str:
    leader = next((member for member in one.members if member.is_leader), None)
    return f"led by {leader.label}" if leader is not None else "without a leader"


def _queue(one: ReplicaSet) -> str:
    queue = one.queue
    if queue is None:
        has_answer = any(member.report is not None for member in one.members)
        return "unknown (shown by servers since 2.8)" if has_answer else "unknown"
    owner = next((member.label for member in one.members if member.id == queue.owner and queue.owner), "nobody")
    waiting = "empty"
    if queue.len:
        age = "" if queue.age is None else f", the first for {seconds_text(queue.age)}"
        waiting = f"{queue.len} waiting{age}"
    return f"{waiting}; owned by {owner}, term {queue.term}" + (", busy" if queue.busy else "")


# --- tables ---


def _table(*headings: str, right: Sequence[str] = (), fixed: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(
            heading,
            justify="right" if heading in right else "left",
            no_wrap=heading in (*right, *fixed),
            overflow="fold",
        )
    return table


def _members(one: ReplicaSet) -> Table:
    table = _table("", "id", "instance", "mode", "role", "why", "vclock", right=("id",), fixed=("", "mode", "role"))
    for member in one.members:
        report = member.report
        table.add_row(
            STAR if _is_starred(one, member) else DOT,
            str(member.id or UNKNOWN),
            Text(_instance(member)),
            Text(member.mode, style=MODE_STYLES.get(member.mode, "")),
            Text(one.role(member)),
            Text((report.why_read_only or "") if report is not None else ""),
            position(member.vclock),
        )
    return table


def _is_starred(one: ReplicaSet, member: Member) -> bool:
    """Who leads; without elections, the only one that can be written to."""
    return member.is_leader or (one.failover != "election" and one.master == "single" and member.mode == "rw")


def _instance(member: Member) -> str:
    return f"{member.name} {member.address}" if member.name and member.address else member.label


def _links(one: ReplicaSet) -> Table:
    numbers = ("lag", "rows", "idle")
    table = _table("follower", "follows", "state", *numbers, right=numbers, fixed=("state",))
    for link in one.links:
        table.add_row(
            Text(one.label_of(link.follower)),
            Text(one.label_of(link.master)),
            Text(_state(link), style="" if link.is_following else "red"),
            Text(_seconds(link.lag), style="red" if link.is_behind else ""),
            UNKNOWN if link.lag_lsn is None else str(link.lag_lsn),
            _seconds(link.idle),
        )
    return table


def _state(link: Link) -> str:
    """The follower's word, and the master's where it is another one."""
    if link.downstream in (None, link.status) or (link.downstream == "follow" and link.is_following):
        return link.status
    return f"{link.status}/{link.downstream}"


def _retention(one: ReplicaSet) -> Table:
    numbers = ("rows", "snapshots", "behind")
    table = _table("logs of", *numbers[:2], "held by", "slowest", numbers[2], right=numbers)
    for member in one.members:
        if member.report is not None and member.report.gc is not None:
            table.add_row(Text(member.label), *_kept(one, member.report))
    return table


def _kept(one: ReplicaSet, report: Report) -> Iterator[RenderableType]:
    """Logs go back to the oldest snapshot that is kept, and further for a replica that has not got them yet."""
    assert report.gc is not None
    gc, slowest = report.gc, report.gc.slowest
    oldest = sum(gc.checkpoints[0].values()) if gc.checkpoints else 0
    yield str(missing_rows(report.vclock, gc.vclock))
    yield str(len(gc.checkpoints))
    if slowest is None:
        yield from (Text("a snapshot"), UNKNOWN, UNKNOWN)
        return
    label = one.label_of(slowest.replica_uuid) if slowest.replica_uuid else slowest.name
    yield Text(label if sum(slowest.vclock.values()) < oldest else "a snapshot")
    yield Text(label)
    yield str(missing_rows(report.vclock, slowest.vclock))


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else seconds_text(value)
