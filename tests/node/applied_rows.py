"""A replica in memory to which peers' rows are applied, masters that number rows, and random histories."""

from __future__ import annotations

from random import Random
from typing import Any

from flowstone.box.box import Box
from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.iproto.constants import Flag
from flowstone.iproto.msgpack import pack, unpack
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.node.synchro.limbo_driver import Waiter
from flowstone.node.upstream.row_applier import Applying
from flowstone.node.wal.commits import Commits
from flowstone.node.wal.journal import Journal, WalMode
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote, Rollback
from flowstone.replication.limbo.limbo import Limbo
from flowstone.replication.messages import encode_row_packet
from flowstone.replication.row_stream import RowStream
from flowstone.replication.vclock import VClock
from flowstone.xlog.reader import LogFile
from flowstone.xlog.transactions import make_transaction
from tests.box.spaces import box_with, definition, on
from tests.node.fault_disk import FaultDisk

UUID = "11111111-0000-4000-8000-000000000001"
PLAIN, OTHER, INDEXED, SYNC, LETTERS = 512, 513, 514, 515, 516
INSERT, REPLACE, UPDATE, DELETE, UPSERT, NOP = 2, 3, 4, 5, 9, 12
SYNCHRONOUS = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value
BEHIND = Flag.WAIT_SYNC.value

Change = tuple[int, dict[int, Any] | None]


class Replica:
    """A box, its log on a disk that can fail, and the row applier."""

    def __init__(self, mode: WalMode = WalMode.WRITE, dialect: Dialect = Dialect.V2_6) -> None:
        self.box: Box = box_with(
            definition(PLAIN, on("0:unsigned")),
            definition(OTHER, on("0:unsigned")),
            definition(INDEXED, on("0:unsigned"), on("1:string", unique=True)),
            definition(SYNC, on("0:unsigned"), flags={"is_sync": True}),
            definition(LETTERS, on("0:string")),
        )
        self.box.dialect = dialect
        self.disk = FaultDisk()
        outside = self.disk.outside()
        self.journal = Journal(outside, "data", instance_uuid=UUID, vclock=VClock(), replica_id=1, mode=mode)
        self.commits = Commits(self.box, self.journal, outside.clock)
        self.commits.queue.registered(1)
        self.skips = False
        self.applying = Applying(self.box, self.journal, self.commits, outside.clock, skip_conflict=lambda: self.skips)
        self.failures: list[FlowstoneError] = []
        self.applying.on_failure.append(self.failures.append)

    @property
    def limbo(self) -> Limbo[Waiter]:
        return self.commits.queue.limbo

    def content(self, space_id: int = PLAIN) -> dict[Any, Any]:
        return {row[0]: row[1:] for row in (unpack(raw) for raw in self.box.space(space_id).tuples())}

    def everything(self) -> dict[int, dict[Any, Any]]:
        return {number: self.content(number) for number in (PLAIN, OTHER, INDEXED, SYNC, LETTERS)}

    def rows(self) -> list[Row]:
        disk = self.disk.outside().disk
        found: list[Row] = []
        for name in disk.list_directory("data"):
            with LogFile.open(disk, f"data/{name}") as log:
                for transaction in log.transactions():
                    found += transaction.rows
        return found


class Master:
    """Numbers rows as an instance would."""

    def __init__(self, replica_id: int = 2, lsn: int = 0) -> None:
        self.replica_id = replica_id
        self.lsn = lsn

    def does(self, *changes: Change, flags: int = 0) -> list[Row]:
        """Return one transaction."""
        rows = []
        for kind, body in changes:
            self.lsn += 1
            encoded = b"" if body is None else pack(body)
            rows.append(Row(kind, self.replica_id, 0, self.lsn, 1.5e9, body=encoded))
        return list(make_transaction(rows, flags).rows)

    def says(self, body: Confirm | Rollback | Promote | Demote) -> list[Row]:
        kinds = {Confirm: 40, Rollback: 41, Promote: 31, Demote: 32}
        self.lsn += 1
        row = Row(kinds[type(body)], self.replica_id, 0, self.lsn, 1.5e9, self.lsn, body=body.encode())
        return [row]


def slab(*transactions: list[Row]) -> Slab:
    stream = RowStream("127.0.0.1:3301")
    stream.feed(b"".join(encode_row_packet(row) for rows in transactions for row in rows))
    taken = stream.take()
    assert taken is not None
    assert len(taken) == sum(map(len, transactions))
    return taken


def put(kind: int, key: Any, *rest: Any, space: int = PLAIN) -> Change:
    return kind, {0x10: space, 0x21: (key, *rest)}


def drop(key: Any, *, space: int = PLAIN) -> Change:
    return DELETE, {0x10: space, 0x20: (key,)}


async def settled(replica: Replica) -> Replica:
    while not replica.journal.is_idle:
        await replica.journal.drain()
    return replica


