"""The linearization point: a transaction that begins after it sees everything committed before it was requested.

A committed transaction is on a quorum of the N members, so at least one of any N - quorum + 1 members has it. 2.11 asks
this many, itself included. This node queries at least a majority, for two reasons: the instance that committed may have
had a smaller quorum than ours, and the set may have one member that this instance does not know yet. A majority of the
known members and a majority of the actual members always intersect.

Members are asked for their vclocks by a numbered heartbeat, which their ACKs answer. Then this instance waits until it
has all rows that any queried member has, and until the transactions that are pending in its queue at that time are
decided. All this covers synchronous spaces only, which `box/engine/transaction.py` ensures.
"""

from __future__ import annotations

import asyncio

from flowstone.box.dialect import Dialect
from flowstone.errors import OutcomeUnknown
from flowstone.iproto import errors
from flowstone.node.info import members
from flowstone.node.instance import Followers, Instance
from flowstone.node.synchro.promotion import timed_out
from flowstone.replication.membership.membership import expelled
from flowstone.replication.vclock import VClock


async def linearization_point(instance: Instance, timeout: float) -> None:
    """Wait until this instance has everything committed before the call; raise TimedOut after `timeout` seconds."""
    if instance.box.dialect is Dialect.V2_6:
        raise errors.Unsupported("Dialect 2.6 does not support linearizable transactions")
    if instance.is_expelled:
        raise expelled(instance.expelled_id)
    if not instance.id:
        # An anonymous replica belongs to no quorum, and no member that could answer follows it.
        raise errors.Unsupported("replication_anon=true does not support linearizable transactions")
    try:
        async with asyncio.timeout(timeout):
            # Wait for the rows first, then for the verdicts on pending ones, which the answer may include.
            vclock = await _newest_vclock(instance)
            await _reach(instance, vclock)
            await _decided(instance)
    except TimeoutError:
        raise timed_out() from None


async def _newest_vclock(instance: Instance) -> VClock:
    """Return a vclock that includes all rows that may be committed by now."""
    found = {instance.id: instance.vclock.without_zero()}
    member_count = max(1, len(list(members(instance))))
    count = max(member_count - instance.queue.limbo.quorum, member_count // 2) + 1
    if count > 1:
        await _ask(instance.followers, found, count)
    newest = VClock()
    for vclock in found.values():
        newest = newest.merged(vclock)
    return newest


async def _ask(followers: Followers, found: dict[int, VClock], count: int) -> None:
    """Add vclocks of members to `found`, by id, until there are `count`."""
    enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answered(replica_id: int, number: int, vclock: VClock) -> None:
        if number >= numbers.get(replica_id, 1) and not enough.done():
            # The first answer is enough: later ones only include rows written after the call.
            found.setdefault(replica_id, vclock)
            if len(found) >= count:
                enough.set_result(None)

    # A heartbeat with a new number per member: an ACK with a lower number was sent before this call and proves nothing.
    numbers = followers.synchronize()
    # No `await` since `synchronize`, so no answer is missed.
    followers.on_answer.append(answered)
    try:
        await enough
    finally:
        followers.on_answer.remove(answered)


async def _reach(instance: Instance, vclock: VClock) -> None:
    """Wait until the log has all rows up to `vclock`."""
    if vclock <= instance.vclock:
        return
    reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def written(rows: bytes, after: VClock) -> None:
        if vclock <= after and not reached.done():
            reached.set_result(None)

    instance.journal.on_written.append(written)
    try:
        await reached
    finally:
        instance.journal.on_written.remove(written)


async def _decided(instance: Instance) -> None:
    """Wait for the verdicts on the transactions pending now, whether committed or rolled back."""
    try:
        await instance.queue.settled()
    # A rolled back transaction was never committed, so the read need not see it.
    except errors.SyncRollback:
        return
    except OutcomeUnknown:
        # An expelled instance gets no verdicts. Nothing was written here, so the outcome of the read is not in doubt.
        if instance.is_expelled:
            raise expelled(instance.expelled_id) from None
        raise
