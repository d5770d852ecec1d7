"""Comparison of members: equal data, byte for byte, and equal logs, row for row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

from flowstone.iproto.constants import GROUP_LOCAL
from flowstone.iproto.msgpack import unpack
from flowstone.outside.disk import SystemDisk
from flowstone.xlog.reader import LogFile
from tests.interop.member import SECONDS, Member

SPACE, INDEX, TRUNCATE = 280, 288, 330
ENGINES: Final = ("memtx", "vinyl")
"""Views of system spaces and session settings are not data."""

OWN: Final = {
    "_gc_consumers": "each member has its own",
    "_sequence_data": "the last number that was logged; on a member that has joined the last one used",
}
"""Spaces that may differ, and why."""


class Contents(NamedTuple):
    """The tuples of an index of a space; `name` is for messages."""

    name: str
    tuples: list[bytes]


def contents(member: Member) -> Iterator[Contents]:
    """Return all replicated data, by every index: in order if the index has one."""
    indexes = [unpack(raw) for raw in member.tuples(INDEX)]
    spaces = [unpack(raw) for raw in member.tuples(SPACE)]
    private = {space_id for space_id, _, _, _, _, options, *_ in spaces if _is_private(options)}
    for space_id, _, name, engine, *_ in spaces:
        if engine not in ENGINES or space_id in private or name in OWN:
            continue
        for _, number, index, kind, *_ in (one for one in indexes if one[0] == space_id and one[3] in ("tree", "hash")):
            tuples = member.tuples(space_id, number)
            if space_id == TRUNCATE:  # private spaces are counted there by rows that are private themselves
                tuples = [raw for raw in tuples if unpack(raw)[0] not in private]
            yield Contents(f"{name}.{index}", tuples if kind == "tree" else sorted(tuples))


def _is_private(options: dict[str, Any]) -> bool:
    return bool(options.get("group_id") == GROUP_LOCAL or options.get("temporary") or options.get("type"))


def assert_same_data(*members: Member, besides: Collection[str] = ()) -> None:
    """Check that all spaces of all members are equal, in every index, except those named in `besides`."""
    first, *others = members
    wanted = _but(contents(first), besides)
    for other in others:
        found = _but(contents(other), besides)
        assert [one.name for one in found] == [one.name for one in wanted], f"spaces of {other} and {first}"
        for there, here in zip(wanted, found, strict=True):
            if there.tuples != here.tuples:
                raise AssertionError(f"{there.name} differs: {_difference(there.tuples, here.tuples, first, other)}")


def assert_converged(*members: Member, seconds: float = SECONDS) -> None:
    """Wait until each member has the rows of the others, and compare all data."""
    for member in members:
        member.catch_up(*members, seconds=seconds)
    assert_same_vclock(*members)
    assert_same_data(*members)


def _but(all: Iterator[Contents], besides: Collection[str]) -> list[Contents]:
    return [one for one in all if one.name.partition(".")[0] not in besides]


def assert_same_vclock(*members: Member) -> None:
    vclocks = {member.name: member.vclock() for member in members}
    assert len({tuple(sorted(vclock.items())) for vclock in vclocks.values()}) == 1, vclocks


def _difference(wanted: list[bytes], found: list[bytes], first: Member, other: Member) -> str:
    missing, more = set(wanted) - set(found), set(found) - set(wanted)
    if not missing and not more:
        return f"{len(wanted)} tuples on {first}, {len(found)} on {other}, the same ones in another order or number"
    show = [unpack(raw) for raw in sorted(missing)[:3]], [unpack(raw) for raw in sorted(more)[:3]]
    return f"only {first} has {len(missing)} of them, as {show[0]}; only {other} {len(more)}, as {show[1]}"


# --- logs ---


class LoggedRow(NamedTuple):
    """A replicated row: originator, LSN and content."""

    replica_id: int
    lsn: int
    type: int
    body: bytes


Transactions = list[tuple[LoggedRow, ...]]


def transactions(member: Member) -> Transactions:
    """Return the global rows in a member's log files, by transaction, in log order."""
    return _logged_rows(member, is_local=False)


def local_rows(member: Member) -> list[LoggedRow]:
    """Return the local rows in a member's log files."""
    return [row for rows in _logged_rows(member, is_local=True) for row in rows]


def _logged_rows(member: Member, *, is_local: bool) -> Transactions:
    disk = SystemDisk()
    found: Transactions = []
    for path in member.files("xlog"):
        with LogFile.open(disk, str(path)) as log:
            for transaction in log.transactions():
                rows = tuple(_logged(row) for row in transaction.rows if (row.group_id == GROUP_LOCAL) == is_local)
                if rows:
                    found.append(rows)
    return found


def oldest_lsn(member: Member, replica_id: int = 1) -> int | None:
    """Return the row of an originator after which the oldest log begins; None without any log.

    The name of the file counts local rows, too.
    """
    files = member.files("xlog")
    if not files:
        return None
    try:
        with LogFile.open(SystemDisk(), str(files[0])) as log:
            return log.meta.vclock.get(replica_id, 0)
    except FileNotFoundError:
        return oldest_lsn(member, replica_id)  # the file was deleted a moment ago


def _logged(row: Any) -> LoggedRow:
    return LoggedRow(row.replica_id, row.lsn, row.type, bytes(row.body or b""))


def of_origin(all: Transactions, replica_id: int) -> Transactions:
    return [rows for rows in all if rows[0].replica_id == replica_id]


def assert_whole_log(all: Transactions) -> None:
    """Check that the log has the rows of every originator once, in order, without a gap."""
    last: dict[int, int] = {}
    for rows in all:
        for row in rows:
            before = last.get(row.replica_id)
            assert before is None or row.lsn == before + 1, f"row {row.lsn} of {row.replica_id} comes after {before}"
            last[row.replica_id] = row.lsn


def assert_same_log(first: Member, second: Member, *, origins: Iterable[int]) -> None:
    """Check that both logs have the same transactions of an originator in the same order, as far as both reach."""
    left, right = transactions(first), transactions(second)
    assert_whole_log(left)
    assert_whole_log(right)
    for replica_id in origins:
        here, there = _by_lsn(of_origin(left, replica_id)), _by_lsn(of_origin(right, replica_id))
        begin, end = max(min(here), min(there)), min(max(here), max(there))
        assert begin <= end, f"{first} and {second} share no transaction of {replica_id}"
        assert _between(here, begin, end) == _between(there, begin, end), f"transactions of {replica_id} differ"


def _between(log: dict[int, tuple[LoggedRow, ...]], begin: int, end: int) -> dict[int, tuple[LoggedRow, ...]]:
    return {lsn: rows for lsn, rows in log.items() if begin <= lsn <= end}


def _by_lsn(all: Transactions) -> dict[int, tuple[LoggedRow, ...]]:
    """Return the transactions by the LSN of their last row."""
    return {rows[-1].lsn: rows for rows in all}
