"""Linearization points: enough members report their positions anew, we reach them, and the queue is decided."""

from __future__ import annotations

import asyncio

import pytest

from flowstone.box.ddl import functions as ddl
from flowstone.box.dialect import Dialect
from flowstone.box.engine import statements
from flowstone.errors import OutcomeUnknown
from flowstone.iproto import errors
from flowstone.iproto.msgpack import pack
from flowstone.node.instance import Instance
from flowstone.node.synchro.linearizable import linearization_point
from flowstone.replication.vclock import VClock
from tests.node.answering import Answering
from tests.node.instances import make_instance


class Point:
    """A running call of `linearization_point`."""

    def __init__(self, instance: Instance, timeout: float = 60.0) -> None:
        self._task = asyncio.ensure_future(linearization_point(instance, timeout))

    async def is_there(self) -> bool:
        """Run all ready callbacks; return True if the call has ended."""
        for _ in range(10):
            await asyncio.sleep(0)
        return self._task.done()

    async def reached(self) -> None:
        await asyncio.wait_for(self._task, 60)


@pytest.fixture
async def instance() -> Instance:
    """Return an instance that owns the queue, with a synchronous space, 512."""
    made = make_instance()
    transaction = made.box.begin()
    ddl.create_space(transaction, "safe", is_sync=True)
    ddl.create_index(transaction, "safe", "pk")
    await made.commits.commit(transaction)
    made.queue.registered(1)
    await made.queue.promote(2)
    return made


async def test_single_instance_queries_no_peer() -> None:
    await Point(make_instance()).reached()


@pytest.mark.parametrize(
    ("members", "quorum", "others"), [(2, 2, 1), (3, 2, 1), (5, 3, 2), (5, 4, 2), (3, 1, 2), (3, 3, 1)]
)
async def test_linearizable_read_queries_a_member_of_every_quorum(members: int, quorum: int, others: int) -> None:
    instance = make_instance()
    followers = Answering(instance, members=members, quorum=quorum)
    point = Point(instance)
    for replica_id in range(2, 2 + others):
        assert not await point.is_there()
        followers.answer(replica_id)
    await point.reached()


async def test_answer_to_an_older_heartbeat_is_ignored() -> None:
    instance = make_instance()
    followers = Answering(instance, members=3)
    point = Point(instance)
    assert not await point.is_there()
    followers.answer(2, number=followers.numbers[2] - 1)
    assert not await point.is_there()
    followers.answer(2, number=followers.numbers[2] + 3)
    await point.reached()


async def test_member_counts_only_once() -> None:
    instance = make_instance()
    followers = Answering(instance, members=5)
    point = Point(instance)
    assert not await point.is_there()
    followers.answer(2)
    followers.answer(2)
    assert not await point.is_there()
    followers.answer(5)
    await point.reached()


async def test_member_that_connects_during_the_wait_counts_from_its_first_heartbeat() -> None:
    instance = make_instance()
    followers = Answering(instance, members=3)
    followers.numbers.clear()
    point = Point(instance)
    assert not await point.is_there()
    followers.answer(3, number=0)
    assert not await point.is_there()
    followers.answer(3, number=1)
    await point.reached()


async def test_linearizable_read_removes_its_callback_after_a_timeout() -> None:
    instance = make_instance()
    followers = Answering(instance, members=3)
    with pytest.raises(errors.System, match="timed out") as raised:
        await linearization_point(instance, 0.01)
    assert raised.value.stack is not None
    assert raised.value.stack.errors[0].type == "TimedOut"
    assert followers.on_answer == []


async def test_linearizable_read_waits_for_rows_of_other_members(instance: Instance) -> None:
    followers = Answering(instance, members=3)
    point = Point(instance)
    assert not await point.is_there()
    ahead = instance.vclock.get(1) + 2
    followers.answer(2, VClock({1: ahead}))
    for lsn in range(instance.vclock.get(1) + 1, ahead + 1):
        assert not await point.is_there()
        transaction = instance.box.begin()
        ddl.create_space(transaction, f"space_{lsn}")
        await instance.commits.commit(transaction)
    await point.reached()
    assert instance.vclock.get(1) == ahead
    assert instance.journal.on_written == []


async def test_linearizable_read_waits_for_verdicts_on_pending_transactions(instance: Instance) -> None:
    followers = Answering(instance, members=3)
    transaction = instance.box.begin()
    statements.insert(transaction, instance.box.space("safe"), pack((1,)))
    commit = asyncio.ensure_future(instance.commits.commit(transaction))
    point = Point(instance)
    assert not await point.is_there()
    followers.answer(2)
    assert not await point.is_there()
    instance.queue.ack(3, instance.vclock)
    await point.reached()
    await commit


async def test_linearizable_read_succeeds_when_the_queue_is_rolled_back(instance: Instance) -> None:
    followers = Answering(instance, members=3)
    instance.queue.configure(timeout=0.02)
    transaction = instance.box.begin()
    statements.insert(transaction, instance.box.space("safe"), pack((1,)))
    commit = asyncio.ensure_future(instance.commits.commit(transaction))
    point = Point(instance)
    assert not await point.is_there()
    followers.answer(2)
    await point.reached()
    with pytest.raises(errors.SyncQuorumTimeout):
        await commit


async def test_linearizable_read_times_out_without_a_verdict(instance: Instance) -> None:
    followers = Answering(instance, members=3)
    transaction = instance.box.begin()
    statements.insert(transaction, instance.box.space("safe"), pack((1,)))
    commit = asyncio.ensure_future(instance.commits.commit(transaction))
    point = Point(instance, timeout=0.05)
    assert not await point.is_there()
    followers.answer(2)
    with pytest.raises(errors.System, match="timed out"):
        await point.reached()
    instance.queue.ack(2, instance.vclock)
    await commit


async def test_linearizable_read_is_rejected_when_the_instance_is_expelled_meanwhile(instance: Instance) -> None:
    followers = Answering(instance, members=3)
    transaction = instance.box.begin()
    statements.insert(transaction, instance.box.space("safe"), pack((1,)))
    commit = asyncio.ensure_future(instance.commits.commit(transaction))
    point = Point(instance)
    assert not await point.is_there()
    followers.answer(2)
    assert not await point.is_there()
    instance.expelled_id = 1
    instance.queue.expelled()
    with pytest.raises(errors.LocalInstanceIdIsReadOnly, match="this instance was expelled"):
        await point.reached()
    with pytest.raises(OutcomeUnknown):
        await commit


async def test_2_6_has_no_linearizable_transactions() -> None:
    with pytest.raises(errors.Unsupported, match=r"Dialect 2\.6 does not support linearizable transactions"):
        await linearization_point(make_instance(dialect=Dialect.V2_6), 1.0)
