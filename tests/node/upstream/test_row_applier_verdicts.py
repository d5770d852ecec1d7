"""Control rows that must wait or have no effect: replies, and rows hidden until the verdict."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.box.engine.index import WHOLE
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack
from flowstone.node.upstream import row_applier as applying
from flowstone.node.wal.journal import WalMode
from flowstone.replication.limbo.control_rows import Promote, Rollback
from tests.node.applied_rows import (
    BEHIND,
    INSERT,
    NOP,
    REPLACE,
    SYNC,
    SYNCHRONOUS,
    Master,
    Replica,
    put,
    settled,
    slab,
)


def confirmed(replica: Replica) -> list[bytes]:
    """Return what a transaction with isolation read-confirmed sees."""
    primary = replica.box.space(SYNC).primary
    assert primary is not None
    with replica.box.open_view(confirmed=True) as view:
        return [raw for _, raw in view.source(primary).scan(WHOLE)]


async def owner(monkeypatch: pytest.MonkeyPatch) -> Replica:
    """Return the owner of the queue, in which one transaction waits for a second member."""
    monkeypatch.setattr(applying, "schema_version", lambda box: (2, 11, 1))
    replica = Replica(WalMode.FSYNC, Dialect.V2_11)
    replica.commits.queue.see_term(2)
    await replica.commits.queue.promote(2)
    replica.commits.queue.configure(quorum=2)
    transaction = replica.box.begin()
    statements.replace(transaction, replica.box.space(SYNC), pack([1]))
    replica.commits.submit(transaction, lambda error: None)
    replica.journal.flush()
    await settled(replica)
    assert len(replica.limbo) == 1
    return replica


@pytest.mark.parametrize("disk_fails", [False, True])
async def test_promote_rejected_after_a_wait_stops_its_applier(
    monkeypatch: pytest.MonkeyPatch, disk_fails: bool
) -> None:
    replica, peer = await owner(monkeypatch), Master(2)
    lsn = replica.limbo.pending[0].lsn
    fail = replica.journal._fail

    def room_again(*how: Any) -> None:
        replica.disk.room = None
        fail(*how)

    monkeypatch.setattr(replica.journal, "_fail", room_again)
    replica.disk.room = 0 if disk_fails else None
    replica.commits.queue.ack(2, replica.journal.written_vclock)  # our CONFIRM is being written
    promote = Promote(1, lsn if disk_fails else 0, 3)
    replica.applying.apply(slab(peer.says(promote), peer.does(put(REPLACE, 77, space=SYNC), flags=SYNCHRONOUS)))
    await settled(replica)
    await asyncio.sleep(0.05)
    await settled(replica)
    kinds: tuple[type[FlowstoneError], ...] = (errors.WalIo, errors.SplitBrain)
    assert isinstance(replica.failures[0], kinds)
    assert {row.replica_id for row in replica.rows()} == {1}
    assert replica.applying.in_flight_bytes == 0


async def test_pending_transaction_is_not_confirmed_by_later_rows() -> None:
    replica, old, new = Replica(WalMode.WRITE, Dialect.V2_11), Master(2), Master(3)
    for rows in (
        old.says(Promote(0, 0, 2)),
        new.says(Promote(2, 0, 3)),
        new.does(put(REPLACE, 1, "waits", space=SYNC), flags=SYNCHRONOUS),
        new.does((NOP, None), flags=BEHIND),
        old.does(put(REPLACE, 2, "void", space=SYNC), flags=SYNCHRONOUS),
    ):
        replica.applying.apply(slab(rows))
        await settled(replica)
    assert (sorted(replica.content(SYNC)), confirmed(replica)) == ([1], [])
    replica.applying.apply(slab(new.says(Rollback(3, 2))))
    await settled(replica)
    assert (replica.content(SYNC), list(replica.box.in_flight)) == ({}, [])


async def test_skipped_conflict_reveals_no_pending_rows() -> None:
    replica, master = Replica(WalMode.WRITE, Dialect.V2_6), Master(2)
    replica.skips = True
    replica.applying.apply(slab(master.does(put(INSERT, 1, "there"))))
    replica.applying.apply(slab(master.does(put(REPLACE, 1, "waits", space=SYNC))))
    replica.applying.apply(slab(master.does(put(INSERT, 1, "taken"))))
    await settled(replica)
    assert (sorted(replica.content(SYNC)), confirmed(replica)) == ([1], [])
