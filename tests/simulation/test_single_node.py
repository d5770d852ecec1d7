"""Single unmodified nodes in the simulator: clients, restarts, crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from tests.simulation.disk import Loss
from tests.simulation.simulation import Crashed, Simulation, simulated
from tests.simulation.workload import Writer, make_space, rows

SMALL_LOGS = {"wal_max_size": 20_000, "checkpoint_wal_threshold": 60_000}
"""So that a few hundred writes fill many log files and checkpoints."""


@simulated()
async def test_minutes_of_virtual_time_pass_quickly(sim: Simulation) -> None:
    await sim.start("a", checkpoint_interval=200)
    await make_space(sim, "a")
    await sim.sleep(600)
    assert 600 <= sim.node("a").info()["uptime"] <= 601
    assert "/a/00000000000000000002.snap" in sim.storage("a").names


@simulated()
async def test_restarted_node_keeps_its_data_and_identity(sim: Simulation) -> None:
    uuid = (await sim.start("a", dialect="2.6")).info()["uuid"]
    await make_space(sim, "a")
    writer = Writer(sim, 0)
    await writer.run("a", 100)
    assert writer.count == 100
    assert (await sim.restart("a")).info()["uuid"] == uuid
    writer.check(await rows(await sim.client("a")))


async def live_through(sim: Simulation, *, loss: Loss, rounds: int = 4, **options: object) -> list[Writer]:
    """Write, crash at some disk operation, restart, and check that all acknowledged rows are present."""
    await sim.start("a", **SMALL_LOGS, **options)
    await make_space(sim, "a")
    await sim.on("a", sim.node("a").snapshot())
    writers = [Writer(sim, number) for number in range(4)]
    for _ in range(rounds):
        sim.crash_after("a", sim.random.randrange(1, sim.random.choice([10, 100, 500])), loss)
        writing = asyncio.gather(*(writer.run("a", 300, timeout=5) for writer in writers))
        await sim.until(lambda: not sim.is_running("a"), seconds=600)
        await writing
        for _ in range(sim.random.randrange(2)):  # and occasionally it dies again during its start
            sim.crash_after("a", sim.random.randrange(1, 8), loss)
            try:
                await sim.restart("a")
            except Crashed:
                continue
            sim.crash("a", loss)
        await sim.restart("a")
        found = await rows(await sim.client("a"))
        for writer in writers:
            writer.check(found)
    return writers


@simulated(seeds=range(10))
async def test_acknowledged_rows_survive_a_power_loss_with_fsync(sim: Simulation) -> None:
    loss = sim.random.choice([Loss.ANY, Loss.ANY, Loss.UNSYNCED])
    writers = await live_through(sim, loss=loss, wal_mode="fsync")
    assert sum(writer.count for writer in writers) > 20


@simulated(seeds=range(5))
async def test_acknowledged_rows_survive_a_process_death_with_mode_write(sim: Simulation) -> None:
    writers = await live_through(sim, loss=Loss.NOTHING, wal_mode="write")
    assert sum(writer.count for writer in writers) > 20


def test_acknowledged_rows_are_lost_in_a_power_loss_without_fsync() -> None:
    """The simulated disk can produce the failure that the two tests above look for."""

    async def scenario(sim: Simulation) -> None:
        await live_through(sim, loss=Loss.UNSYNCED, wal_mode="write")

    with pytest.raises(AssertionError, match="acknowledged"):
        Simulation(1).run(scenario)


@simulated()
async def test_recovered_rows_survive_a_power_loss(sim: Simulation) -> None:
    """A process was killed between a write and its sync; the next one sends the rows to others (seed 1977)."""
    await sim.start("a", wal_mode="fsync")
    await make_space(sim, "a")
    before = sim.node("a").info()["vclock"]
    writer = Writer(sim, 0)
    sim.crash_after("a", 2, Loss.NOTHING)
    await writer.run("a", 1, timeout=5)
    found = (await sim.restart("a")).info()["vclock"]
    assert found != before
    sim.crash("a", Loss.UNSYNCED)
    assert (await sim.restart("a")).info()["vclock"] == found


@simulated(seeds=range(3))
async def test_power_loss_between_a_write_and_its_sync_is_survived(sim: Simulation) -> None:
    await sim.start("a", wal_mode="fsync")
    await make_space(sim, "a")
    space_id = max(sim.node("a").box.spaces)
    for number in range(20):
        writing = asyncio.ensure_future(sim.on("a", sim.node("a").space(space_id).replace((number, number, "x"))))
        await sim.until(lambda: sim.machine("a").jobs)
        sim.crash("a")
        with pytest.raises(Crashed):
            await writing
        await sim.restart("a")
    assert sim.power_losses == 20
    assert 2 < sim.unsynced_losses < 20


@simulated()
async def test_concurrent_stop_waits_for_the_first_one(sim: Simulation) -> None:
    """Two operators at once (seed 2040)."""
    node = await sim.start("a", wal_mode="fsync")
    await make_space(sim, "a")
    ended: list[str] = []

    async def stop(who: str) -> None:
        await node.stop()
        ended.append(f"{who} at {sim.now}")

    await sim.on("a", _both(stop("one"), stop("other")))
    assert [each.partition(" at ")[2] for each in ended] == [str(sim.now)] * 2
    sim.kill("a")


async def _both(one: Coroutine[None, None, None], other: Coroutine[None, None, None]) -> None:
    await asyncio.gather(one, other)


@simulated()
async def test_killed_node_notifies_no_peer(sim: Simulation) -> None:
    await sim.start("a", wal_mode="write")
    await make_space(sim, "a")
    await Writer(sim, 0).run("a", 10)
    operations = sim.storage("a").operation_count
    sim.kill("a")
    await sim.sleep(60)
    assert sim.storage("a").operation_count == operations
    with pytest.raises(Exception, match="cannot connect to a:3301: connection refused"):
        await sim.client("a")


@simulated()
async def test_node_continues_after_a_full_disk(sim: Simulation) -> None:
    await sim.start("a", wal_mode="fsync")
    await make_space(sim, "a")
    writer = Writer(sim, 0)
    await writer.run("a", 20)
    sim.storage("a").room = 50
    await writer.run("a", 20)
    assert writer.count < 40
    sim.storage("a").room = 2**30
    before = writer.count
    await writer.run("a", 20)
    assert writer.count == before + 20
    sim.crash("a", Loss.UNSYNCED)
    await sim.restart("a")
    writer.check(await rows(await sim.client("a")))


@pytest.mark.parametrize("mode", ["write", "fsync"])
@simulated(seeds=range(5))
async def test_acknowledged_rows_survive_occasional_disk_failures(sim: Simulation, mode: str) -> None:
    await sim.start("a", wal_mode=mode, **SMALL_LOGS)
    await make_space(sim, "a")
    writers = [Writer(sim, number) for number in range(3)]
    storage = sim.storage("a")
    for _ in range(2):
        writing = asyncio.gather(*(writer.run("a", 150, timeout=5) for writer in writers))
        for _ in range(5):
            await sim.sleep(sim.random.uniform(0, 0.1))
            calls = ["append", "sync", "create", "rename", "sync_directory", "unlink", "truncate"]
            storage.broken = set(sim.random.sample(calls, 2))
            await sim.sleep(sim.random.uniform(0, 0.02))
            storage.broken = set()
        await writing
        sim.crash("a", Loss.NOTHING if mode == "write" else sim.random.choice(list(Loss)))
        await sim.restart("a")
        found = await rows(await sim.client("a"))
        for writer in writers:
            writer.check(found)


# --- a seed reproduces its run ---


async def eventful(sim: Simulation) -> None:
    await live_through(sim, loss=Loss.ANY, rounds=3, wal_mode="fsync")
    await Writer(sim, 5).run("a", 100)


def test_equal_seeds_give_equal_runs_and_different_ones_do_not() -> None:
    hashes = []
    for seed in (7, 7, 8):
        sim = Simulation(seed)
        sim.run(eventful)
        assert sim.trace.count > 300
        hashes.append(sim.trace.hash)
    assert hashes[0] == hashes[1] != hashes[2]


@simulated()
async def test_files_of_an_unlistable_directory_are_kept_until_the_next_checkpoint(sim: Simulation) -> None:
    node = await sim.start("a", checkpoint_count=1)
    await make_space(sim, "a")
    sim.storage("a").broken.add("list_directory")
    await sim.on("a", node.snapshot())
    await sim.until(lambda: sim.storage("a").failure_count)
    first = "/a/00000000000000000000.snap"
    assert first in sim.storage("a").names
    sim.storage("a").broken.clear()
    await Writer(sim, 0).run("a", 1)
    await sim.on("a", node.snapshot())
    await sim.until(lambda: first not in sim.storage("a").names)


@simulated(seeds=range(4))
async def test_recovered_rows_survive_a_power_loss_when_the_sync_of_an_earlier_start_failed(sim: Simulation) -> None:
    """The failed sync leaves pages that count as clean: a later sync of the same file does not write them."""
    await sim.start("a", wal_mode="write")
    await make_space(sim, "a")
    writer = Writer(sim, 0)
    await writer.run("a", 100)
    sim.crash("a", Loss.NOTHING)
    sim.storage("a").broken.add("sync")
    with pytest.raises(OSError, match="Input/output error"):
        await sim.restart("a", wal_mode="fsync")
    sim.storage("a").broken.clear()
    await sim.restart("a", wal_mode="fsync")
    writer.check(await rows(await sim.client("a")))
    sim.crash("a", Loss.UNSYNCED)
    await sim.restart("a", wal_mode="fsync")
    writer.check(await rows(await sim.client("a")))


@simulated()
async def test_node_recovers_on_a_disk_without_room_for_a_copy_of_its_last_log(sim: Simulation) -> None:
    await sim.start("a", wal_mode="fsync")
    await make_space(sim, "a")
    writer = Writer(sim, 0)
    await writer.run("a", 100)
    sim.crash("a", Loss.NOTHING)
    sim.storage("a").room = 1000
    await sim.restart("a", wal_mode="fsync")
    writer.check(await rows(await sim.client("a")))
    assert not [name for name in sim.storage("a").names if name.endswith(".inprogress")]
