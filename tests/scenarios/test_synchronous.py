"""Synchronous transactions: quorum and timeout, order, snapshots, ownership of the queue, and a lost owner."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from flowstone.iproto import errors
from flowstone.iproto.constants import RequestType
from flowstone.iproto.row import decode_row
from flowstone.node.changes import Change
from flowstone.replication.messages import decode_ack, decode_heartbeat
from tests.scenarios.middleman import Middleman
from tests.scenarios.queues import (
    NEVER,
    PATIENCE,
    PLAIN,
    SYNC,
    Pending,
    demote,
    keys_in_snapshot,
    last_lsn,
    owned_by,
    promote,
    queue,
    start_members,
    told,
)
from tests.scenarios.simulated_members import held, insert, make_space, reconfigure, snapshot, uris
from tests.simulation.cluster import converge, follows, vclock
from tests.simulation.simulation import Crashed, Simulation, simulated

DIALECTS = pytest.mark.parametrize("dialect", ["2.6", "2.11"])
QUORUM_TIMEOUT, ROLLED_BACK, READ_ONLY, UNCLAIMED, FOREIGN = 216, 217, 7, 227, 228


async def is_still_waiting(sim: Simulation, *pending: Pending, seconds: float = 10.0) -> bool:
    await sim.sleep(seconds)
    return all(each.is_waiting for each in pending)


# --- quorum and timeout ---


@DIALECTS
@simulated()
async def test_quorum_commits_two_lsns_and_a_timeout_rolls_them_back(sim: Simulation, dialect: str) -> None:
    """H1: quorum 2, then 3. The replica has the same rows, and is as consistent, even after a restart of both."""
    await start_members(sim, dialect=dialect, replication_synchro_quorum=2)
    before = last_lsn(sim, "a")
    await insert(sim, "a", 1, space=SYNC)
    assert last_lsn(sim, "a") == before + 2
    await reconfigure(sim, "a", replication_synchro_quorum=3, replication_synchro_timeout=2)
    start = sim.now
    with pytest.raises(errors.SyncQuorumTimeout, match="Quorum collection for a synchronous transaction is timed out"):
        await insert(sim, "a", 2, space=SYNC)
    assert sim.now - start == pytest.approx(2, abs=0.1)
    await reconfigure(sim, "a", replication_synchro_quorum=2)
    await insert(sim, "a", 3, space=SYNC)
    await insert(sim, "a", 1, space=PLAIN)
    await converge(sim, "ab")
    story = ["+1 insert", "+2 confirm 1+1", "+3 insert", "+4 rollback 1+3", "+5 insert", "+6 confirm 1+5", "+7 insert"]
    for _ in range(2):
        for name in "ab":
            assert told(sim, name, 1, before) == story
            assert held(sim, name, SYNC) == {1: "a", 3: "a"}
            assert held(sim, name, PLAIN) == {1: "a"}
            await sim.restart(name)
        await sim.until(lambda: follows(sim, "a", "b") and follows(sim, "b", "a"))


@DIALECTS
@simulated()
async def test_asynchronous_transactions_share_the_outcome_of_earlier_pending_ones(
    sim: Simulation, dialect: str
) -> None:
    """H1: they need no quorum of their own, and are committed or undone with the synchronous one before them."""
    await start_members(sim, dialect=dialect, replication_synchro_quorum=3)
    first = Pending(sim, "a", 1)
    behind = await Pending(sim, "a", 1, space=PLAIN).seen_by("b")
    assert await is_still_waiting(sim, first, behind)
    await reconfigure(sim, "a", replication_synchro_quorum=2)
    assert [await first.code(), await behind.code()] == [0, 0]
    await reconfigure(sim, "a", replication_synchro_quorum=3)
    first = Pending(sim, "a", 2)
    second = Pending(sim, "a", 3)
    behind = await Pending(sim, "a", 2, space=PLAIN).seen_by("a", "b")
    await reconfigure(sim, "a", replication_synchro_timeout=0.1)
    codes = [await each.code() for each in (first, second, behind)]
    assert codes == [QUORUM_TIMEOUT, ROLLED_BACK, ROLLED_BACK]
    await converge(sim, "ab")
    for name in "ab":
        assert (held(sim, name, SYNC), held(sim, name, PLAIN)) == ({1: "a"}, {1: "a"})


# --- order, and changing quorums ---


@DIALECTS
@simulated(seeds=range(2))
async def test_many_writers_commit_in_the_order_of_the_log(sim: Simulation, dialect: str) -> None:
    """H2: on the owner and on the replica, synchronous and asynchronous."""
    await start_members(sim, dialect=dialect, replication_synchro_quorum=2)
    committed: dict[str, list[int]] = {"a": [], "b": []}

    def listen(name: str) -> None:
        def note(changes: tuple[Change, ...]) -> None:
            committed[name].extend(change.fields[0] for change in changes if change.fields)

        sim.node(name).on_commit(note)

    for name in "ab":
        listen(name)

    async def write(key: int) -> None:
        await sim.sleep(sim.random.uniform(0, 1))
        await insert(sim, "a", key, space=sim.random.choice([SYNC, SYNC, PLAIN]))

    await asyncio.gather(*map(write, range(60)))
    await converge(sim, "ab")
    assert sorted(committed["a"]) == list(range(60))
    assert committed["a"] == committed["b"]
    await sim.until(lambda: not any(sim.node(name).box.in_flight for name in "ab"))


@DIALECTS
@simulated()
async def test_changed_quorum_applies_to_pending_transactions(sim: Simulation, dialect: str) -> None:
    """H2: the quorum is raised and lowered; a joining member completes it, and a lost one does not."""
    await start_members(sim, dialect=dialect, replication_synchro_quorum=2)
    sim.cut("a", "b")
    pending = await Pending(sim, "a", 1).seen_by("a")
    await reconfigure(sim, "a", replication_synchro_quorum=3)
    sim.heal()
    await pending.seen_by("b")
    assert await is_still_waiting(sim, pending)
    joining = asyncio.ensure_future(
        sim.start("c", replication=uris(sim, "a", "b"), replication_synchro_timeout=PATIENCE, dialect=dialect)
    )
    await sim.sleep(3)
    assert pending.is_waiting, "a join waits for a verdict, too"
    await reconfigure(sim, "a", replication_synchro_quorum=2)
    assert await pending.code() == 0
    await joining
    await reconfigure(sim, "a", replication_synchro_quorum=3)
    await insert(sim, "a", 2, space=SYNC)
    sim.kill("c")
    pending = await Pending(sim, "a", 3).seen_by("b")
    assert await is_still_waiting(sim, pending)
    await reconfigure(sim, "a", replication_synchro_quorum=1)
    assert await pending.code() == 0
    await sim.restart("c")
    await converge(sim, "abc")
    assert held(sim, "c", SYNC) == {1: "a", 2: "a", 3: "a"}


@DIALECTS
@simulated()
async def test_empty_queue_moves_to_another_member(sim: Simulation, dialect: str) -> None:
    """H2: in 2.6 with the first write, later with a promotion; its earlier writes stay committed."""
    await start_members(sim, dialect=dialect, replication_synchro_quorum=2)
    for number, name in enumerate("abab"):
        if dialect != "2.6":
            await promote(sim, name)
        await insert(sim, name, number, space=SYNC)
        await converge(sim, "ab")
    assert held(sim, "a", SYNC) == held(sim, "b", SYNC) == dict(enumerate("abab"))


# --- snapshots ---


@DIALECTS
@pytest.mark.parametrize("is_confirmed", [True, False], ids=["confirmed", "rolled back"])
@simulated()
async def test_snapshot_contains_only_confirmed_rows(sim: Simulation, dialect: str, is_confirmed: bool) -> None:
    """H3: the snapshot waits for the verdict, and excludes undone rows, on the owner and on the replica."""
    await start_members(sim, dialect=dialect, replication_synchro_quorum=2)
    await insert(sim, "a", 1, space=SYNC)
    await reconfigure(sim, "a", replication_synchro_quorum=NEVER)
    pending = await Pending(sim, "a", 2).seen_by("a", "b")
    snapshots = {name: asyncio.ensure_future(snapshot(sim, name)) for name in "ab"}
    await sim.sleep(10)
    assert not any(made.done() for made in snapshots.values())
    if is_confirmed:
        await reconfigure(sim, "a", replication_synchro_quorum=2)
        assert await pending.code() == 0
    else:
        await reconfigure(sim, "a", replication_synchro_timeout=0.1)
        assert await pending.code() == QUORUM_TIMEOUT
    for name, made in snapshots.items():
        if is_confirmed:
            await made
        else:
            with pytest.raises(errors.SyncRollback):
                await made
            await snapshot(sim, name)
        assert keys_in_snapshot(sim, name) == ([1, 2] if is_confirmed else [1])
        await sim.restart(name)
    await sim.until(lambda: follows(sim, "a", "b") and follows(sim, "b", "a"))
    for name in "ab":
        assert list(held(sim, name, SYNC)) == ([1, 2] if is_confirmed else [1])


@DIALECTS
@simulated()
async def test_wait_of_a_snapshot_for_a_verdict_is_limited(sim: Simulation, dialect: str) -> None:
    """H3: by `replication_synchro_timeout`, if the owner is lost and no other member decides."""
    await start_members(sim, dialect=dialect, replication_synchro_quorum=NEVER)
    pending = await Pending(sim, "a", 1).seen_by("b")
    sim.kill("a")
    with pytest.raises(Crashed):
        await pending.code()
    await reconfigure(sim, "b", replication_synchro_timeout=3)
    before = sim.now
    with pytest.raises(errors.SyncQuorumTimeout):
        await snapshot(sim, "b")
    assert sim.now - before == pytest.approx(3, abs=0.1)


# --- quorum members ---


@DIALECTS
@simulated()
async def test_repeated_ack_of_a_replica_counts_once(sim: Simulation, dialect: str) -> None:
    """H5: ACKs serve as heartbeats, and arrive continuously."""
    acked: list[int] = []

    def note(packet: bytes) -> bytes:
        row = decode_row(packet)
        if row.type == RequestType.OK:
            acked.append(decode_ack(row).vclock.get(1))
        return packet

    await sim.start("a", dialect=dialect, replication_synchro_timeout=PATIENCE)
    await make_space(sim, "a", SYNC, is_sync=True)
    async with Middleman(sim, "a") as middle:
        middle.on_request = note
        await sim.start("b", replication=[middle.uri])
        await sim.until(lambda: follows(sim, "b", "a"))
        if dialect != "2.6":
            await promote(sim, "a")
        await reconfigure(sim, "a", replication_synchro_quorum=3)
        pending = await Pending(sim, "a", 1).seen_by("b")
        lsn = last_lsn(sim, "a")
        await sim.until(lambda: acked.count(lsn) > 5)
        assert pending.is_waiting
        await reconfigure(sim, "a", replication_synchro_quorum=2)
        assert await pending.code() == 0
        await sim.until(lambda: acked[-1] == last_lsn(sim, "a"))
        assert told(sim, "b", 1, lsn - 1) == ["+1 insert", "+2 confirm 1+1"]


# --- ownership of the queue ---


@simulated()
async def test_queue_is_claimed_by_a_promotion_transferred_by_the_next_and_released(sim: Simulation) -> None:
    """H9: unclaimed, no member writes synchronously; claimed, only its owner writes at all."""
    await start_members(sim, "abc", owner="")
    for name in "abc":
        with pytest.raises(errors.SyncQueueUnclaimed):
            await insert(sim, name, 1, space=SYNC)
    await insert(sim, "b", 1, space=PLAIN)
    await converge(sim, "abc")
    for number, owner in enumerate("abca"):
        await promote(sim, owner)
        assert await owned_by(sim, owner, "abc") == number + 2
        await insert(sim, owner, number, space=SYNC)
        await insert(sim, owner, 10 + number, space=PLAIN)
        for other in sorted(set("abc") - {owner}):
            info = sim.node(other).info()
            assert (info["ro"], info["ro_reason"]) == (True, "synchro")
            for space in (SYNC, PLAIN):
                with pytest.raises(errors.Readonly):
                    await insert(sim, other, 99, space=space)
        await converge(sim, "abc")
    await demote(sim, "b")
    assert queue(sim, "b")["owner"] == 1, "only the owner can release the queue"
    await demote(sim, "a")
    assert await owned_by(sim, "", "abc") == 6
    for number, name in enumerate("abc"):
        assert not sim.node(name).info()["ro"]
        with pytest.raises(errors.SyncQueueUnclaimed):
            await insert(sim, name, 99, space=SYNC)
        await insert(sim, name, 20 + number, space=PLAIN)
    await converge(sim, "abc")
    assert list(held(sim, "c", SYNC).values()) == list("abca")


# --- a lost owner ---


@DIALECTS
@pytest.mark.parametrize("count", [1, 5])
@simulated()
async def test_rows_of_a_lost_owner_on_a_quorum_are_confirmed_by_the_next(
    sim: Simulation, dialect: str, count: int
) -> None:
    """H12: including later transactions; the old owner agrees when it returns."""
    await start_members(sim, "abc", dialect=dialect, replication_synchro_quorum=NEVER)
    pending = [await Pending(sim, "a", number).seen_by("b", "c") for number in range(count)]
    pending.append(await Pending(sim, "a", 1, space=PLAIN).seen_by("b", "c"))
    before = last_lsn(sim, "b")
    lsn = vclock(sim, "b")[1] - 1
    sim.kill("a")
    for each in pending:
        with pytest.raises(Crashed):
            await each.code()
    await reconfigure(sim, "b", replication_synchro_quorum=2, replication_synchro_timeout=0.5)
    await sim.on("b", sim.node("b").clear_synchro_queue())
    await sim.until(lambda: vclock(sim, "c") == vclock(sim, "b"))
    after = f"confirm 1+{lsn - before}" if dialect == "2.6" else "promote in term 3 after 1"
    assert told(sim, "c", 2, before) == [f"+1 {after}"]
    for name in "bc":
        assert not sim.node(name).box.in_flight
        assert held(sim, name, SYNC) == dict.fromkeys(range(count), "a")
        assert held(sim, name, PLAIN) == {1: "a"}
    await sim.restart("a", replication_synchro_quorum=2)
    await insert(sim, "b", 100, space=SYNC)
    await converge(sim, "abc")
    assert not sim.node("a").box.in_flight


@DIALECTS
@simulated()
async def test_rows_of_a_lost_owner_without_a_quorum_are_not_confirmed(sim: Simulation, dialect: str) -> None:
    """H12: 2.6 rolls it back; later versions wait for the quorum, and are promoted as soon as it exists."""
    await start_members(sim, "abc", dialect=dialect, replication_synchro_quorum=NEVER)
    sim.cut("a", "c")
    sim.cut("b", "c")
    pending = await Pending(sim, "a", 1).seen_by("b")
    sim.kill("a")
    with pytest.raises(Crashed):
        await pending.code()
    # This discards what the owner has reported about itself.
    await sim.restart("b", replication_synchro_quorum=2, replication_synchro_timeout=0.5)
    clear = partial(sim.node("b").clear_synchro_queue)
    if dialect == "2.6":
        await sim.on("b", clear())
        assert held(sim, "b", SYNC) == {}
        sim.heal()
        await sim.until(lambda: vclock(sim, "c") == vclock(sim, "b"))
        assert held(sim, "c", SYNC) == {}
    else:
        with pytest.raises(errors.System, match="timed out"):
            await sim.on("b", clear())
        assert (queue(sim, "b")["owner"], queue(sim, "b")["len"]) == (1, 1)
        sim.heal()
        await pending.seen_by("c")
        await sim.on("b", clear())
        assert held(sim, "b", SYNC) == held(sim, "c", SYNC) == {1: "a"}
    await sim.restart("a", replication_synchro_quorum=2)
    await sim.until(lambda: not sim.node("b").info()["ro"])
    await insert(sim, "b", 2, space=SYNC)
    await converge(sim, "abc")


# --- system spaces ---


@simulated()
async def test_system_spaces_stay_asynchronous_when_the_queue_is_claimed(sim: Simulation) -> None:
    """H13: 2.11 has no other mode; the option that makes system spaces synchronous exists since 3.x."""
    await start_members(sim, replication_synchro_quorum=NEVER)
    await make_space(sim, "a", "another")
    await insert(sim, "a", 1, space="another")
    await converge(sim, "ab")
    assert not queue(sim, "a")["len"]


# --- linearizable reads ---


@simulated()
async def test_linearizable_transaction_begins_when_a_quorum_has_answered_a_new_query(sim: Simulation) -> None:
    """H14: with one of three unreachable, both others must report their position; an older answer does not count."""
    await start_members(sim, "abc")
    sim.isolate("c")
    asked: list[int] = []
    answered: list[int] = []
    is_passed_on = True

    def note_question(packet: bytes) -> bytes:
        row = decode_row(packet)
        if row.type == RequestType.OK and not row.lsn:
            asked.append(decode_heartbeat(row).vclock_sync)
        return packet

    def note_answer(packet: bytes) -> bytes | None:
        row = decode_row(packet)
        if row.type != RequestType.OK:
            return packet
        if is_passed_on:
            answered.append(decode_ack(row).vclock_sync)
        return packet if is_passed_on else None

    async def read() -> list[int]:
        async with sim.node("a").transaction("linearizable", timeout=60) as transaction:
            assert answered[-1] > before
            return [found[0] for found in transaction.space(SYNC).select()]

    async with Middleman(sim, "a") as middle:
        middle.on_answer, middle.on_request = note_question, note_answer
        await reconfigure(sim, "b", replication=[middle.uri])
        await insert(sim, "a", 1, space=SYNC)
        await sim.until(lambda: answered and answered[-1] == asked[-1])
        is_passed_on = False
        before = asked[-1]
        reading = asyncio.ensure_future(sim.on("a", read()))
        await sim.until(lambda: asked[-1] > before)
        await sim.sleep(1)
        assert not reading.done()
        is_passed_on = True
        assert await reading == [1]


@simulated()
async def test_member_resumed_after_a_pause_rolls_back_nothing_before_it_hears_from_the_others(sim: Simulation) -> None:
    """The others may have replaced the member, and confirmed its pending transactions."""
    await start_members(sim, "ab", replication_synchro_quorum=NEVER, replication_synchro_timeout=5)
    pending = await Pending(sim, "a", 1).seen_by("b")
    sim.freeze("a")
    await sim.sleep(20)
    sim.thaw("a")
    thawed = sim.now
    assert await pending.code() == errors.SyncQuorumTimeout.code
    assert 5 <= sim.now - thawed < 6
