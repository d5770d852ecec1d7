"""The limbo of a node that is alone: synchronous transactions that recovery found without a verdict.

They are in memory, where they can be read, and must not become facts by accident: while any waits, nothing is written
behind it (the instance is read-only) and no snapshot is made. `clear_synchro_queue` is the one verdict that can be
given without synchronous replication.
"""

from __future__ import annotations

import asyncio

from flowstone.box.dialect import Dialect
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import Row
from flowstone.node.commits import wal_error
from flowstone.node.instance import Instance
from flowstone.replication.synchro import Confirm


async def clear_synchro_queue(instance: Instance) -> None:
    """Returns when everything that waits is confirmed, and logged so: an instance of 2.6 alone is its own quorum.

    Servers since 2.10 settle their queue by a promotion, which is not there yet.
    """
    if instance.box.dialect is not Dialect.V2_6:
        raise errors.Unsupported("This release of Flowstone does not support box.ctl.clear_synchro_queue()")
    synchro, journal = instance.synchro, instance.journal
    if not synchro.pending:
        return
    last = max(applied.lsn for applied in synchro.pending if applied.is_synchronous)
    body = Confirm(synchro.queue_owner_id, last).encode()
    lsn, now = journal.next_lsn(journal.replica_id), instance.outside.clock.wall()
    row = Row(RequestType.RAFT_CONFIRM, journal.replica_id, 0, lsn, now, lsn, body=body)
    written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(error: FlowstoneError | None) -> None:
        if error is None:
            synchro.follow(row)
            synchro.pending = ()
            instance.settle_read_only()
        if written.cancelled():
            return
        if error is None:
            written.set_result(None)
        else:
            written.set_exception(wal_error(error))

    journal.submit(row.encode(), 1, done)
    journal.flush()
    await written
