"""Late rows of a former owner of the queue: NOPs that every server recovers, and their effect on later rows."""

from __future__ import annotations

import time

import pytest

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.iproto.constants import Flag
from flowstone.node.upstream import row_applier as applying
from flowstone.replication.limbo.control_rows import Confirm, Demote, Promote
from flowstone.replication.row_stream import RowStream, stream_packets
from flowstone.xlog.reader import LogFile
from tests.node.applied_rows import BEHIND, INSERT, NOP, SYNC, SYNCHRONOUS, Master, Replica, put, settled, slab

COMMIT = Flag.COMMIT.value


async def deposed(first: int = 0) -> tuple[Replica, Master, Master]:
    """Return a replica that knows that the second of two masters succeeded the first, up to row `first`."""
    replica, one, two = Replica(dialect=Dialect.V2_11), Master(2), Master(3)
    replica.applying.apply(slab(one.says(Promote(0, 0, 2))))
    if first:
        replica.applying.apply(slab(one.does(put(INSERT, 1, space=SYNC), flags=SYNCHRONOUS)))
    replica.applying.apply(slab(two.says(Promote(2, first, 3))))
    return await settled(replica), one, two


async def test_late_synchronous_transaction_is_logged_as_nops_without_limbo_flags() -> None:
    replica, one, _ = await deposed()
    replica.applying.apply(slab(one.does(put(INSERT, 1, space=SYNC), put(INSERT, 2), flags=SYNCHRONOUS)))
    await settled(replica)
    rows = [(row.type, row.replica_id, row.lsn, row.tsn, row.flags, row.body) for row in replica.rows()[-2:]]
    assert rows == [(NOP, 2, 2, 2, 0, b""), (NOP, 2, 3, 2, COMMIT, b"")]
    assert replica.content(SYNC) == replica.content() == {}


async def test_late_rows_are_logged_as_nops_without_limbo_flags() -> None:
    replica, one, _ = await deposed()
    for key, flags in enumerate((SYNCHRONOUS, BEHIND)):
        replica.applying.apply(slab(one.does(put(INSERT, key, space=SYNC), flags=flags)))
    await settled(replica)
    assert [(row.type, row.flags) for row in replica.rows()[-2:]] == [(NOP, COMMIT), (NOP, COMMIT)]


async def test_large_late_transaction_takes_linear_time() -> None:
    """In quadratic time this takes minutes; the limit is CPU time, so that a busy machine does not matter."""
    replica, one, _ = await deposed()
    late = slab(one.does(*(put(INSERT, key, space=SYNC) for key in range(120_000)), flags=SYNCHRONOUS))
    begun = time.process_time()
    replica.applying.apply(late)
    assert time.process_time() - begun < 20
    await settled(replica)
    assert [(row.type, row.flags) for row in replica.rows()[-2:]] == [(NOP, 0), (NOP, COMMIT)]


@pytest.mark.parametrize("flags", [Flag.WAIT_ACK.value, BEHIND, SYNCHRONOUS])
async def test_received_nops_are_logged_without_limbo_flags(flags: int) -> None:
    """3.8 sends WAIT_ACK, and earlier releases of ours both flags."""
    replica, one, two = await deposed()
    replica.applying.apply(slab(one.does((NOP, None), (NOP, None), flags=flags), two.does((NOP, None), flags=flags)))
    await settled(replica)
    rows = [(row.type, row.lsn, row.flags) for row in replica.rows()[-3:]]
    assert rows == [(NOP, 2, 0), (NOP, 3, COMMIT), (NOP, 2, COMMIT)]
    assert replica.limbo.pending == ()


async def test_transaction_of_skipped_conflicts_and_nops_is_not_pending() -> None:
    """2.11 asks whether all rows are NOPs in the end, wherever they became NOPs."""
    replica, one = Replica(dialect=Dialect.V2_11), Master(2)
    replica.skips = True
    replica.applying.apply(slab(one.says(Promote(0, 0, 2)), one.does(put(INSERT, 1))))
    replica.applying.apply(slab(one.does(put(INSERT, 1), (NOP, None), flags=SYNCHRONOUS)))
    replica.applying.apply(slab(one.does(put(INSERT, 1), flags=SYNCHRONOUS)))
    await settled(replica)
    assert replica.limbo.pending == ()
    assert [(row.type, row.flags) for row in replica.rows()[-3:]] == [(NOP, 0), (NOP, COMMIT), (NOP, COMMIT)]


