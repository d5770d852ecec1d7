"""A replica that dies at any write, sync or send: its directory keeps its durable epochs, also by the original's rules.

A master writes sessions on two channels, in the original's order (log channels first) or in ours (HELLO, resume, seed).
The replica's machine loses power in the middle of each of its operations, with any loss of unsynced data. Then the
directory is read by the original's rules, after a repair like that of its tool, and a new replica continues with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from flowstone.limestone.format import epoch_file, files, names
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import Entry, WriteVersion, decode_all, put, walk
from flowstone.limestone.format.log_scan import REPAIR, STARTUP, LogScan
from flowstone.limestone.format.messages import Blob, Error, GroupCommit, LogEntries, wire_entry
from flowstone.limestone.format.wire_extensions import Action, WireExtensionError
from flowstone.limestone.replica.replica import Replica
from flowstone.limestone.store.recovery import input_files, recover
from flowstone.limestone.store.upkeep import CONTROL, LOOK_SECONDS, START_COMPACTION
from flowstone.outside import Disk, Outside
from tests.conftest import FULL
from tests.limestone import original
from tests.limestone.peer import Master, blob_session, row, session
from tests.simulation.disk import Inode, Loss
from tests.simulation.simulation import Simulation

PATH = "/replica"
ENDPOINT = Endpoint("replica", 3301)
LAST_EPOCH = 5
BLOB_KEY = b"blob %d"
Keys = list[bytes]


def content(blob_id: int) -> bytes:
    return bytes([blob_id % 256]) * 300


class OnDone:
    """The master's knowledge: sessions by epoch, the last acknowledged epoch, and the last requested one."""

    def __init__(self) -> None:
        self.sessions: dict[int, Keys] = {}
        self.committed = 0
        self.asked = 0
        self.old_keys: Keys | None = None
        """The keys before the seed. Set when another master's data replaces them."""

        self.wish_for_compaction: Callable[[], Coroutine[Any, Any, None]]

    def keys(self, durable_epoch: int) -> Keys:
        return sorted(key for epoch, keys in self.sessions.items() if epoch <= durable_epoch for key in keys)


async def started(outside: Outside) -> Replica:
    replica = Replica(outside, PATH, ENDPOINT)
    await replica.start()
    return replica


async def write_epochs(master: Master, told: OnDone, epochs: Iterator[int], rng: random.Random) -> None:
    for epoch in epochs:
        for channel in rng.sample([0, 1], k=rng.randint(1, 2)):
            keys = [f"{epoch}.{channel}.{number}" for number in range(rng.randint(0, 3))]
            told.sessions.setdefault(epoch, []).extend(key.encode() for key in keys)
            entries = [row(key, "v" * rng.randint(0, 50), epoch) for key in keys]
            peer = master.channels[channel]
            if rng.random() < 0.5:
                await peer.acknowledged(session(epoch, *entries))
            else:
                blob_id = epoch * 100 + channel
                told.sessions[epoch].append(BLOB_KEY % blob_id)
                with_blob = blob_session(epoch, (BLOB_KEY % blob_id).decode(), Blob(blob_id, content(blob_id)))
                peer.send(session(epoch, flags=1), *(session(epoch, entry, flags=0) for entry in entries))
                await peer.acknowledged(with_blob._replace(flags=0), session(epoch, flags=6))
        told.asked = epoch
        await master.commit(epoch)
        told.committed = epoch
    master.channels[0].send(session(LAST_EPOCH + 50, row("never", "v", 1), flags=1))


async def of_the_original(master: Master, told: OnDone, rng: random.Random) -> None:
    await master.open(0)
    await master.open(1)
    await master.begin()
    await write_epochs(master, told, iter(range(1, LAST_EPOCH + 1)), rng)


