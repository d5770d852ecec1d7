"""Logs as text, for tests of the settled-position tracker.

A line is one transaction, `ORIGIN:LSN WHAT …`: `1:5 insert`, `1:5..7 insert sync` (three rows),
`1:6 insert behind` (flag WAIT_SYNC), `local:3 insert`, `1:8 confirm 1:5`, `2:9 promote 1:5 term 3`,
`local:4 raft term 3`, `1:7 nop`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgpack

from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.row import Row
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, Rollback

LINE = re.compile(r"(\w+):(\d+)(?:\.\.(\d+))? (\w+)(?: (\d+):(\d+))?(?: term (\d+))?((?: sync| behind)*)\Z")


@dataclass(frozen=True)
class OnDone:
    """A transaction as the tracker sees it, with its name in the story."""

    name: str
    rows: tuple[Row, ...]
    touches_synchronous: bool = False

    @property
    def replica_id(self) -> int:
        return self.rows[0].replica_id

    @property
    def lsn(self) -> int:
        return self.rows[-1].lsn

    @property
    def flags(self) -> int:
        return self.rows[-1].flags


def tell(line: str, *, has_flags: bool = True) -> OnDone:
    """Return the transaction that `line` describes; `has_flags` is False for logs of servers before 2.8.1."""
    match = LINE.match(line)
    assert match is not None, line
    origin, first, last, what, owner, lsn, term, words = match.groups()
    row_type, body = _body(what, int(owner or 0), int(lsn or 0), int(term or 0))
    flags = Flag.COMMIT.value
    if has_flags:
        flags |= 6 * (" sync" in words) | 2 * (" behind" in words)
    replica_id = 0 if origin == "local" else int(origin)
    lsns = range(int(first), int(last or first) + 1)
    rows = tuple(
        Row(
            type=row_type,
            replica_id=replica_id,
            group_id=0 if replica_id else 1,
            lsn=number,
            tsn=lsns[0],
            flags=flags if number == lsns[-1] else 0,
            body=body,
        )
        for number in lsns
    )
    return OnDone(f"{origin}:{last or first}", rows, " sync" in words and what == "insert")


def _body(what: str, owner_id: int, lsn: int, term: int) -> tuple[int, bytes]:
    match what:
        case "insert":
            return RequestType.INSERT, b"\x80"
        case "nop":
            return RequestType.NOP, b""
        case "confirm":
            return RequestType.RAFT_CONFIRM, Confirm(owner_id, lsn).encode()
        case "rollback":
            return RequestType.RAFT_ROLLBACK, Rollback(owner_id, lsn).encode()
        case "promote":
            return RequestType.RAFT_PROMOTE, Promote(owner_id, lsn, term).encode()
        case "demote":
            return RequestType.RAFT_DEMOTE, Demote(owner_id, lsn, term).encode()
        case "raft":
            return RequestType.RAFT, msgpack.packb({0: term})
    raise AssertionError(what)