async def test_transaction_ending_in_a_nop_is_filtered_by_the_flags_of_that_row() -> None:
    """`applier_synchro_filter_tx` of 2.11 checks the last row, whatever its type, and replaces all rows by NOPs."""
    replica, one, _ = await deposed()
    replica.applying.apply(slab(one.does(put(INSERT, 1, space=SYNC), (NOP, None), flags=SYNCHRONOUS)))
    await settled(replica)
    assert replica.content(SYNC) == {}
    assert [row.type for row in replica.rows()[-2:]] == [NOP, NOP]
    with pytest.raises(errors.SplitBrain, match="got an async transaction from an old term"):
        replica.applying.apply(slab(one.does(put(INSERT, 2), (NOP, None))))


async def test_transaction_of_the_owner_ending_in_a_nop_waits_for_its_verdict() -> None:
    replica, one = Replica(dialect=Dialect.V2_11), Master(2)
    replica.applying.apply(slab(one.says(Promote(0, 0, 2))))
    replica.applying.apply(slab(one.does(put(INSERT, 1, space=SYNC), (NOP, None), flags=SYNCHRONOUS)))
    await settled(replica)
    assert [entry.lsn for entry in replica.limbo.pending] == [3]
    assert replica.rows()[-1].flags == COMMIT | SYNCHRONOUS


async def test_late_row_that_remains_valid_is_logged_without_limbo_flags_if_the_queue_has_no_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The former owner keeps it, and no owner of the queue forbids it; flagged, no server would recover it."""
    monkeypatch.setattr(applying, "schema_version", lambda box: (2, 11, 1))
    replica, one, two = await deposed(first=2)
    replica.applying.apply(slab(two.says(Demote(3, 0, 4))))
    await settled(replica)
    replica.applying.apply(slab(one.does(put(INSERT, 5), flags=BEHIND)))
    await settled(replica)
    assert list(replica.content()) == [5]
    assert [(row.type, row.flags) for row in replica.rows()[-1:]] == [(INSERT, COMMIT)]


async def test_committed_row_among_received_nops_ends_the_former_tenure() -> None:
    """3.8 relays NOPs with WAIT_ACK, which are logged anew: they must not hide a committed row of the same batch."""
    replica, one, two = await deposed()
    assert replica.limbo.history.former
    nops = [one.does((NOP, None), flags=Flag.WAIT_ACK.value) for _ in range(2)]
    replica.applying.apply(slab(*nops, two.does(put(INSERT, 7))))
    await settled(replica)
    assert list(replica.content()) == [7]
    assert not replica.limbo.history.former


async def test_nop_of_a_former_owner_voids_its_later_pending_transactions() -> None:
    """Another member relayed the NOP first; the next row comes from the former owner itself."""
    replica, one, _ = await deposed()
    replica.applying.apply(slab(one.does((NOP, None))))
    replica.applying.apply(slab(one.does(put(INSERT, 2), flags=BEHIND)))
    await settled(replica)
    assert replica.content() == {}
    assert replica.rows()[-1].type == NOP


async def test_nop_in_place_of_a_verdict_voids_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The former owner keeps the rows that waited for a committed transaction, so the two have diverged."""
    monkeypatch.setattr(applying, "schema_version", lambda box: (2, 11, 1))
    replica, one, _ = await deposed(first=2)
    replica.applying.apply(slab(one.says(Confirm(2, 2))))
    await settled(replica)
    assert (replica.rows()[-1].type, replica.rows()[-1].flags) == (NOP, COMMIT)
    late = one.does(put(INSERT, 2), flags=BEHIND)
    for member in (replica, await follower(replica)):
        with pytest.raises(errors.SplitBrain, match="got an async transaction from an old term"):
            member.applying.apply(slab(late))


async def follower(replica: Replica) -> Replica:
    """Return a replica that got all its rows from the log of `replica`."""
    peer, stream = Replica(dialect=Dialect.V2_11), RowStream("peer")
    disk = replica.disk.outside().disk
    for name in disk.list_directory("data"):
        with LogFile.open(disk, f"data/{name}") as log:
            for each in log.slabs():
                stream.feed(stream_packets(each))
    while (taken := stream.take()) is not None:
        peer.applying.apply(taken)
        await settled(peer)
    return peer