async def that_resumes(master: Master, told: OnDone, rng: random.Random) -> None:
    """Resume a replica that is ahead: its sessions after epoch 2 were never durable at the master."""
    await of_ours(master, 0)
    await write_epochs(master, told, iter(range(1, 4)), rng)
    await master.close()
    told.committed = 2
    await of_ours(master, 2)
    told.sessions = {epoch: keys for epoch, keys in told.sessions.items() if epoch <= 2}
    told.asked = 2
    await write_epochs(master, told, iter(range(3, LAST_EPOCH + 1)), rng)


async def that_seeds(master: Master, told: OnDone, rng: random.Random) -> None:
    await of_ours(master, 0)
    await write_epochs(master, told, iter(range(1, 3)), rng)
    await master.close()
    told.old_keys, told.sessions, told.committed = told.keys(2), {}, 0
    await of_ours(master, 0, Action.SEED)
    await write_epochs(master, told, iter(range(3, LAST_EPOCH + 1)), rng)


async def that_compacts(master: Master, told: OnDone, rng: random.Random) -> None:
    """Compact while a session is open, whose end the compaction must await."""
    await of_ours(master, 0)
    await write_epochs(master, told, iter(range(1, 4)), rng)
    await told.wish_for_compaction()
    await master.channels[0].acknowledged(session(LAST_EPOCH + 50, flags=6))
    await told.wish_for_compaction()
    await write_epochs(master, told, iter(range(4, LAST_EPOCH + 1)), rng)


async def of_ours(master: Master, epoch: int, action: Action = Action.RESUME) -> None:
    while True:  # until the replica has noticed that the old control channel is closed
        try:
            await master.begin()
            break
        except AssertionError:
            await master.control.close()
    master.token = b""
    await master.hello()
    await master.prepare(action, epoch)
    await master.open(0)
    await master.open(1)


Scenario = Callable[[Master, OnDone, random.Random], Coroutine[Any, Any, None]]


def by_the_originals_rules(disk: Disk, durable_epoch: int) -> Keys:
    """Return the rows after the original's repair, which rotates active files, and its startup.

    During this, compacted rows are present twice.
    """
    listed = original.listed(disk, PATH)
    compacted = files.read_whole(disk, f"{PATH}/{names.COMPACTED}") or b""
    found = {entry.key for entry in decode_all(compacted, PATH) if isinstance(entry, Entry)}
    for name in input_files(disk, PATH, listed):
        with disk.open(f"{PATH}/{name}") as file:
            data = bytearray(file.read_at(0, file.size()))
        scan = LogScan(tokens(bytes(data)), durable_epoch, REPAIR, is_detached=names.is_detached(name))
        list(scan)
        assert scan.verdict.is_repairable, (name, scan.findings)
        for mark in scan.changes.marks:
            data[mark] = 6
        again = LogScan(tokens(bytes(data)), durable_epoch, STARTUP, is_detached=True)
        for entry in again:
            found.add(entry.key)
            for blob_id in entry.blob_ids:
                assert files.read_whole(disk, f"{PATH}/{names.blob(blob_id)}") == content(blob_id)
        assert again.verdict.is_clean, (name, again.findings)
    return sorted(found)


def tokens(data: bytes) -> list[Any]:
    return list(walk(lambda at, size: data[at : at + size], len(data)))


def check(disk: Disk, told: OnDone, *, is_settled: bool) -> int:
    durable = epoch_file.read(disk, PATH).durable
    if told.old_keys is not None and told.committed == 0:
        # The new data may not be durable: only the next start shows whether the old or the new data is present.
        if is_settled:
            assert by_the_originals_rules(disk, durable) == (told.keys(durable) if durable > 2 else told.old_keys)
        return durable
    assert told.committed <= durable <= max(told.asked, told.committed)
    assert by_the_originals_rules(disk, durable) == told.keys(durable)
    return durable


