"""Followers of a set with faults receive what happened; wrong input is reported."""

from __future__ import annotations

import asyncio
from random import Random
from unittest.mock import patch

import pytest

from flowstone.archive.archive import Archive
from flowstone.archive.refusals import UpstreamLostTail
from flowstone.archive.store import ArchiveStore
from flowstone.box.system import CLUSTER_ID
from flowstone.iproto.row import Row
from flowstone.replica.settled_box import SettledBox
from flowstone.replication.vclock import VClock
from tests import served_node
from tests.scenarios.queues import number_of
from tests.scenarios.simulated_members import reconfigure
from tests.simulation.cluster import NAMES, converge
from tests.simulation.disk import Loss
from tests.simulation.endings import stop_and_compare
from tests.simulation.followers import FAILING, Archiver, Followers, _check_archived
from tests.simulation.logs import CONTROL, NOP, Record
from tests.simulation.simulation import Simulation, simulated
from tests.simulation.test_endings import LedSet, form
from tests.simulation.test_final_history import HISTORY, log
from tests.simulation.test_logs import put, record
from tests.simulation.workload import FIELDS, Writer

SYNCHRONOUS = 513
SNAPSHOT_AFTER_SECONDS = 1.0
"""Time after the start of an archive with a due snapshot: the interval of its checks."""


async def live(sim: Simulation, replica_set: LedSet, followers: Followers, *, rounds: int = 6) -> list[str]:
    """Write for a while with occasional crashes; return the violations seen by followers."""
    followers.start()
    writer = Writer(sim, 1)
    for number in range(rounds):
        await writer.run("a", 15)
        await sim.sleep(sim.random.uniform(2, 8))
        if number % 2:
            sim.kill("b")
            await sim.restart("b")
    found = await followers.finish()
    left = await stop_and_compare(replica_set)
    return [*found, *left.violations, *followers.check(left)]


@simulated(seeds=range(4))
async def test_followers_receive_the_history(sim: Simulation) -> None:
    replica_set = await form(sim)
    followers = Followers(replica_set, Random(f"{sim.seed}/followers"), listeners=2, has_archive=True)
    assert await live(sim, replica_set, followers) == []
    assert sum(len(heard.told) for listener in followers._listeners for heard in listener.heard) > 50


@simulated()
async def test_settled_position_ahead_of_the_history_is_found(sim: Simulation) -> None:
    replica_set = await form(sim)
    followers = Followers(replica_set, Random(0))
    vclock = SettledBox.vclock.fget  # type: ignore[attr-defined]

    def too_far(box: SettledBox) -> VClock:
        return VClock({number: lsn + 1 for number, lsn in vclock(box)})

    with patch.object(SettledBox, "vclock", property(too_far)):
        found = await live(sim, replica_set, followers, rounds=2)
    assert found


@simulated()
async def test_archive_that_settles_too_early_is_found(sim: Simulation) -> None:
    replica_set = await form(sim)
    client = await sim.client("a")
    await served_node.create_space(client, SYNCHRONOUS, "sync", FIELDS, options={"is_sync": True})
    archiver = Archiver(replica_set, Random(1))
    await archiver.tend("a")
    await sim.until(lambda: archiver.position >= sim.node("a")._instance.vclock.without_zero())
    sim.isolate("b")
    sim.isolate("c")
    writing = sim.loop.create_task(sim.on("a", sim.node("a").space("sync").replace((1, 1, "x"))))
    await sim.sleep(1)
    with patch.object(ArchiveStore, "settled", property(lambda store: store.vclock)):
        await archiver.stop()
    assert "for settled, and no verdict on" in archiver.violations[0]
    sim.heal()
    await writing


async def lose_the_leader(sim: Simulation, replica_set: LedSet, archiver: Archiver) -> None:
    """Isolate the leader from all but the archive, let it accept a synchronous transaction, and expel it."""
    client = await sim.client("a")
    await served_node.create_space(client, SYNCHRONOUS, "sync", FIELDS, options={"is_sync": True})
    await reconfigure(sim, "a", replication_synchro_timeout=1000)
    await converge(sim, (*NAMES, "x"))
    position, number = sim.node("a")._instance.vclock.without_zero(), number_of(sim, "a")
    await sim.until(lambda: archiver.position == position)
    for name in ("b", "c", "x"):
        sim.cut("a", name)
    writing = sim.loop.create_task(sim.on("a", sim.node("a").space("sync").replace((1, 1, "x"))))
    await sim.until(lambda: archiver.position > position)
    sim.kill("a")
    await asyncio.gather(writing, return_exceptions=True)
    await sim.on("b", sim.node("b").promote())

    async def strike_off() -> None:
        async with sim.node("b").transaction(is_sync=True) as transaction:
            transaction.space(CLUSTER_ID).delete(number)

    await sim.on("b", strike_off())
    replica_set.members.remove("a")
    replica_set.departed.append("a")


