"""Rows for the archive tests: transactions as a log has them, and as packets of a stream."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

from flowstone.iproto.constants import Flag, RequestType
from flowstone.iproto.msgpack import pack
from flowstone.iproto.row import Row
from flowstone.iproto.slab import Slab
from flowstone.replication.limbo.control_rows import Confirm, Promote, Rollback
from flowstone.replication.row_stream import RowStream, slab_of_rows
from flowstone.xlog.transactions import make_transaction
from tests.node.fault_disk import FaultDisk

SYNC = (Flag.WAIT_SYNC | Flag.WAIT_ACK).value
QUEUED = Flag.WAIT_SYNC.value
INSTANCE = "11111111-2222-3333-4444-555555555555"
SPACE, SYNC_SPACE = 512, 513


def new_disk() -> Any:
    """Return the FaultDisk as a Disk, which it is except for its result types."""
    return FaultDisk()


def row(lsn: int, space: int = SPACE, *, origin: int = 1, at: float | None = None, size: int = 1) -> Row:
    body = b"\x82\x10" + pack(space) + b"\x21" + pack([lsn, "x" * size])
    return Row(RequestType.REPLACE, origin, lsn=lsn, timestamp=100.0 + lsn if at is None else at, body=body)


def alone(lsn: int, space: int = SPACE, *, flags: int = 0, **how: Any) -> bytes:
    return transaction([row(lsn, space, **how)], flags)


def transaction(rows: Iterable[Row], flags: int = 0) -> bytes:
    return b"".join(each.encode() for each in make_transaction(list(rows), flags).rows)


def confirm(lsn: int, confirmed: int, origin: int = 1) -> bytes:
    return _control(lsn, origin, RequestType.RAFT_CONFIRM, Confirm(origin, confirmed).encode())


def rollback(lsn: int, withdrawn: int, origin: int = 1) -> bytes:
    return _control(lsn, origin, RequestType.RAFT_ROLLBACK, Rollback(origin, withdrawn).encode())


def promote(lsn: int, confirmed: int, *, term: int, origin: int, owner: int = 1) -> bytes:
    """Return a PROMOTE: `origin` takes over the queue of `owner`."""
    return _control(lsn, origin, RequestType.RAFT_PROMOTE, Promote(owner, confirmed, term).encode())


def _control(lsn: int, origin: int, kind: RequestType, body: bytes) -> bytes:
    return transaction([Row(kind, origin, lsn=lsn, timestamp=100.0 + lsn, body=body)])


def define_space(lsn: int, space: int, *, is_sync: bool = False) -> bytes:
    definition = [space, 1, f"s{space}", "memtx", 0, {"is_sync": True} if is_sync else {}, []]
    body = b"\x82\x10" + pack(280) + b"\x21" + pack(definition)
    return transaction([Row(RequestType.INSERT, 1, lsn=lsn, timestamp=100.0 + lsn, body=body)])


def slab(*rows: bytes) -> Slab:
    return slab_of_rows(b"".join(rows), "test")


def stream(*rows: Row) -> Slab:
    """Return the rows as a peer sends them, each after its length."""
    feed = RowStream("peer")
    for each in rows:
        data = each.encode()
        feed.feed(b"\xce" + struct.pack(">I", len(data)) + data)
    found = feed.take()
    assert found is not None
    return found