@pytest.mark.parametrize("scenario", [of_the_original, that_resumes, that_seeds, that_compacts])
@pytest.mark.parametrize("loss", [Loss.ANY, Loss.NOTHING])
def test_crash_at_any_moment_keeps_durable_epochs(scenario: Scenario, loss: Loss) -> None:
    for seed in range(5 if FULL else 1):
        operations, is_over = 0, False
        while not is_over:
            operations += 1 if FULL else 3
            stage = Simulation(f"{scenario.__name__}/{seed}/{operations}")
            is_over = stage.run(lambda _, stage=stage, at=operations: crash(stage, scenario, at, loss))  # type: ignore[misc]


async def crash(stage: Simulation, scenario: Scenario, operations: int, loss: Loss) -> bool:
    """Return True if the scenario completed before the crash."""
    rng, told = random.Random(f"{stage.seed}"), OnDone()
    stage.build("replica")
    await stage.launch("replica", started)
    stage.crash_after("replica", operations, loss)
    master = Master(stage._outside.network, ENDPOINT)
    is_over = False

    async def wish() -> None:
        """Create the file without counting it as an operation of the replica."""
        storage = stage._machines["replica"].storage
        storage.directories[f"{PATH}/{CONTROL}"] = None
        storage.change_names({f"{PATH}/{START_COMPACTION}": Inode()})
        await stage._outside.clock.sleep(1.5 * LOOK_SECONDS)

    told.wish_for_compaction = wish
    try:
        await scenario(master, told, rng)
        is_over = True
    except (AssertionError, OSError, TimeoutError, AttributeError):
        assert not stage.is_running("replica"), "the replica gave a wrong answer without a crash"
    if stage.is_running("replica"):
        stage.crash("replica", loss)
    disk = stage.look("replica")
    assert not is_over or scenario is not that_compacts or disk.kind(f"{PATH}/{names.COMPACTED}") == "file"
    check(disk, told, is_settled=False)
    replica = await stage.launch("replica", started)
    durable = check(disk, told, is_settled=True)
    assert replica.status().durable_epoch == durable
    again = Master(stage._outside.network, ENDPOINT)
    await of_the_original_once(again, durable + 100)
    rows = [entry.key for entry in recover(disk, PATH, repairs=False).snapshot.rows()]
    assert rows == sorted([*by_the_originals_rules(disk, durable), b"after"])
    await stage.stop("replica")
    return is_over


async def of_the_original_once(master: Master, epoch: int) -> None:
    log = await master.open(0)
    await master.begin()
    await log.acknowledged(session(epoch, row("after", "v", epoch)))
    await master.commit(epoch)
    await master.close()


@pytest.mark.parametrize("operation", ["append", "sync", "create", "sync_directory", "rename"])
def test_failing_disk_ends_the_connection_and_keeps_durable_data(operation: str) -> None:
    stage = Simulation(operation)
    stage.run(lambda _: fail(stage, operation))


async def fail(stage: Simulation, operation: str) -> None:
    stage.build("replica")
    replica = await stage.launch("replica", started)
    master = Master(stage._outside.network, ENDPOINT)
    await master.begin()
    log, other = await master.open(0), await master.open(1)
    await log.acknowledged(session(1, row("k1", "v", 1)))
    await master.commit(1)
    broken = stage._machines["replica"].storage.broken
    broken.add(operation)
    blob = LogEntries(2, (wire_entry(put(1, b"b", b"", WriteVersion(2, 0), (7,)), (Blob(7, b"content"),)),), 7)
    answer = await other.ask(blob)  # storing a blob uses each of these operations
    assert isinstance(answer, Error)
    assert answer.code == WireExtensionError.REFUSED
    broken.clear()
    await log.acknowledged(session(2, row("k2", "v", 2)))
    refused = await master.control.ask(GroupCommit(2))  # this epoch lost a session
    assert isinstance(refused, Error)
    await master.close()
    again = Master(stage._outside.network, ENDPOINT)
    await of_the_original_once(again, 3)
    assert replica.status().durable_epoch == 3
    assert by_the_originals_rules(stage.look("replica"), 3) == [b"after", b"k1"]
