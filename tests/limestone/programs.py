"""Random programs for a master and its replica in the simulator, and the expected content of their directories.

A program runs several log channels concurrently, each with one session after another, while epochs are switched. The
`Model` records the calls, and the epochs that the store reported durable. A blob holds the value of its row.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random
from typing import Final

from flowstone.limestone.format import epoch_file, names
from flowstone.limestone.format.endpoint import Endpoint
from flowstone.limestone.format.entries import Entry, EntryType, WriteVersion, put, remove
from flowstone.limestone.format.files import read_whole
from flowstone.limestone.replica.replica import Replica
from flowstone.limestone.settings import Settings
from flowstone.limestone.store import seeding as replica_seeding
from flowstone.limestone.store.channel import AsyncLogChannel
from flowstone.limestone.store.datastore import AsyncDatastore
from flowstone.limestone.store.recovery import RecoveredDirectory, recover
from flowstone.limestone.store.seeding import Phase
from flowstone.outside import Clock, Disk, Outside
from tests.limestone import original
from tests.limestone.independent_reader import judge
from tests.limestone.model import Model, Row, Session
from tests.simulation.simulation import Simulation

MASTER, REPLICA = "master", "replica"
ENDPOINT: Final = Endpoint(REPLICA, 4000)
REPAIRABLE: Final = 1
"""Exit code of the original's tool if the directory can be repaired without loss."""

KEYS: Final = tuple(b"k%d" % number for number in range(6))
STORAGES: Final = (1, 2, 256)
"""Storage ids; the last one comes first in cursor order."""


@dataclass(frozen=True)
class Shape:
    """The size of a program."""

    channels: int = 2
    sessions: int = 6
    entries: int = 5
    pause_seconds: float = 0.01
    aborts: bool = True
    compacts: bool = False
    """True if the master compacts during the program."""


class Master:
    """A store as a process of the simulation, with its channels."""

    def __init__(self, store: AsyncDatastore, clock: Clock) -> None:
        self.store = store
        self.clock = clock
        self.channels: list[AsyncLogChannel] = []

    async def stop(self) -> None:
        await self.store.shutdown()


async def start_master(stage: Simulation, model: Model, settings: Settings, channels: int) -> Master:
    """Return a ready store in a new epoch."""

    async def start(outside: Outside) -> Master:
        master = Master(AsyncDatastore(outside, settings), outside.clock)
        model.start()
        master.store.add_persistent_callback(lambda epoch: setattr(model, "reported", epoch))
        for _ in range(channels):
            master.channels.append(await master.store.create_channel())
        await master.store.ready()
        await master.store.switch_epoch(master.store.last_epoch + 1)
        return master

    return await stage.launch(MASTER, start)


