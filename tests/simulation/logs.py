"""The directories of a replica set, read without a node: each transaction of each log, and its outcome.

Verdicts are computed by a simple algorithm, independent of the system under test: the whole log is available, so
nothing is pending. Relies only on the reader of log files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any, Final, NamedTuple

import msgpack

from flowstone.iproto.constants import Flag, Key, RequestType
from flowstone.iproto.row import Row
from flowstone.replication.vclock import VClock
from flowstone.xlog.directory import ListedFile, LogDirectory, scan_directory
from flowstone.xlog.errors import XlogError
from flowstone.xlog.reader import LogFile
from flowstone.xlog.transactions import LogTransaction, TornTransaction
from tests.simulation.disk import Inode, SimulatedDisk, Storage
from tests.simulation.loop import Life
from tests.simulation.trace import Trace

SPACE: Final = 280
"""The id of `_space`, whose rows tell which spaces are synchronous."""

CLUSTER: Final = 320
"""The id of `_cluster`, whose rows tell the id of an instance."""

WAIT_SYNC, WAIT_ACK = Flag.WAIT_SYNC.value, Flag.WAIT_ACK.value
CONFIRM, ROLLBACK = RequestType.RAFT_CONFIRM.value, RequestType.RAFT_ROLLBACK.value
PROMOTE, DEMOTE = RequestType.RAFT_PROMOTE.value, RequestType.RAFT_DEMOTE.value
RAFT, NOP = RequestType.RAFT.value, RequestType.NOP.value
CONTROL: Final = frozenset((CONFIRM, ROLLBACK, PROMOTE, DEMOTE, RAFT))

Position = tuple[int, int]
"""A replica id and an LSN."""


@dataclass(slots=True, eq=False)
class Record:
    """A transaction of one log.

    `is_kept` is None while it has no verdict, or if rows that may have decided it are missing from the log: then it
    `is_before_gap`.
    """

    transaction: LogTransaction
    is_kept: bool | None = True
    is_behind_gap: bool = False
    """True for the first transaction of a log that does not start where the log before it ends."""
    is_before_gap: bool = False

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.transaction.rows

    @property
    def is_nop(self) -> bool:
        return all(row.type == NOP for row in self.rows)


@dataclass
class NodeLog:
    """The directory of one node, oldest rows first."""

    name: str
    snapshot: list[Row]
    """The rows of its first snapshot; for a node that starts, of the newest."""
    snapshot_vclock: dict[int, int]
    records: list[Record]
    """The transactions of all logs; some may precede the snapshot."""
    replica_id: int = 0
    """Its id according to that snapshot; 0 if it has none."""

    def positions(self) -> Iterator[tuple[Position, Row, Record]]:
        """The replicated rows."""
        for record in self.records:
            for row in record.rows:
                if row.replica_id:
                    yield (row.replica_id, row.lsn), row, record


def read_log(name: str, storage: Storage) -> NodeLog:
    """Read a machine's directory, without the torn end that a crash left in a log."""
    disk = SimulatedDisk(storage, Life("reader"))
    directory = scan_directory(disk, f"/{name}")
    newest = directory.newest_snapshot()
    assert newest is not None, f"{name} has no snapshot"
    return _read(name, disk, newest, directory.logs)


def read_now(name: str, storage: Storage) -> NodeLog:
    """As `read_log`, during a run: ignore disk faults, and do not count as disk reads."""
    return read_log(name, _copy(name, storage, storage.names))


def read_all(name: str, storage: Storage, *, has_departed: bool = False) -> NodeLog:
    """As `read_log`, from the first snapshot of this instance on, including deleted files.

    A former member never repaired the remains of its last crash: then only the rows before the first damage are read.
    """
    disk, directory, first = _ever(name, storage)
    uuid = directory.instance_uuid
    logs = [listed for listed in directory.logs if listed.signature >= first.signature and _is_sound(listed, uuid)]
    return _read(name, disk, first, logs, is_mended=not has_departed)


def first_vclock(name: str, storage: Storage) -> VClock:
    """Return the vclock at which an instance began or joined; its logs have no earlier rows."""
    _, _, first = _ever(name, storage)
    return VClock(first.meta.vclock).without_zero()