@simulated()
async def test_archive_may_give_up_over_rows_that_only_an_expelled_member_had(sim: Simulation) -> None:
    replica_set = await form(sim)
    followers = Followers(replica_set, Random(1), listeners=0, has_archive=True)
    (archiver,) = followers._archivers
    await archiver.start("a")
    await lose_the_leader(sim, replica_set, archiver)
    await archiver.tend("b")
    await sim.until(lambda: archiver._process is not None and archiver._process.failure, seconds=100)
    assert await followers.finish() == []
    assert archiver.name == "archive2"
    left = await stop_and_compare(replica_set)
    assert [*left.violations, *followers.check(left)] == []


@simulated()
async def test_archive_that_gives_up_over_rows_that_members_have_is_found(sim: Simulation) -> None:
    replica_set = await form(sim)
    followers = Followers(replica_set, Random(1), listeners=0, has_archive=True)
    (archiver,), number = followers._archivers, number_of(sim, "a")
    for _ in range(2):  # giving up earlier is not an excuse
        await archiver.start("a")
        await archiver.stop()
        archiver._judge(UpstreamLostTail("a:3301", VClock({number: 3}), VClock({number: 4})))
    assert await followers.finish() == []
    found = followers.check(await stop_and_compare(replica_set))
    assert [each.partition(": ")[0] for each in found] == ["archive1 of a gave up", "archive2 of a gave up"]
    assert all(each.endswith(f"; no member that has gone has written {(number, 4)}") for each in found)


@simulated(seeds=range(2))
async def test_archive_reconnects_after_a_power_loss_before_its_server_notices(sim: Simulation) -> None:
    replica_set = await form(sim)
    archiver = Archiver(replica_set, Random(0))
    await archiver.start("a")
    await Writer(sim, 1).run("a", 5)
    await sim.sleep(2.1)
    sim.crash(archiver.name, Loss.UNSYNCED)
    await archiver.start("a")  # which learns of the loss with its next heartbeat
    await sim.sleep(3)
    await Writer(sim, 2).run("a", 5)
    await sim.until(lambda: archiver.position == sim.node("a")._instance.vclock.without_zero())
    await archiver.stop()
    assert archiver.violations == []


@simulated()
async def test_archive_that_stops_taking_snapshots_is_found(sim: Simulation) -> None:
    archiver = Archiver(await form(sim), Random(2))
    with patch.object(Archive, "_take_snapshot", lambda self: sim.sleep(1)):
        await archiver.start("a")
        await sim.sleep(45)
        assert "the newest snapshot of archive1 is of" in (await archiver.linger())[0]
    await sim.sleep(15)
    assert await archiver.linger() == []
    await archiver.stop()


@pytest.mark.parametrize("operations", FAILING)
@simulated(seeds=range(4))
async def test_archive_resumes_in_its_directory_after_a_disk_failure(
    sim: Simulation, operations: tuple[str, ...]
) -> None:
    archiver = Archiver(await form(sim), Random(2))
    await archiver.start("a")
    await sim.until(lambda: archiver.position)  # the rows are in a log, and not only in the first snapshot
    await Writer(sim, 1).run("a", 5)
    await sim.sleep(3)
    sim.kill(archiver.name)
    storage = sim.storage(archiver.name)
    storage.broken.update(operations)
    await archiver.start("a")
    await Writer(sim, 2).run("a", 5)
    await sim.sleep(15)
    storage.broken.clear()
    await archiver.tend("a")
    await sim.until(lambda: archiver.position == sim.node("a")._instance.vclock.without_zero())
    await archiver.stop()
    assert (archiver.name, archiver.violations) == ("archive1", [])
    assert storage.failure_count


@simulated(seeds=range(4))
async def test_archive_stopped_during_a_snapshot_leaves_no_file_open(sim: Simulation) -> None:
    """The simulation checks for open files when a process ends."""
    archiver = Archiver(await form(sim), Random(2))
    for _ in range(60):
        await Writer(sim, 1).run("a", 2)
        await sim.sleep(12)
        await archiver.start("a")
        await sim.sleep(SNAPSHOT_AFTER_SECONDS + sim.random.uniform(0, 0.06))
        await archiver.stop()
    assert archiver.violations == []


def nop(lsn: int) -> Record:
    return record(Row(NOP, 1, lsn=lsn, tsn=lsn, flags=1))


@pytest.mark.parametrize(
    ("third", "fifth", "words"),
    [
        (nop(3), put(5, 9, "five"), []),
        (put(3, 8, "gone"), put(5, 9, "five"), ["x has (1, 3) for a fact, which was rolled back"]),
        (nop(3), nop(5), ["x has another row at (1, 5)"]),
    ],
)
def test_nop_in_an_archive_may_replace_only_a_rolled_back_row(third: Record, fifth: Record, words: list[str]) -> None:
    assert _check_archived(log("x", put(1, 7, "one"), put(2, 7, "two"), third, fifth), HISTORY) == words


def test_late_verdict_may_be_a_nop_in_an_archive() -> None:
    assert HISTORY.rows[1, 4].type in CONTROL
    assert (
        _check_archived(log("x", put(1, 7, "one"), put(2, 7, "two"), nop(3), nop(4), put(5, 9, "five")), HISTORY) == []
    )