class Program:
    """One run of a program on a master, or the continuation of an earlier run on the same model."""

    def __init__(self, stage: Simulation, model: Model, shape: Shape, rng: Random) -> None:
        self._stage = stage
        self._model = model
        self._shape = shape
        self._rng = rng
        self._minor = 0
        self._clock: Clock
        self.open_channels = 0

    async def run(self, master: Master) -> None:
        """Run all sessions and epoch switches until everything is durable; raise Crashed if the master dies."""
        self._clock = master.clock
        works = [self._write(master.store, channel, Random(self._rng.random())) for channel in master.channels]
        if self._shape.compacts:
            works.append(self._compact(master.store, self._rng.uniform(0, 5 * self._shape.pause_seconds)))
        self.open_channels = len(works)
        tasks = [asyncio.ensure_future(self._stage.on(MASTER, work)) for work in works]
        tasks.append(asyncio.ensure_future(self._stage.on(MASTER, self._switch(master.store))))
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _switch(self, store: AsyncDatastore) -> None:
        pause, sessions = self._shape.pause_seconds, 0
        while self.open_channels:
            # Switches become rarer while all channels wait for a replica.
            pause = 1.5 * pause if sessions == len(self._model.sessions) else self._shape.pause_seconds
            sessions = len(self._model.sessions)
            await self._clock.sleep(self._rng.uniform(0, 2 * pause))
            await store.switch_epoch(store.status().current_epoch + self._rng.choice((1, 1, 1, 2, 5)))
        last = store.status().current_epoch
        await store.switch_epoch(last + 1)
        await store.until_durable(last)

    async def _compact(self, store: AsyncDatastore, seconds: float) -> None:
        await self._clock.sleep(seconds)
        await store.compact()
        self.open_channels -= 1

    async def _write(self, store: AsyncDatastore, channel: AsyncLogChannel, rng: Random) -> None:
        for _ in range(rng.randint(self._shape.sessions // 2, self._shape.sessions)):
            await self._clock.sleep(rng.uniform(0, self._shape.pause_seconds))
            await self._session(store, channel, rng)
        self.open_channels -= 1

    async def _session(self, store: AsyncDatastore, channel: AsyncLogChannel, rng: Random) -> None:
        await channel.begin_session()
        assert channel.epoch is not None
        session = self._model.begin(channel.epoch)
        for _ in range(rng.randint(0, self._shape.entries)):
            entry = self._entry(session, rng)
            pool = store.blob_pool()
            if entry.type is EntryType.NORMAL and rng.random() < 0.2:
                blob_ids = (await pool.register_data(entry.value),)
                entry = entry._replace(type=EntryType.NORMAL_WITH_BLOB, blob_ids=blob_ids)
            session.entries.append(entry)
            log(channel, entry)
            await pool.release()
            if rng.random() < 0.2:
                await self._clock.sleep(rng.uniform(0, self._shape.pause_seconds))
        if self._shape.aborts and rng.random() < 0.15:
            session.is_aborted = True
            await channel.abort_session()
        else:
            session.is_ending = True
            await channel.end_session()
            session.is_ended = True

    def _entry(self, session: Session, rng: Random) -> Entry:
        self._minor += 1
        version = WriteVersion(session.epoch, self._minor | (1 << 63 if rng.random() < 0.1 else 0))
        storage_id, key = rng.choice(STORAGES), rng.choice(KEYS)
        choice = rng.random()
        if choice < 0.65:
            return put(storage_id, key, rng.randbytes(rng.choice((0, 3, 40, 400))), version)
        if choice < 0.85:
            return remove(storage_id, key, version)
        kinds = (EntryType.ADD_STORAGE, EntryType.CLEAR_STORAGE, EntryType.REMOVE_STORAGE)
        return Entry(rng.choice(kinds), storage_id, version)


def log(channel: AsyncLogChannel, entry: Entry) -> None:
    """Call the channel method that writes this entry."""
    match entry.type:
        case EntryType.REMOVE:
            channel.remove_entry(entry.storage_id, entry.key, entry.version)
        case EntryType.ADD_STORAGE:
            channel.add_storage(entry.storage_id, entry.version)
        case EntryType.CLEAR_STORAGE:
            channel.truncate_storage(entry.storage_id, entry.version)
        case EntryType.REMOVE_STORAGE:
            channel.remove_storage(entry.storage_id, entry.version)
        case _:
            channel.add_entry(entry.storage_id, entry.key, entry.value, entry.version, entry.blob_ids)


async def start_replica(stage: Simulation, *, compatible: bool = False) -> Replica:
    async def start(outside: Outside) -> Replica:
        replica = Replica(outside, f"/{REPLICA}", ENDPOINT, compatible=compatible)
        await replica.start()
        return replica

    return await stage.launch(REPLICA, start)


def found_on(stage: Simulation, name: str) -> RecoveredDirectory:
    """Return what a process that starts on this machine's directory would find, without changes."""
    disk = stage.look(name)
    disk.make_directory(f"/{name}")
    return recover(disk, f"/{name}", repairs=False)


def shown(found: RecoveredDirectory) -> list[Row]:
    return [(row.storage_id, row.key, row.value) for row in found.snapshot.rows()]


def files_on(disk: Disk, directory: str) -> dict[str, bytes]:
    """Return the content of a directory on a simulated machine."""
    found: dict[str, bytes] = {}
    if disk.kind(directory) != "directory":
        return found
    for name in disk.list_directory(directory):
        path = f"{directory}/{name}"
        if disk.kind(path) == "directory":
            found |= {f"{name}/{each}": content for each, content in files_on(disk, path).items()}
        else:
            with disk.open(path) as file:
                found[name] = file.read_at(0, file.size())
    return found


def is_seeding(stage: Simulation, name: str) -> bool:
    """Return True if a replica's content is not that of its directory: a start would restore the old data."""
    disk, path = stage.look(name), f"/{name}"
    return disk.kind(path) is not None and replica_seeding.read(disk, path).phase in (Phase.MOVING, Phase.SEEDING)


def check(stage: Simulation, name: str, *timelines: Model) -> int:
    """Check that one side has all reported epochs in full, and later ones completely or not at all.

    Return its durable epoch. A replica may not know yet that its master crashed, and have the content from before that
    crash.
    """
    found = found_on(stage, name)
    durable, rows = found.durable_epoch, shown(found)
    needed = timelines[0].must_be_durable()
    assert durable >= needed, f"{name} lost epoch {needed}: its durable epoch is {durable}"
    check_by_the_original(stage.look(name), f"/{name}", found)
    possible = [model for model in timelines if not model.unfinished(durable)]
    assert possible, f"{name} has epoch {durable}, which has an open session"
    assert any(rows == model.rows(durable) for model in possible), f"{name} differs at epoch {durable}"
    for row in found.snapshot.rows():
        for blob_id in row.blob_ids:
            content = read_whole(stage.look(name), f"/{name}/{names.blob(blob_id)}")
            assert content == row.value, f"{name} has blob {blob_id} with {content!r} for {row}"
    return durable


def check_by_the_original(disk: Disk, directory: str, found: RecoveredDirectory) -> None:
    """Check that the original opens the directory with the same catalog and the same rows.

    The original does not open the remains of an interrupted session or epoch record before a repair, by its tool or by
    our next start; but it must not report them as a loss of durable data.
    """
    assert original.listed(disk, directory) == found.catalog, f"the original reads a different catalog in {directory}"
    judged = judge(files_on(disk, directory))
    if judged.problem is None:
        assert (judged.durable_epoch, judged.plain_rows()) == (found.durable_epoch, shown(found)), directory
        assert not judged.missing_blobs, f"the original reports missing blobs {judged.missing_blobs} in {directory}"
    elif judged.inspect != REPAIRABLE:
        epochs = epoch_file.parse(read_whole(disk, f"{directory}/{names.EPOCH}") or b"")
        is_unborn = not found.snapshot.rows() and found.durable_epoch == 0
        assert epochs.is_torn or is_unborn, f"the original does not open {directory}: {judged.problem}"
