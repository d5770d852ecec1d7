"""The linearization point: when a transaction may begin that must see whatever was committed before it was asked for.

Nearly as 2.11 has it: what is committed is on a quorum, so of N members it takes N - quorum + 1, this one among them,
for one of them to have it all. That is the quorum of whoever committed, at that time; ours may be larger, or was
smaller then, so no more than a majority is relied on, where 2.11 goes by its own. Nor is less than a majority asked:
there may be one member more by now than this one knows, and only majorities of both sets always meet. They are asked
where they are now, by a numbered heartbeat that their ACKs answer; then this instance waits until it has what any of
them has, and until what waits in its queue of synchronous transactions then is decided. Holds for synchronous spaces
only, which `box/transaction.py` sees to.
"""

from __future__ import annotations

import asyncio

from flowstone.box.dialect import Dialect
from flowstone.iproto import errors
from flowstone.node.info import members
from flowstone.node.instance import Followers, Instance
from flowstone.node.promotion import timed_out
from flowstone.replication.membership import expelled
from flowstone.replication.vclock import VClock


async def linearization_point(instance: Instance, timeout: float) -> None:
    """Returns when everything is here that was committed anywhere before the call; raises TimedOut otherwise."""
    if instance.box.dialect is Dialect.V2_6:
        raise errors.Unsupported("Dialect 2.6 does not support linearizable transactions")
    if instance.is_expelled:
        raise expelled(instance.expelled_id)
    if not instance.id:
        # It is in no quorum, and nobody follows it whom it could ask.
        raise errors.Unsupported("replication_anon=true does not support linearizable transactions")
    try:
        async with asyncio.timeout(timeout):
            vclock = await _newest_vclock(instance)
            await _reach(instance, vclock)
            await _decided(instance)
    except TimeoutError:
        raise timed_out() from None


async def _newest_vclock(instance: Instance) -> VClock:
    """What of every member's rows might be committed by now."""
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
    """Adds vclocks of members, by id, until there are `count`."""
    enough: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answered(replica_id: int, number: int, vclock: VClock) -> None:
        if number >= numbers.get(replica_id, 1) and not enough.done():
            found.setdefault(replica_id, vclock)
            if len(found) >= count:
                enough.set_result(None)

    numbers = followers.synchronize()
    followers.on_answer.append(answered)
    try:
        await enough
    finally:
        followers.on_answer.remove(answered)


async def _reach(instance: Instance, vclock: VClock) -> None:
    """Waits until the log has everything up to `vclock`."""
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
    """Waits for the verdict on what is in the queue now; which it is does not matter."""
    try:
        await instance.queue.settled()
    except errors.SyncRollback:
        return