def random_transactions(rng: Random, count: int) -> list[list[Row]]:
    """Return transactions of three masters and of every kind, over few keys; none of them fails."""
    masters = [Master(number) for number in (2, 3, 7)]
    taken: dict[int, set[Any]] = {}
    made = []
    for _ in range(count):
        changes: list[Change] = []
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            space = rng.choice((PLAIN, PLAIN, PLAIN, OTHER, INDEXED, LETTERS))
            key: Any = rng.randrange(20) if space != LETTERS else rng.choice("abcdefgh")
            keys = taken.setdefault(space, set())
            kind = rng.choice((INSERT, REPLACE, REPLACE, DELETE, UPDATE, UPSERT, NOP))
            if kind == INSERT and key in keys:
                kind = REPLACE
            if kind in (INSERT, REPLACE):
                keys.add(key)
                changes.append(put(kind, key, str(key), rng.randrange(1000), space=space))
            elif kind == DELETE:
                keys.discard(key)
                changes.append(drop(key, space=space))
            elif kind == UPDATE:
                changes.append((UPDATE, {0x10: space, 0x15: 1, 0x20: (key,), 0x21: (("=", 3, rng.randrange(99)),)}))
            elif kind == UPSERT:
                keys.add(key)
                tuple_ = (key, str(key), 0)
                changes.append((UPSERT, {0x10: space, 0x15: 1, 0x21: tuple_, 0x28: (("+", 3, 1),)}))
            else:
                changes.append((NOP, None))
        made.append(rng.choice(masters).does(*changes))
    return made


class SynchronousHistory:
    """Transactions, some pending and some sent twice, the first time only their first rows."""

    def __init__(self, rng: Random, dialect: Dialect) -> None:
        self.rng = rng
        self.has_flags = dialect is Dialect.V2_11
        self.owner = Master(2)
        # With terms only the owner may write; without, no other member while a transaction is pending.
        self.others = [] if self.has_flags else [Master(3), Master(7)]
        self.waiting: list[int] = []

    def transactions(self, count: int) -> list[list[Row]]:
        made = [self.owner.says(Promote(0, 0, 2))] if self.has_flags else []
        while len(made) < count:
            made += self.verdict() if self.rng.random() < 0.1 else self.some()
        return made

    def verdict(self) -> list[list[Row]]:
        if not self.waiting:
            return []
        if self.rng.random() < 0.5:
            first, self.waiting = self.waiting[0], []
            return [self.owner.says(Rollback(2, first))]
        count = self.rng.randint(1, len(self.waiting))
        last, self.waiting = self.waiting[count - 1], self.waiting[count:]
        return [self.owner.says(Confirm(2, last))]

    def some(self) -> list[list[Row]]:
        if self.rng.random() < 0.1:
            flags = SYNCHRONOUS if self.has_flags else 0
            rows = self.owner.does(*self.changes(), put(REPLACE, self.rng.randrange(9), space=SYNC), flags=flags)
            self.waiting.append(rows[-1].lsn)
            return [rows]
        if self.rng.random() < 0.1:
            return self.burst()
        flags = BEHIND if self.has_flags and self.waiting else 0
        master = self.rng.choice([self.owner, *([] if self.waiting else self.others)])
        if self.rng.random() < 0.5:
            return [master.does(*self.changes(), flags=flags) for _ in range(self.rng.choice((1, 4, 30)))]
        whole = master.does(*self.changes(), *self.changes(), put(REPLACE, 5, "last"), flags=flags)
        known = self.rng.randrange(len(whole))
        alone = [Row(row.type, row.replica_id, 0, row.lsn, 1.5e9, body=row.body) for row in whole[:known]]
        return [*(list(make_transaction([row], flags).rows) for row in alone), whole]

    def burst(self) -> list[list[Row]]:
        """Return many pending transactions of one row each; some put the same tuples."""
        flags = SYNCHRONOUS if self.has_flags else 0
        count = self.rng.choice((3, 12, 40))
        kinds = [put(REPLACE, key, "burst", space=SYNC) for key in self.rng.choices(range(30), k=count)]
        kinds[1:] = [drop(change, space=SYNC) if change % 5 == 0 else kinds[change] for change in range(1, count)]
        made = [self.owner.does(kind, flags=flags) for kind in kinds]
        self.waiting += [rows[-1].lsn for rows in made]
        return made

    def changes(self) -> list[Change]:
        return [self.change() for _ in range(self.rng.choice((1, 1, 2, 12)))]

    def change(self) -> Change:
        space, key = self.rng.choice((PLAIN, PLAIN, OTHER, INDEXED)), self.rng.randrange(20)
        if self.rng.random() < 0.2:
            return drop(key, space=space)
        return put(REPLACE, key, str(key), self.rng.randrange(1000), space=space)