def _ever(name: str, storage: Storage) -> tuple[SimulatedDisk, LogDirectory, ListedFile]:
    """Return all files that ever existed, and the first snapshot of the current instance."""
    disk = SimulatedDisk(_copy(name, storage, storage.removed | storage.names), Life("reader"))
    directory = scan_directory(disk, f"/{name}")
    first = next(listed for listed in directory.snapshots if _is_sound(listed, directory.instance_uuid))
    return disk, directory, first


def _copy(name: str, storage: Storage, files: dict[str, Inode]) -> Storage:
    copy = Storage(name, Trace(lambda: 0.0), Random(0))
    copy.names, copy.directories = files, storage.directories
    return copy


def _is_sound(listed: ListedFile, instance_uuid: str | None) -> bool:
    """Return True if the file belongs to this instance, not to one before the machine was wiped, and is not rotten."""
    try:
        return listed.meta.instance_uuid == instance_uuid
    except XlogError:
        return False


def _read(
    name: str, disk: SimulatedDisk, listed: ListedFile, logs: Sequence[ListedFile], *, is_mended: bool = True
) -> NodeLog:
    snapshot = list(_rows(disk, listed))
    records: list[Record] = []
    reached: VClock | None = None
    is_behind_gap = False  # pending until a row comes: a log that begins after a gap may have none yet
    try:
        for log in logs:
            start = VClock(log.meta.vclock)
            is_behind_gap = is_behind_gap or (reached is not None and not start <= reached)
            reached = start if reached is None else reached.merged(start)
            for transaction in _transactions(disk, log):
                records.append(Record(transaction, is_behind_gap=is_behind_gap))
                is_behind_gap = False
                reached = reached.merged(VClock({row.replica_id: row.lsn for row in transaction.rows}))
    except XlogError:
        if is_mended:
            raise
    synchronous = None if _has_flags(listed) else synchronous_spaces(snapshot, records)
    # An archive continues with a snapshot if rows are lost everywhere: they are missing at the end, too.
    is_behind_gap = is_behind_gap or (reached is not None and not VClock(listed.meta.vclock).without_zero() <= reached)
    decide(records, synchronous, ends_in_gap=is_behind_gap)
    return NodeLog(name, snapshot, dict(listed.meta.vclock), records, _number(snapshot, listed.meta.instance_uuid))


def _number(snapshot: list[Row], instance_uuid: str | None) -> int:
    for body in (unpacked(row.body) for row in snapshot):
        if body.get(Key.SPACE_ID) == CLUSTER and body[Key.TUPLE][1] == instance_uuid:
            return int(body[Key.TUPLE][0])
    return 0


def _has_flags(listed: ListedFile) -> bool:
    """Return True if rows carry wait flags; those of dialect 2.6 do not."""
    return not listed.meta.version.startswith("2.6")


def _rows(disk: SimulatedDisk, listed: ListedFile) -> Iterator[Row]:
    with LogFile.open(disk, listed.path) as file:
        yield from file.rows()


def _transactions(disk: SimulatedDisk, listed: ListedFile) -> Iterator[LogTransaction]:
    with LogFile.open(disk, listed.path) as file:
        try:
            yield from file.transactions()
        except TornTransaction:
            return


def synchronous_spaces(snapshot: list[Row], records: list[Record]) -> frozenset[int]:
    """Return the ids of spaces that were ever synchronous; no run changes that."""
    found = []
    for row in (*snapshot, *(row for record in records for row in record.rows)):
        if row.type in (RequestType.INSERT, RequestType.REPLACE):
            body = unpacked(row.body)
            if body[Key.SPACE_ID] == SPACE and body[Key.TUPLE][5].get("is_sync"):
                found.append(body[Key.TUPLE][0])
    return frozenset(found)


@lru_cache(maxsize=20_000)
def unpacked(body: bytes) -> Any:
    """Decode a body. The result is cached and shared between nodes: do not change it."""
    return msgpack.unpackb(body, strict_map_key=False)


# --- former members ---


def without_lost_verdicts(departed: Sequence[NodeLog], logs: Sequence[NodeLog]) -> list[NodeLog]:
    """Return the logs of former members without those of their CONFIRM, PROMOTE and similar rows that were lost with
    them and whose LSNs were reused by a later member with their id; `logs` are those of all nodes.

    A leader that is isolated just after it confirmed a transaction is the only one with that row. The next leader
    decides the same transactions by its PROMOTE; when the first is expelled, its id continues after the rows that the
    others have of it. The outcomes that its rows decided remain in its log, to be compared, as do its transactions: a
    decided one had reached other nodes, and its LSN is never reused. Another node that has such a row keeps it.
    """
    return [replace(log, records=_without_lost_verdicts(log, logs)) for log in departed]


