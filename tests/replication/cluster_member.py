"""A member of a replica set made of pure machines: elections, limbo, a log that may lose its tail, and data.

`Member` connects the machines as a node does: their rows go through a journal with latency, rows of others through an
applier that waits while the limbo is busy. Transactions write a value under a key and remember the previous one, so
undoing in the wrong order is detected. Time, the network and the checks are in `Around`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import Flag
from flowstone.iproto.errors import TarantoolError
from flowstone.replication.limbo.actions import (
    Action,
    Cleared,
    Commit,
    Proven,
    Reject,
    TransferFailed,
    Transferred,
    Undo,
    Write,
    WriteNop,
)
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, RaftState
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.limbo.queue import EntryState, LimboEntry, Pending
from flowstone.replication.limbo.split_brain import Body, Fate, SettlingRequest
from flowstone.replication.membership.quorum import Quorum
from flowstone.replication.raft.election import Config, ElectionState, Ready
from flowstone.replication.raft.raft import Raft
from flowstone.replication.vclock import VClock, VClockBuilder

_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class LogRow:
    """A log row: data (`name`), a control row (`body`), term and vote (`raft`), or a NOP (none of these)."""

    origin_id: int
    lsn: int = 0
    name: str = ""
    key: int = 0
    flags: int = 0
    body: Body | None = None
    raft: RaftState | None = None

    @property
    def is_synchronous(self) -> bool:
        return bool(self.flags & Flag.WAIT_ACK)

    was_control: bool = False
    """A NOP that replaces a control row: its TSN and COMMIT are written explicitly."""
    was_transfer: bool = False
    """A NOP that replaces a PROMOTE or DEMOTE; a real one does not say so."""

    def as_nop(self) -> LogRow:
        """Return the NOP to write instead. It has no flags: a real server would queue it during recovery."""
        was_transfer = self.was_transfer or isinstance(self.body, Promote | Demote)
        was_control = self.was_control or self.body is not None
        return LogRow(self.origin_id, self.lsn, was_control=was_control, was_transfer=was_transfer)

    def __str__(self) -> str:
        where = f"{self.origin_id}:{self.lsn}"
        if self.raft is not None:
            return f"{where} term {self.raft.term} vote {self.raft.vote}"
        if self.body is not None:
            term = f" term {self.body.term}" if isinstance(self.body, Promote | Demote) else ""
            return f"{where} {type(self.body).__name__.upper()} {self.body.owner_id}:{self.body.lsn}{term}"
        return f"{where} {self.name or 'NOP'}"


class Change(NamedTuple):
    """The change of a transaction: the value under `key`, from `before` to `name`."""

    name: str
    key: int
    before: str


@dataclass
class Disk:
    """The data that survives a crash: a snapshot, and the later log.

    `rows` keeps everything that was reported as written.
    """

    rows: list[LogRow] = field(default_factory=list)
    snapshot: Snapshot | None = None


@dataclass(frozen=True)
class Snapshot:
    row_count: int
    data: dict[int, str]
    queue: Promote
    newest: LimboEntry[Change] | None


class Replay:
    """Reads a log as recovery does, with independent rules: a transaction is decided by its verdict."""

    def __init__(self, start: Promote) -> None:
        self.owner_id, self.term = start.owner_id, start.term
        self.confirmed = start.confirmed_vclock.to_mapping() if start.confirmed_vclock else {}
        self.terms = {start.owner_id: start.term} if start.owner_id else {}
        self.former: list[tuple[int, int]] = []
        self.voids: dict[int, int] = {}
        self.waiting: list[tuple[LogRow, Change]] = []
        self.kept: list[Change] = []
        self.undone: list[Change] = []

    @property
    def queue(self) -> Promote:
        confirmed = self.confirmed.get(self.owner_id, 0)
        return Promote(self.owner_id, confirmed, self.term, VClock(self.confirmed))

    def add(self, row: LogRow, change: Change) -> None:
        if row.is_synchronous or (self.waiting and row.flags):
            self.waiting.append((row, change))
        else:
            self.former.clear()
            self.kept.append(change)

    def decide(self, origin_id: int, body: Body) -> None:
        if isinstance(body, Promote | Demote):
            border = body.lsn if body.owner_id == self.owner_id else 0
            self._confirm(border)
            first_void = self._rollback(border + 1)
            self.former.append((self.owner_id, self.confirmed.get(self.owner_id, 0)))
            self.voids.pop(self.owner_id, None)
            if first_void:
                self.voids[self.owner_id] = first_void
            self.owner_id, self.term = origin_id if isinstance(body, Promote) else 0, body.term
            self.terms[origin_id] = body.term
        elif body.owner_id == self.owner_id:
            if isinstance(body, Confirm):
                self._confirm(body.lsn)
            else:
                self._rollback(body.lsn)

    def note_nop(self, row: LogRow) -> None:
        """Return True for a NOP that replaces a rolled-back transaction: its origin is not the owner."""
        if (
            self.term
            and not row.was_control
            and row.origin_id != self.owner_id
            and row.lsn > self.confirmed.get(row.origin_id, 0)
        ):
            self.voids.setdefault(row.origin_id, row.lsn)

    def _confirm(self, lsn: int) -> None:
        while self.waiting and (self.waiting[0][0].lsn <= lsn or not self.waiting[0][0].is_synchronous):
            self.kept.append(self.waiting.pop(0)[1])
            self.former.clear()
        if lsn > self.confirmed.get(self.owner_id, 0):
            self.confirmed[self.owner_id] = lsn

    def _rollback(self, lsn: int) -> int:
        lsns = [row.lsn for row, _ in self.waiting if row.is_synchronous and row.lsn >= lsn]
        if not lsns:
            return 0
        while self.waiting and self.waiting[-1][0].lsn >= lsns[0]:
            self.undone.append(self.waiting.pop()[1])
        return lsns[0]


class Around(Protocol):
    """The environment of members."""

    now: float

    def later(self, delay: float, action: Callable[[], None]) -> None: ...
    def journal_delay(self, member: Member) -> float: ...
    def random(self) -> float: ...
    def say(self, member: Member, what: str) -> None: ...
    def logged(self, member: Member, *, is_acknowledged: bool) -> None: ...
    def show(self, member: Member, state: RaftState) -> None: ...
    def wrote(self, member: Member, row: LogRow) -> None: ...
    def refuse(self, member: Member, link: Link, row: LogRow, error: TarantoolError) -> None: ...
    def looked_at(self, member: Member, ready: Ready) -> None: ...
    def decided(self, member: Member, name: str, term: int, *, kept: bool) -> None: ...
    def answered(self, member: Member, name: str, error: TarantoolError | None) -> None: ...


class Link(Protocol):
    """A connection on which a member follows another."""

    @property
    def source_id(self) -> int: ...


@dataclass
class _Write:
    """One journal write: a row, which gets its LSN on disk if it is our own, and its callback."""

    row: LogRow
    done: Callable[[LogRow], None]


class Member:
    def __init__(self, member_id: int, ids: list[int], around: Around, config: Config) -> None:
        self.id = member_id
        self.ids = ids
        self.around = around
        self.config = config
        self.quorum: int | str = "N / 2 + 1"
        self.timeout = 1000.0
        self.log = Disk()
        self.fates: dict[str, bool] = {}
        self.is_up = False
        self.life = 0
        self._reset()

    def _reset(self) -> None:
        self.journal: deque[_Write] = deque()
        self._is_writing = False
        self._deadline: float | None = None
        self.vclock = VClockBuilder()
        self.taken: dict[int, int] = {}
        """Rows of others up to here are being written."""
        self.data: dict[int, str] = {}
        self.disk = RaftState(term=1)
        self.received: dict[int, tuple[LogRow, Link]] = {}
        self.checkpoint: Snapshot | None = None

    # --- start and crash ---

    def start(self) -> None:
        """Recover from the disk."""
        self._reset()
        self.is_up = True
        log = self._replay()
        quorum = Quorum(self.quorum).of(len(self.ids))
        self.limbo: Limbo[Change] = Limbo(
            instance_id=self.id, dialect=Dialect.V2_11, quorum=quorum, timeout=self.timeout
        )
        self.raft = Raft(
            self.id,
            vclock=self.vclock.vclock,
            random=self.around.random,
            now=self.around.now,
            term=self.disk.term,
            vote=self.disk.vote,
        )
        self.limbo.see_term(self.disk.term)
        pending = [Pending(change, row.lsn, row.is_synchronous) for row, change in log.waiting]
        self._do(
            self.limbo.restore(log.queue, promote_terms=log.terms, pending=pending, former=log.former, voids=log.voids)
        )
        self.raft.set_quorum(quorum, self.ids, self.around.now)
        self.raft.configure(self.config, self.around.now)
        self.act()

    def crash(self, survivors: int) -> None:
        """Crash without callbacks of writes in flight; `survivors` of them are on disk."""
        self.life += 1
        self.is_up = False
        for write in list(self.journal)[:survivors]:
            self._append(write.row)
        self._reset()

    def _replay(self) -> Replay:
        snapshot = self.log.snapshot
        start = snapshot.row_count if snapshot else 0
        self.data = dict(snapshot.data) if snapshot else {}
        replay = Replay(snapshot.queue if snapshot else Promote(0, 0, 0))
        for number, row in enumerate(self.log.rows):
            self._follow(row)
            if number < start:
                continue
            if row.name:
                replay.add(row, self._apply(row))
            elif row.body is not None:
                replay.decide(row.origin_id, row.body)
            elif row.raft is None:
                replay.note_nop(row)
            for change in replay.undone:
                self._undo(change, replay.term)
            for change in replay.kept:
                self._decide(change.name, replay.term, kept=True)
            replay.undone.clear()
            replay.kept.clear()
        return replay

    # --- the journal ---

    def _write(self, row: LogRow, done: Callable[[LogRow], None]) -> None:
        self.journal.append(_Write(row, done))
        if row.origin_id not in (0, self.id):
            self.taken[row.origin_id] = row.lsn
        if not self._is_writing:
            self._write_later()

    def _write_later(self) -> None:
        self._is_writing = True
        life = self.life
        self.around.later(self.around.journal_delay(self), lambda: self._write_ends(life))

    def _write_ends(self, life: int) -> None:
        if life != self.life:
            return
        has_foreign = False
        for _ in range(1 + int(self.around.random() * len(self.journal))):
            write = self.journal[0]
            row = self._append(write.row)
            has_foreign = has_foreign or row.origin_id not in (0, self.id)
            self.journal.popleft()
            write.done(row)
            self.act()
        self._is_writing = False
        if self.journal:
            self._write_later()
        self.around.logged(self, is_acknowledged=has_foreign)

    def _append(self, row: LogRow) -> LogRow:
        if row.origin_id in (0, self.id) and not row.lsn:
            row = replace(row, lsn=self.vclock.get(row.origin_id) + 1)
        self.log.rows.append(row)
        self._follow(row)
        self.around.wrote(self, row)
        self.around.say(self, f"has written {row}")
        return row

    def _follow(self, row: LogRow) -> None:
        self.vclock.follow(row.origin_id, row.lsn)
        if row.raft is not None:
            self.disk = row.raft

    # --- data ---

    def _apply(self, row: LogRow) -> Change:
        change = Change(row.name, row.key, self.data.get(row.key, ""))
        self.data[row.key] = row.name
        return change

    def _undo(self, change: Change, term: int) -> None:
        assert self.data[change.key] == change.name, f"{change.name} is undone before {self.data[change.key]}"
        if change.before:
            self.data[change.key] = change.before
        else:
            del self.data[change.key]
        self._decide(change.name, term, kept=False)

    def _decide(self, name: str, term: int, *, kept: bool) -> None:
        """Decide a transaction by the state of the queue in `term`."""
        assert self.fates.setdefault(name, kept) == kept, f"{name} is now {kept} on {self.id}, unlike before"
        self.around.decided(self, name, term, kept=kept)

    # --- clients ---

    @property
    def is_writable(self) -> bool:
        return self.is_up and not self.raft.is_read_only and not self.limbo.is_read_only

    def write(self, name: str, key: int, *, is_synchronous: bool) -> None:
        """Run a client's transaction; it is answered when it is decided."""
        row = LogRow(self.id, 0, name, key)
        change = self._apply(row)
        try:
            entry = self.limbo.submit(change, is_synchronous=is_synchronous)
        except TarantoolError as error:
            self._undo(change, self.limbo.term)
            self.around.answered(self, name, error)
            return
        row = replace(row, flags=self.limbo.row_flags(entry))
        self._write(row, lambda written: self._written(written, entry))

    def _written(self, row: LogRow, entry: LimboEntry[Change] | None) -> None:
        if entry is not None:
            self._do(self.limbo.written(entry, row.lsn, self.around.now))
            return
        self._decide(row.name, self.limbo.term, kept=True)
        if row.origin_id == self.id:
            self.around.answered(self, row.name, None)

    # --- rows of others ---

    def has(self, row: LogRow) -> bool:
        return row.lsn <= max(self.vclock.get(row.origin_id), self.taken.get(row.origin_id, 0))

    def receive(self, row: LogRow, link: Link) -> None:
        """Receive the next row of a connection, unless the limbo is busy."""
        if self.has(row):
            return
        self.around.say(self, f"receives {row} from {link.source_id}")
        if row.body is not None:
            if isinstance(row.body, Promote | Demote):
                self.raft.heard_term(row.origin_id, row.body.term, self.around.now)
                self.act()
            request = SettlingRequest(row.origin_id, row.body, row.lsn)
            self.received[id(request)] = row, link
            self.taken[row.origin_id] = row.lsn
            self._do(self.limbo.request(request))
            return
        try:
            fate = self.limbo.admit(
                row.origin_id, row.lsn, flags=row.flags, has_effect=bool(row.name), was_control=row.was_control
            )
            if fate is Fate.NOP or not row.name:
                if row.name:
                    self._decide(row.name, self.limbo.term, kept=False)
                self._write(row.as_nop(), lambda written: None)
                return
            change = self._apply(row)
            entry = self.limbo.receive(change, origin_id=row.origin_id, lsn=row.lsn, is_synchronous=row.is_synchronous)
        except TarantoolError as error:
            self.around.refuse(self, link, row, error)
            return
        self._write(row, lambda written: self._written(written, entry))

    # --- requests of the machines ---

    def _do(self, actions: list[Action[Change]]) -> None:
        self._deadline = None
        for action in actions:
            match action:
                case Write(request):
                    row, _ = self.received.get(id(request), (LogRow(self.id, body=request.body), None))
                    self._write(row, lambda written, request=request: self._request_written(request, written))  # type: ignore[misc]
                case WriteNop(request):
                    row, _ = self.received.pop(id(request))
                    self._write(row.as_nop(), lambda written: None)
                case Reject(request, error):
                    row, link = self.received.pop(id(request))
                    self.taken[row.origin_id] = row.lsn - 1
                    self.around.refuse(self, link, row, error)
                case Commit(entries, is_proven):
                    for entry in entries:
                        self._decide(entry.transaction.name, self.limbo.term, kept=True)
                        if is_proven:
                            self._answer(entry, None)
                case Proven(entries):
                    for entry in entries:
                        self._answer(entry, None)
                case Undo(entry, error):
                    self._undo(entry.transaction, self.limbo.term)
                    self._answer(entry, error)
                case Transferred() | TransferFailed() | Cleared():
                    pass

    def _answer(self, entry: LimboEntry[Change], error: TarantoolError | None) -> None:
        if entry.origin_id == self.id:
            self.around.answered(self, entry.transaction.name, error)

    def _request_written(self, request: SettlingRequest, row: LogRow) -> None:
        self.received.pop(id(request), None)
        self._do(self.limbo.request_written(request, row.lsn))

    def act(self) -> None:
        """Perform the actions that elections request, until none are left."""
        self._deadline = None
        while ready := self.raft.ready():
            self.around.looked_at(self, ready)
            for note in ready.notes:
                self.around.say(self, note)
            if ready.write is not None:
                self._write(LogRow(0, raft=ready.write), self._raft_written)
            if ready.fence:
                self.limbo.fence()
            self.limbo.see_term(self.raft.volatile_term)
            if self.raft.state is not ElectionState.LEADER:
                self._do(self.limbo.cancel_transfer(errors.NotLeader("the leadership is lost")))
            if ready.promote_term:
                try:
                    self._do(self.limbo.promote(ready.promote_term, self.around.now))
                except FlowstoneError as error:
                    self.around.say(self, f"cannot take the queue: {error}")
            if ready.broadcast is not None:
                self.around.show(self, ready.broadcast)

    def _raft_written(self, row: LogRow) -> None:
        assert row.raft is not None
        self.raft.written(row.raft.term, row.raft.vote, self.around.now)

    def hear_ack(self, replica_id: int, vclock: VClock, term: int) -> None:
        """Process the term before the ACK: a member with a newer term may have voted in it, and its ACK does not count
        here.
        """
        self.raft.heard_term(replica_id, term, self.around.now)
        self.act()
        self._do(self.limbo.ack(replica_id, vclock))

    def tick(self) -> None:
        now = self.around.now
        self.raft.tick(now)
        self.act()
        deadline = self.limbo.deadline
        if deadline is not None and deadline <= now:
            self._do(self.limbo.tick(now))

    @property
    def deadline(self) -> float:
        if not self.is_up:
            return _NEVER
        if self._deadline is None:
            raft, limbo = self.raft.deadline, self.limbo.deadline
            self._deadline = min(_NEVER if raft is None else raft, _NEVER if limbo is None else limbo)
        return self._deadline

    # --- commands ---

    def configure(self, config: Config) -> None:
        self.config = config
        if self.is_up:
            self.raft.configure(config, self.around.now)
            self.act()

    def set_quorum(self, quorum: int | str) -> None:
        self.quorum = quorum
        if self.is_up:
            number = Quorum(quorum).of(len(self.ids))
            self.raft.set_quorum(number, self.ids, self.around.now)
            self.act()
            self._do(self.limbo.configure(quorum=number))

    def start_checkpoint(self) -> None:
        """Take a snapshot of now; it is complete when everything in it is confirmed."""
        if self.journal:
            return
        count = len(self.log.rows)
        self.checkpoint = Snapshot(count, dict(self.data), self.limbo.checkpoint(), self.limbo.newest)

    def end_checkpoint(self) -> None:
        checkpoint = self.checkpoint
        if checkpoint is None or (checkpoint.newest and checkpoint.newest.state is EntryState.WAITING):
            return
        self.checkpoint = None
        if checkpoint.newest is None or checkpoint.newest.state is EntryState.COMMITTED:
            self.log.snapshot = checkpoint
            self.around.say(self, f"has a snapshot of {checkpoint.row_count} rows")
