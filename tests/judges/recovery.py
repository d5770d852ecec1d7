"""Recovery as in 2.11 and 3.8, after the reference and `box.cc`, `recovery.cc` and `txn_limbo*.c`.

`recovered` reads a directory and returns what a server would have in memory, or why it would not start. If the versions
differ, `version` decides. Nothing here is lenient or imports the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.judges.files import WAIT_ACK, WAIT_SYNC, Directory, LogFile, Row, Unreadable, list_files
from tests.judges.tuples import INSERT, Store, Tuple, Undo

NOP, RAFT, PROMOTE, DEMOTE, CONFIRM, ROLLBACK = 12, 30, 31, 32, 40, 41
CONTROL = (PROMOTE, DEMOTE, CONFIRM, ROLLBACK)
GROUP_LOCAL = 1
JUDGED = (272, 280, 320)
"""System spaces that are compared; the others depend on the server's version."""


@dataclass(frozen=True)
class Verdict:
    """`refusal` is the reason why a server does not start; if it starts, the other fields are its data."""

    refusal: str | None
    rows: dict[int, frozenset[Any]] = field(default_factory=dict)
    vclock: dict[int, int] = field(default_factory=dict)
    owner_id: int = 0
    queue_length: int = 0


@dataclass
class _Entry:
    lsn: int
    is_synchronous: bool
    undo: list[Undo]


def recovered(directory: Directory, version: tuple[int, ...] = (2, 11, 9)) -> Verdict:
    """Return the result of recovery by a server of `version` from the files in `directory`."""
    recovery = _Recovery(version)
    try:
        recovery.run(directory)
    except Unreadable as error:
        return Verdict(str(error))
    return recovery.verdict()


