"""The tables of `flowstone status`, in the layout of `tt replicaset status` with further tables.

They fit 80 columns unless addresses are long; long text is folded, never truncated. If the terminal has too few lines,
a note says how many are missing. Text from servers is shown literally, without markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from flowstone.observation.findings.wording import position, seconds_text
from flowstone.observation.health import complaints
from flowstone.observation.replica_set import Link, Member, ReplicaSet, missing_row_count

if TYPE_CHECKING:
    from flowstone.observation.report import Report

STAR, DOT = "★", "•"
UNKNOWN: Final = "–"
MODE_STYLES: Final = {"rw": "green", "unknown": "red"}


def board(sets: Sequence[ReplicaSet], *, explained: str) -> Group:
    """Return all sets, one below the other; `explained` is the address to suggest for `flowstone explain`."""
    parts: list[RenderableType] = []
    for one in sets:
        parts += (Text(), *_set_parts(one)) if parts else _set_parts(one)
    if any(map(complaints, sets)):
        parts.append(Text(f"\nRun flowstone explain {explained} for causes and advice."))
    return Group(*parts)


class RateWindow:
    """The lines of a board that fit on the terminal, and the number of lines that do not fit.

    A board that is redrawn in place cannot be scrolled.
    """

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options, pad=False)
        room = options.size.height
        fitting = lines if len(lines) <= room else lines[: room - 1]
        for line in fitting:
            yield from (*line, Segment.line())
        if len(fitting) < len(lines):
            note = f"… {len(lines) - len(fitting)} more lines; enlarge the terminal, or omit --watch"
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
    return f"led by {leader.label}" if leader is not None else "no leader"


def _queue(one: ReplicaSet) -> str:
    queue = one.queue
    if queue is None:
        has_answer = any(member.report is not None for member in one.members)
        return "unknown (reported since 2.8)" if has_answer else "unknown"
    owner = next((member.label for member in one.members if member.id == queue.owner and queue.owner), None)
    pending = "empty"
    if queue.len:
        age = "" if queue.age is None else f", the oldest for {seconds_text(queue.age)}"
        pending = f"{queue.len} pending{age}"
    owned = f"owned by {owner}" if owner is not None else "no owner"
    return f"{pending}; {owned}, term {queue.term}" + (", busy" if queue.busy else "")


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
    """Return True for the leader or, without elections, for the only writable member."""
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
    """Return the state that the follower reports, and the master's after a slash if it differs."""
    if link.downstream in (None, link.status) or (link.downstream == "follow" and link.is_following):
        return link.status
    return f"{link.status}/{link.downstream}"


def _retention(one: ReplicaSet) -> Table:
    numbers = ("rows", "snapshots", "lag")
    table = _table("logs of", *numbers[:2], "held by", "slowest", numbers[2], right=numbers)
    for member in one.members:
        if member.report is not None and member.report.gc is not None:
            table.add_row(Text(member.label), *_kept(one, member.report))
    return table


def _kept(one: ReplicaSet, report: Report) -> Iterator[RenderableType]:
    """Yield the cells on log retention.

    A server keeps its logs back to its oldest snapshot, and further back for a replica that has not received them yet.
    """
    assert report.gc is not None
    gc, slowest = report.gc, report.gc.slowest
    oldest = sum(gc.checkpoints[0].values()) if gc.checkpoints else 0
    yield str(missing_row_count(report.vclock, gc.vclock))
    yield str(len(gc.checkpoints))
    if slowest is None:
        yield from (Text("a snapshot"), UNKNOWN, UNKNOWN)
        return
    label = one.label_of(slowest.replica_uuid) if slowest.replica_uuid else slowest.name
    yield Text(label if sum(slowest.vclock.values()) < oldest else "a snapshot")
    yield Text(label)
    yield str(missing_row_count(report.vclock, slowest.vclock))


def _seconds(value: float | None) -> str:
    return UNKNOWN if value is None else seconds_text(value)
