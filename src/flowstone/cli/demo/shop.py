"""The log of a small shop, for the demo, written with the same writers that a node uses.

It has three spaces: customers, products, and orders, which is synchronous. Replica 1 wins an election and takes two
orders, of which one is confirmed and one is rolled back. Then it continues in a second log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from flowstone.iproto.constants import GROUP_LOCAL, Flag, Key, RaftKey, RequestType
from flowstone.iproto.extensions import Datetime
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.outside import Outside
from flowstone.replication.limbo.control_rows import Confirm, Promote, Rollback
from flowstone.xlog.meta import FileType, Meta
from flowstone.xlog.transactions import LogTransaction, make_transaction
from flowstone.xlog.writer import LogWriter, SnapWriter

CUSTOMERS, PRODUCTS, ORDERS = 512, 513, 514
SYNCHRONOUS = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value
ME = 1

_SPACES: dict[int, tuple[str, dict[str, Any], str]] = {
    CUSTOMERS: ("customers", {}, "id:unsigned name:string city:string?"),
    PRODUCTS: ("products", {}, "id:unsigned name:string price:decimal stock:integer"),
    ORDERS: ("orders", {"is_sync": True}, "id:unsigned customer:unsigned product:unsigned at:datetime"),
}


def write_shop(outside: Outside, directory: str) -> None:
    """Create `directory`, and write a snapshot and two logs to it."""
    disk, now = outside.disk, outside.clock.wall()
    uuid = str(outside.random.uuid())
    disk.make_directory(directory)
    with SnapWriter(disk, directory, Meta(FileType.SNAP, uuid, {}), now) as snapshot:
        _write_snapshot(snapshot, uuid)
    shop = _Shop(now)
    log = LogWriter.create(disk, directory, Meta(FileType.XLOG, uuid, {}))
    log.append(shop.first_day())
    log = log.rotate()
    for transaction in shop.second_day():
        log.append([transaction])
    log.close()


def _write_snapshot(snapshot: SnapWriter, uuid: str) -> None:
    snapshot.add_tuples(272, [pack(("cluster", uuid)), pack(("version", 2, 11, 1))])
    spaces = [(id, 1, name, "memtx", 0, flags, _format(fields)) for id, (name, flags, fields) in _SPACES.items()]
    snapshot.add_tuples(280, map(pack, spaces))
    keys = [(id, 0, "primary", "tree", {"unique": True}, [{"field": 0, "type": "unsigned"}]) for id in _SPACES]
    snapshot.add_tuples(288, map(pack, keys))
    snapshot.add_tuples(320, [pack((ME, uuid))])
    snapshot.add_tuples(CUSTOMERS, [pack((1, "Ada", "London")), pack((2, "Grace", None))])
    snapshot.add_tuples(PRODUCTS, [pack((1, "lamp", Decimal("19.90"), 7)), pack((2, "desk", Decimal("149.00"), 2))])


def _format(fields: str) -> list[dict[str, Any]]:
    named = (field.split(":") for field in fields.split())
    return [{"name": name, "type": kind.rstrip("?"), "is_nullable": kind.endswith("?")} for name, kind in named]


class _Shop:
    """Generates rows with consecutive LSNs and timestamps."""

    def __init__(self, now: float) -> None:
        self._now = now
        self._lsn = 0

    def first_day(self) -> Iterator[LogTransaction]:
        yield self._vote(term=2)
        yield self._control(RequestType.RAFT_PROMOTE, Promote(0, 0, 2).encode())
        yield self._transaction(self._insert(CUSTOMERS, (3, "Alan", "Manchester")))
        yield self._sale(101, customer=1, product=1)
        yield self._control(RequestType.RAFT_CONFIRM, Confirm(ME, self._lsn).encode())
        yield self._sale(102, customer=2, product=2)
        withdrawn = self._lsn
        # Asynchronous, but pending after a synchronous transaction, and rolled back with it.
        yield self._transaction(self._insert(CUSTOMERS, (4, "Edsger", "Rotterdam")), flags=Flag.WAIT_SYNC.value)
        yield self._control(RequestType.RAFT_ROLLBACK, Rollback(ME, withdrawn).encode())
        yield self._transaction(self._change(PRODUCTS, 2, [("=", 2, Decimal("139.00"))]))

    def second_day(self) -> Iterator[LogTransaction]:
        yield self._transaction(self._insert(CUSTOMERS, (5, "Barbara", "Los Angeles")))
        yield self._transaction(self._row(RequestType.DELETE, {Key.SPACE_ID: CUSTOMERS, Key.KEY: (2,)}))
        yield self._transaction(self._change(PRODUCTS, 1, [("+", 3, 10)]))

    def _row(self, kind: RequestType, body: dict[Key, Any]) -> Row:
        return self._numbered(kind, pack({key.value: value for key, value in body.items()}))

    def _numbered(self, kind: RequestType, body: bytes) -> Row:
        self._lsn += 1
        self._now += 0.25
        return Row(kind.value, ME, lsn=self._lsn, tsn=self._lsn, timestamp=self._now, body=body)

    def _insert(self, space_id: int, values: tuple[Any, ...]) -> Row:
        return self._row(RequestType.INSERT, {Key.SPACE_ID: space_id, Key.TUPLE: values})

    def _change(self, space_id: int, key: int, operations: Sequence[tuple[Any, ...]]) -> Row:
        body = {Key.SPACE_ID: space_id, Key.KEY: (key,), Key.TUPLE: operations}
        return self._row(RequestType.UPDATE, body)

    def _transaction(self, *rows: Row, flags: int = 0) -> LogTransaction:
        return make_transaction(rows, flags)

    def _sale(self, order: int, *, customer: int, product: int) -> LogTransaction:
        """Return one transaction of two rows: the order, and the stock reduced by one."""
        moment = Datetime(int(self._now))
        rows = (
            self._insert(ORDERS, (order, customer, product, moment)),
            self._change(PRODUCTS, product, [("-", 3, 1)]),
        )
        return self._transaction(*rows, flags=SYNCHRONOUS)

    def _control(self, kind: RequestType, body: bytes) -> LogTransaction:
        return self._transaction(self._numbered(kind, body))

    def _vote(self, term: int) -> LogTransaction:
        """Return the local row in which an instance records its vote."""
        body = pack({RaftKey.TERM.value: term, RaftKey.VOTE.value: ME})
        row = Row(RequestType.RAFT.value, group_id=GROUP_LOCAL, lsn=1, tsn=1, timestamp=self._now, body=body)
        return self._transaction(row)