class _Recovery:
    def __init__(self, version: tuple[int, ...]) -> None:
        self._version = version
        self._store = Store()
        self._vclock: dict[int, int] = {}
        self._owner_id = 0
        self._confirmed: dict[int, int] = {}
        self._queue: list[_Entry] = []
        self._rows: list[Row] = []
        self._undo: list[Undo] = []

    def verdict(self) -> Verdict:
        spaces = self._store.spaces
        rows = {
            number: frozenset(_frozen(each) for each in space.tuples.values())
            for number, space in spaces.items()
            if number >= 512 or number in JUDGED
        }
        vclock = {number: lsn for number, lsn in self._vclock.items() if lsn}
        return Verdict(None, rows, vclock, self._owner_id, len(self._queue))

    def run(self, directory: Directory) -> None:
        snapshots, logs = list_files(directory)
        self._read_snapshot(snapshots[-1])
        if logs:
            self._check_end(logs[-1])
        before: LogFile | None = None
        for log in _needed(logs, self._vclock):
            if before is None and not _is_covered(log.vclock, self._vclock):
                raise Unreadable(f"{log.path.name}: missing rows: it starts after {self._vclock}")
            if before is not None and log.previous is not None and log.previous != before.vclock:
                raise Unreadable(f"{log.path.name}: missing rows: the log before it is not there")
            if _is_covered(self._vclock, log.vclock):
                self._vclock = dict(log.vclock)
            for row in log.rows():
                self._take(row)
            before = log

    # --- snapshots ---

    def _read_snapshot(self, file: LogFile) -> None:
        if not file.has_end:
            raise Unreadable(f"{file.path.name}: no EOF marker")
        for row in file.rows():
            if row.type == INSERT:
                self._insert(row)
            elif row.type == PROMOTE:
                self._promote_of_snapshot(row.body)
            elif row.type != RAFT:
                raise Unreadable(f"{file.path.name}: unexpected {row}")
        self._vclock = dict(file.vclock)
        self._store.undo.clear()

    def _insert(self, row: Row) -> None:
        space_id = row.body[0x10]
        if space_id not in self._store.spaces or 0 not in self._store.spaces[space_id].indexes:
            # A system space whose definition does not matter here.
            if space_id < 512:
                return
            raise Unreadable(f"Space '{space_id}' does not exist")
        self._store.execute(INSERT, row.body)

    def _promote_of_snapshot(self, body: dict[int, Any]) -> None:
        self._owner_id = body.get(2, 0)
        self._confirmed = dict(body.get(0x5A) or {})
        self._note_confirmed(body.get(3, 0))

    # --- logs ---

    def _check_end(self, last: LogFile) -> None:
        """Check that LSNs grow in the last log: a server reads its end first of all."""
        vclock = dict(last.vclock)
        for row in last.rows():
            if row.lsn <= vclock.get(row.replica_id, 0):
                raise Unreadable(f"LSN for {row.replica_id} is used twice: {row.lsn}")
            vclock[row.replica_id] = row.lsn

    def _take(self, row: Row) -> None:
        if row.lsn <= self._vclock.get(row.replica_id, 0):
            if not self._rows or not row.is_commit:
                return  # the state is already applied
            row = Row(NOP, row.replica_id, row.group_id, row.lsn, row.tsn, row.flags, {})
        else:
            self._vclock[row.replica_id] = row.lsn
        if row.type in CONTROL:
            self._check_alone(row)
            self._decide(row)
        elif row.type == RAFT:
            self._check_alone(row)
        else:
            self._statement(row)

    def _check_alone(self, row: Row) -> None:
        if self._rows:
            raise Unreadable(f"found {row} in a transaction")

    def _statement(self, row: Row) -> None:
        rows = self._rows
        if rows and row.tsn != rows[0].tsn:
            raise Unreadable(f"found {row} with the previous transaction not yet committed")
        if row.group_id != GROUP_LOCAL and all(each.group_id == GROUP_LOCAL for each in rows) and row.tsn != row.lsn:
            raise Unreadable(f"LSN/TSN mismatch in {row}")
        rows.append(row)
        if row.type != NOP:
            self._execute(row)
        if not row.is_commit:
            return
        if all(each.group_id == GROUP_LOCAL for each in rows) and rows[0].tsn != rows[0].lsn:
            raise Unreadable(f"TSN of a local transaction does not match {rows[0]}")
        undo, self._store.undo = self._store.undo, []
        self._rows = []
        self._commit(rows, undo)

    def _execute(self, row: Row) -> None:
        space_id = row.body.get(0x10)
        if isinstance(space_id, int) and space_id < 512 and space_id not in self._store.spaces:
            return  # a system space that is ignored here
        try:
            self._store.execute(row.type, row.body)
        except Unreadable as error:
            raise Unreadable(f"{error}: {row}") from error

    def _commit(self, rows: list[Row], undo: list[Undo]) -> None:
        flags = rows[-1].flags
        if not flags & WAIT_SYNC:
            return  # forced to be asynchronous, whatever the space
        origin_id = rows[0].replica_id
        if origin_id != self._owner_id:
            if self._owner_id == 0:
                raise Unreadable(f"The synchronous transaction queue doesn't belong to any instance: {rows[-1]}")
            if self._queue:
                raise Unreadable(f"Found uncommitted sync transactions from other instance: {rows[-1]}")
            raise Unreadable(
                f"The synchronous transaction queue belongs to other instance with id {self._owner_id}: {rows[-1]}"
            )
        self._queue.append(_Entry(rows[-1].lsn, bool(flags & WAIT_ACK), undo))

    # --- the queue ---

    def _decide(self, row: Row) -> None:
        lsn = row.body.get(3, 0)
        if row.type in (CONFIRM, ROLLBACK):
            # 2.11 writes rows about others than the owner as NOPs, and does not check them here.
            if self._version >= (3,) and row.body.get(2, 0) != self._owner_id:
                return
            if row.type == CONFIRM:
                self._confirm(lsn)
            else:
                self._rollback(lsn)
            return
        self._confirm(lsn)
        self._rollback(lsn + 1)
        # Neither version compares terms here.
        self._owner_id = row.replica_id if row.type == PROMOTE else 0

    def _confirm(self, lsn: int) -> None:
        while self._queue and (not self._queue[0].is_synchronous or self._queue[0].lsn <= lsn):
            self._queue.pop(0)
        self._note_confirmed(lsn)

    def _rollback(self, lsn: int) -> None:
        first = next((at for at, entry in enumerate(self._queue) if entry.is_synchronous and entry.lsn >= lsn), None)
        while first is not None and len(self._queue) > first:
            for undo in reversed(self._queue.pop().undo):
                undo()
        self._store.undo.clear()

    def _note_confirmed(self, lsn: int) -> None:
        if self._owner_id and lsn > self._confirmed.get(self._owner_id, 0):
            self._confirmed[self._owner_id] = lsn


def _needed(logs: list[LogFile], vclock: dict[int, int]) -> Iterator[LogFile]:
    """Return the last log that begins at or before the snapshot, and all later ones."""
    first = max((at for at, log in enumerate(logs) if _is_covered(log.vclock, vclock)), default=0)
    yield from logs[first:]


def _is_covered(one: dict[int, int], other: dict[int, int]) -> bool:
    return all(lsn <= other.get(number, 0) for number, lsn in one.items())


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return frozenset((_frozen(key), _frozen(each)) for key, each in value.items())
    return (type(value).__name__, value) if isinstance(value, bool) else value


def frozen(values: Tuple) -> Any:
    """Return a tuple in the form used in verdicts."""
    return _frozen(values)
