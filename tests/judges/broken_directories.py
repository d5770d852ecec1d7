"""Test directories for the judges: valid ones, and deliberately broken ones.

Each case is the rows of a log after a snapshot with spaces 512 (synchronous) and 513. Instance 1 wrote them and is
registered; 2 and 3 are other members.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from flowstone.box.bootstrap import bootstrap_rows
from flowstone.box.dialect import Dialect
from flowstone.iproto.constants import RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row, encode_header
from flowstone.outside import production
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, RaftState, Rollback
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.transactions import make_transaction
from flowstone.xlog.writer import LogWriter, SnapWriter

INSTANCE = "11111111-0000-4000-8000-000000000001"
MEMBERS = ["11111111-0000-4000-8000-000000000002", "11111111-0000-4000-8000-000000000003"]
SYNC, PLAIN = 512, 513
WAIT_SYNC, WAIT_ACK = 2, 4
NOP = RequestType.NOP.value
_KINDS = {
    Confirm: RequestType.RAFT_CONFIRM,
    Rollback: RequestType.RAFT_ROLLBACK,
    Promote: RequestType.RAFT_PROMOTE,
    Demote: RequestType.RAFT_DEMOTE,
    RaftState: RequestType.RAFT,
}


class Case(NamedTuple):
    """`refusal` is part of the error with which servers refuse to start; None if they start.

    `is_defined` is False if the result depends on the compiler of the real server.
    """

    name: str
    rows: list[bytes]
    refusal: str | None = None
    is_defined: bool = True


def put(lsn: int, key: int, *rest: Any, origin: int = 1, space: int = PLAIN, kind: int = 3, **how: Any) -> Row:
    body = pack({0x10: space, 0x21: (key, *rest)})
    return Row(kind, origin, lsn=lsn, timestamp=1.5e9, body=body, **how)


def nop(lsn: int, origin: int = 1) -> Row:
    return Row(NOP, origin, lsn=lsn, timestamp=1.5e9)


def together(*rows: Row, flags: int = 0) -> bytes:
    return b"".join(encode_header(row) + row.body for row in make_transaction(rows, flags).rows)


def says(lsn: int, body: Confirm | Rollback | Promote | Demote | RaftState, origin: int = 1) -> bytes:
    group_id = int(isinstance(body, RaftState))
    row = Row(_KINDS[type(body)].value, 0 if group_id else origin, group_id, lsn, 1.5e9, lsn, 1, body=body.encode())
    return encode_header(row) + row.body


def synchronous(lsn: int, key: int, origin: int = 1, flags: int = WAIT_SYNC | WAIT_ACK) -> bytes:
    return together(put(lsn, key, origin=origin, space=SYNC), flags=flags)


OWNED = [says(1, RaftState(term=2)), says(1, Promote(0, 0, 2))]
"""Instance 1 owns the queue in term 2."""
DEPOSED = [*OWNED, says(2, RaftState(term=3)), says(1, Promote(1, 0, 3), origin=2)]
"""Instance 2 has taken it over in term 3."""
MARKED = encode_header(Row(NOP, 1, lsn=2, timestamp=1.5e9, tsn=2, flags=1), is_explicit=True)
UNFINISHED = encode_header(Row(3, 1, lsn=2, timestamp=1.5e9, tsn=2, flags=0)) + pack({0x10: PLAIN, 0x21: (1,)})
"""The first row of a transaction that does not end."""

CASES = [
    Case("empty", []),
    Case("plain rows", [together(put(1, 1, "a")), together(put(2, 2), put(3, 1, "b"))]),
    Case("delete", [together(put(1, 1)), together(Row(5, 1, lsn=2, body=pack({0x10: PLAIN, 0x20: (1,)})))]),
    Case(
        "update",
        [
            together(put(1, 1, 5)),
            together(Row(4, 1, lsn=2, body=pack({0x10: PLAIN, 0x15: 1, 0x20: (1,), 0x21: [["+", 2, 3]]}))),
        ],
    ),
    Case(
        "upsert",
        [
            together(Row(9, 1, lsn=n, body=pack({0x10: PLAIN, 0x15: 1, 0x21: (1, 1), 0x28: [["+", 2, 3]]})))
            for n in (1, 2)
        ],
    ),
    Case(
        "update by path",
        [
            together(put(1, 1, [[5]])),
            together(Row(4, 1, lsn=2, body=pack({0x10: PLAIN, 0x15: 1, 0x20: (1,), 0x21: [["!", "[2][1]", 3]]}))),
        ],
    ),
    Case("synchronous without verdict", [*OWNED, synchronous(2, 1)]),
    Case("confirmed", [*OWNED, synchronous(2, 1), says(3, Confirm(1, 2))]),
    Case("rolled back", [*OWNED, synchronous(2, 1), together(put(3, 1), flags=WAIT_SYNC), says(4, Rollback(1, 2))]),
    Case(
        "behind one that stands",
        [*OWNED, synchronous(2, 1), together(put(3, 1), flags=WAIT_SYNC), says(4, Confirm(1, 2))],
    ),
    Case(
        "confirmed by a promotion", [*OWNED, synchronous(2, 1), synchronous(3, 2), says(1, Promote(1, 2, 3), origin=2)]
    ),
    Case("demoted", [*OWNED, synchronous(2, 1), says(3, Demote(1, 2, 3)), together(put(4, 1))]),
    Case("synchronous space without flags", [*OWNED, synchronous(2, 1, flags=0)]),
    Case("nobody owns the queue", [synchronous(1, 1)], "doesn't belong to any instance"),
    Case("after a demotion", [*OWNED, says(2, Demote(1, 0, 3)), synchronous(3, 1)], "doesn't belong to any instance"),
    Case("late synchronous row", [*DEPOSED, synchronous(2, 1)], "belongs to other instance with id 2"),
    Case("late row behind", [*DEPOSED, together(put(2, 1), flags=WAIT_SYNC)], "belongs to other instance with id 2"),
    Case("late NOP with both flags", [*DEPOSED, together(nop(2), flags=6)], "belongs to other instance with id 2"),
    Case("late NOP with WAIT_SYNC", [*DEPOSED, together(nop(2), flags=2)], "belongs to other instance with id 2"),
    Case(
        "late NOPs with both flags",
        [*DEPOSED, together(nop(2), nop(3), flags=6)],
        "belongs to other instance with id 2",
    ),
    Case("late NOP with WAIT_ACK", [*DEPOSED, together(nop(2), flags=4), synchronous(2, 7, origin=2)]),
    Case("late NOPs with WAIT_ACK", [*DEPOSED, together(nop(2), nop(3), flags=4), synchronous(2, 7, origin=2)]),
    Case(
        "late NOP without flags",
        [*DEPOSED, together(nop(2)), synchronous(2, 7, origin=2), says(3, Confirm(2, 2), origin=2)],
    ),
    Case(
        "NOP in place of a control row",
        [*DEPOSED, MARKED, synchronous(2, 7, origin=2), says(3, Confirm(2, 2), origin=2)],
    ),
    Case(
        "foreign row while others wait",
        [*DEPOSED, synchronous(2, 7, origin=2), synchronous(2, 1)],
        "Found uncommitted sync transactions",
    ),
    Case("own NOP with both flags waits", [*OWNED, together(nop(2), flags=6)]),
    Case(
        "late CONFIRM counts in 2.11",
        [*DEPOSED, synchronous(2, 7, origin=2), says(2, Confirm(1, 2)), says(3, Rollback(2, 2), origin=2)],
    ),
    Case(
        "promotion of an old term counts", [*DEPOSED, says(1, Promote(1, 0, 2), origin=3), synchronous(2, 9, origin=3)]
    ),
    Case(
        "owner after a promotion of an old term",
        [*DEPOSED, says(1, Promote(1, 0, 2), origin=3), synchronous(2, 7, origin=2)],
        "belongs to other instance with id 3",
    ),
    Case("duplicate key", [together(put(1, 1)), together(put(2, 1, kind=2))], "Duplicate key exists"),
    Case("unknown space", [together(put(1, 1, space=999))], "does not exist"),
    # Real servers index a table by the type without checking it: some builds start, others do not.
    Case("unknown type", [together(put(1, 1, kind=77))], "request", is_defined=False),
    Case("LSN used twice", [together(put(1, 1)), together(put(1, 2))], "used twice"),
    Case("gap in LSNs", [together(put(1, 1)), together(put(7, 2))]),
    Case("control row in a transaction", [*OWNED, UNFINISHED, says(3, Confirm(1, 1))], "in a transaction"),
    Case("interleaved transactions", [*OWNED, UNFINISHED, together(put(3, 2))], "not yet committed"),
]


def write(directory: Path, rows: list[bytes]) -> None:
    """A snapshot at the start, and a log with these rows, one block each."""
    disk, place = production().disk, str(directory)
    disk.make_directory(place)
    tuples: dict[int, list[bytes]] = {}
    for space_id, raw in bootstrap_rows(Dialect.V2_11, UUID(INSTANCE), UUID(int=7)):
        tuples.setdefault(space_id, []).append(raw)
    tuples[320] += [pack((number, uuid)) for number, uuid in enumerate(MEMBERS, 2)]
    for space_id, options in ((SYNC, {"is_sync": True}), (PLAIN, {})):
        tuples[280].append(pack((space_id, 1, f"s{space_id}", "memtx", 0, options, [])))
        tuples[288].append(pack((space_id, 0, "pk", "tree", {"unique": True}, [[0, "unsigned"]])))
    with SnapWriter(disk, place, Meta(FileType.SNAP, INSTANCE, {}), 1.5e9) as snapshot:
        for space_id in sorted(tuples):
            snapshot.add_tuples(space_id, tuples[space_id])
    log = LogWriter.create(disk, place, Meta(FileType.XLOG, INSTANCE, {}))
    for number, each in enumerate(rows, 1):
        log.append_encoded([each], {1: number})
    log.close()