def _without_lost_verdicts(log: NodeLog, logs: Sequence[NodeLog]) -> list[Record]:
    number, start = log.replica_id, _start(log)
    heirs = [other for other in logs if other.replica_id == number and start < _start(other)]
    used = {position for heir in heirs for position, _, _ in heir.positions() if position[0] == number}
    return [record for record in log.records if not _is_verdict_at(record, used)]


def _start(log: NodeLog) -> VClock:
    return VClock(log.snapshot_vclock).without_zero()


def _is_verdict_at(record: Record, positions: set[Position]) -> bool:
    first = record.rows[0]
    return first.type in CONTROL and (first.replica_id, first.lsn) in positions


# --- verdicts ---


class _Waiting(NamedTuple):
    record: Record
    is_synchronous: bool


@dataclass
class _Queue:
    """The pending synchronous transactions of one owner, and the transactions after them."""

    waiting: list[_Waiting] = field(default_factory=list)
    term: int = 0

    def enter(self, record: Record, *, is_synchronous: bool) -> None:
        record.is_kept = None
        self.waiting.append(_Waiting(record, is_synchronous))

    def forget(self) -> None:
        """Forget all pending transactions: rows are missing here, possibly with the verdict."""
        for each in self.waiting:
            each.record.is_before_gap = True
        self.waiting = []

    def decide(self, row: Row) -> None:
        body = unpacked(row.body)
        owner, lsn = body.get(Key.REPLICA_ID, 0), body.get(Key.LSN, 0)
        is_ours = bool(self.waiting) and self.waiting[0].record.transaction.replica_id == owner
        if row.type == CONFIRM and is_ours:
            self._split(owner, lsn + 1, kept=True)
        elif row.type == ROLLBACK and is_ours:
            self._split(owner, lsn, withdrawn=True)
        elif row.type in (PROMOTE, DEMOTE):
            term = body.get(Key.TERM, 0)
            if term > self.term or not self.term:
                self.term = term
                self._split(owner, lsn + 1, kept=True, withdrawn=True)

    def _split(self, owner: int, lsn: int, *, kept: bool = False, withdrawn: bool = False) -> None:
        """Keep the transactions before the first synchronous one at or after `lsn`; withdraw it and the rest."""
        count = next((number for number, each in enumerate(self.waiting) if _is_from(each, owner, lsn)), None)
        before, behind = self.waiting[:count], self.waiting[len(self.waiting) if count is None else count :]
        if kept:
            _set(before, True)
            before = []
        if withdrawn:
            _set(behind, False)
            behind = []
        self.waiting = before + behind


def _is_from(waiting: _Waiting, owner: int, lsn: int) -> bool:
    """Return True if the transaction belongs to `owner`: the writer of the verdict did not know transactions of other
    owners."""
    transaction = waiting.record.transaction
    return waiting.is_synchronous and (transaction.replica_id != owner or transaction.lsn >= lsn)


def _set(waiting: list[_Waiting], is_kept: bool) -> None:
    for each in waiting:
        each.record.is_kept = is_kept


def decide(records: list[Record], synchronous: frozenset[int] | None, *, ends_in_gap: bool = False) -> None:
    """Set the outcome of each transaction; `synchronous` are the spaces, for rows without wait flags."""
    queue = _Queue()
    for record in records:
        first = record.rows[0]
        if record.is_behind_gap:
            queue.forget()
        if first.type in CONTROL:
            queue.decide(first)
        elif record.is_nop:
            continue
        elif _is_synchronous(record, synchronous):
            queue.enter(record, is_synchronous=True)
        elif queue.waiting and (synchronous is not None or record.transaction.flags & WAIT_SYNC):
            queue.enter(record, is_synchronous=False)
    if ends_in_gap:
        queue.forget()


def _is_synchronous(record: Record, synchronous: frozenset[int] | None) -> bool:
    if synchronous is None:
        return bool(record.transaction.flags & WAIT_ACK)
    return any(row.type != NOP and unpacked(row.body).get(Key.SPACE_ID) in synchronous for row in record.rows)
