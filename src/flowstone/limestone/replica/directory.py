"""The data directory of a replica: durable epochs, blobs and log files, across masters.

Uses the Outside that is passed in; blocking work runs in a worker. Opening it repairs what a crash left, and deletes
blobs that no session names; while it is open, no blob is deleted. Between two masters the files need not be read again,
because everything written since is known. `replica.py` makes one call at a time per channel, and one at a time of the
others. Never communicates with a peer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Final

from flowstone.limestone.errors import DamagedFile, LimestoneError
from flowstone.limestone.format import catalog, copying, files, names
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import Entry, EntryType, Marker, Torn, walk
from flowstone.limestone.format.epoch_file import EpochWriter, record
from flowstone.limestone.format.messages import Blob
from flowstone.limestone.format.snippets import snippets
from flowstone.limestone.replica.log_file_channel import ReceivedSession, ReplicaChannel
from flowstone.limestone.replica.received_blob import ReceivedBlob
from flowstone.limestone.store import blobs
from flowstone.limestone.store import seeding as seeding
from flowstone.limestone.store.compaction import Compacted, compact_online
from flowstone.limestone.store.compaction import settle as settle_compaction
from flowstone.limestone.store.directory import DataDirectory, free_name
from flowstone.limestone.store.recovery import INVALIDATED, RecoveredDirectory, recover
from flowstone.limestone.store.seeding import Phase, SeedingState
from flowstone.outside import Disk, Outside

_NUMBERED: Final = re.compile(r"pwal_\d{4}", re.ASCII)

_BLOB_TEMPORARY: Final = re.compile(r"[0-9a-f]{16}\.blob(\.\d+)?\.tmp", re.ASCII)
"""Temporary files of blobs that are being received; after a crash they are garbage."""

REMEMBERED_MAX: Final = 100_000
"""Number of sessions after the durable epoch whose offsets are remembered. If there are more, the files are scanned."""

HIDING_MAX: Final = 4
"""Channels whose files `hide_unfinished` syncs at the same time. Each takes a worker thread; a machine with one core
has five of them, so at least one is left for other work."""


class CannotSetBack(LimestoneError):
    """The directory has compacted epochs that it should forget."""


class ReplicaDirectory:
    """Held from `open` to `close`."""

    def __init__(self, outside: Outside, data: DataDirectory, *, compatible: bool = False) -> None:
        self.path = data.path
        self.instance_uuid = data.instance_uuid
        self.durable_epoch = 0
        self.promised_epoch = 0
        """The durable epoch, or the epoch that is being recorded. Sessions up to this epoch count as soon as they are
        written."""
        self.compatible = compatible
        self.state = SeedingState()
        self.was_restored = False
        """True if old data was restored on opening, because the seeding that should replace it did not complete."""
        self._outside = outside
        self._disk = outside.disk
        self._data = data
        self._epochs = data.epochs
        self._seeded_by: str | None = None
        self._channels: dict[int, ReplicaChannel] = {}
        self._moving = asyncio.Lock()
        self._naming = asyncio.Lock()
        self._beyond: dict[str, list[ReceivedSession]] = {}
        """Sessions on disk that are not durable, by file."""
        self._temporaries = count()
        """Numbers for temporary names: several channels may receive the same blob at once."""
        self._making = asyncio.Lock()
        self._blob_directories: set[str] = set()
        """Directories of blobs that are known to be durable; extended under the lock above."""
        self._has_to_look = False
        """True if more than `_beyond` may have to be withdrawn."""

    @classmethod
    async def open(cls, outside: Outside, path: str, *, compatible: bool = False) -> ReplicaDirectory:
        data = await DataDirectory.open(outside, path)
        directory = cls(outside, data, compatible=compatible)
        try:
            await outside.blocking(directory._start, True)
        except BaseException:
            data.release()
            raise
        return directory

    async def close(self) -> None:
        """Close the files and release the lock, once a running move or compaction has completed."""
        async with self._moving:
            for channel in self._channels.values():
                channel.close()
            self._data.release()

    # --- log files ---

    def channel(self, number: int) -> ReplicaChannel:
        """Return the log file of this number. Its sessions must have ended before another connection gets it."""
        if number not in self._channels:
            name = names.pwal(number)
            self._channels[number] = ReplicaChannel(self._disk, self.path, name, compatible=self.compatible)
        return self._channels[number]

    def written(self, channel: ReplicaChannel, sessions: Iterable[ReceivedSession]) -> None:
        """Note that these sessions have ended and are on disk."""
        if self.compatible:
            return
        beyond = [session for session in sessions if session.epoch > self.durable_epoch]
        self._beyond.setdefault(channel.name, []).extend(beyond)
        if sum(map(len, self._beyond.values())) > REMEMBERED_MAX:
            self._beyond, self._has_to_look = {}, True

    def look_again(self) -> None:
        """Note that a write has failed: scan the files before the next master is served."""
        self._has_to_look = True

    async def receive(self, blob_id: int) -> ReceivedBlob:
        """Return a temporary file for a blob that arrives piece by piece; `store` gives it its name."""
        await self._make_room([blob_id])
        path = f"{self.path}/{names.blob(blob_id)}.{next(self._temporaries)}.tmp"
        return await self._outside.blocking(ReceivedBlob, self._disk, path)

    async def store(
        self, stored: Sequence[Blob], received: Iterable[ReceivedBlob] = (), *, are_gone: bool = False
    ) -> None:
        """Write blobs durably, before an entry names them. An existing file is replaced.

        `received` are the files of blobs that arrived piece by piece, in order. `are_gone`: empty blobs were deleted at
        the master; an existing file stays, because a row that is about to be withdrawn may refer to it. Blobs that are
        really empty have been stored before, without `are_gone`."""
        await self._make_room([blob.blob_id for blob in stored])
        await self._outside.blocking(self._store, stored, iter(received), are_gone)

    async def _make_room(self, blob_ids: Iterable[int]) -> None:
        parents = {names.blob_directory(blob_id) for blob_id in blob_ids}
        if not parents <= self._blob_directories:
            async with self._making:
                await self._outside.blocking(self._make_directories, sorted(parents - self._blob_directories))
                self._blob_directories |= parents

    def _make_directories(self, parents: Iterable[str]) -> None:
        for parent in parents:
            self._disk.make_directory(f"{self.path}/{parent}")
        self._disk.sync_directory(f"{self.path}/{blobs.ROOT}")
        self._disk.sync_directory(self.path)

    def _store(self, stored: Iterable[Blob], received: Iterator[ReceivedBlob], are_gone: bool) -> None:
        for blob_id, content, has_come in stored:
            if has_come:
                next(received).move(f"{self.path}/{names.blob(blob_id)}")
                continue
            if are_gone and not content and self._disk.kind(f"{self.path}/{names.blob(blob_id)}") == "file":
                continue
            parent, _, name = names.blob(blob_id).rpartition("/")
            files.replace(self._disk, f"{self.path}/{parent}", name, f"{name}.{next(self._temporaries)}.tmp", content)

    # --- epochs ---

    def promise(self, epoch: int) -> None:
        """Announce that `commit` of this epoch follows."""
        self.promised_epoch = max(self.promised_epoch, epoch)

    async def hide_unfinished(self, epoch: int) -> None:
        """Hide the sessions up to this epoch that have not ended or are not synced. Call `promise` first.

        Otherwise a crash after `commit` could leave an incomplete session of a durable epoch. Raises the error of the
        first channel that has one, when all channels are done."""
        places = asyncio.Semaphore(HIDING_MAX)

        async def hide(channel: ReplicaChannel) -> None:
            async with places, channel.writing:
                if sessions := channel.unhidden(epoch):
                    await self._outside.blocking(channel.hide, sessions)

        channels = [each for each in self._channels.values() if each.session or each.ended or each.writing.locked()]
        for error in await asyncio.gather(*map(hide, channels), return_exceptions=True):
            if error is not None:
                raise error

    async def commit(self, epoch: int) -> None:
        """Write a record of this epoch. On return the record is durable, and also the end of a seeding that it
        completes."""
        await self._outside.blocking(self._epochs.write, epoch)
        if self.state.phase is Phase.SEEDING:
            assert self._seeded_by is not None
            self.state = await self._outside.blocking(seeding.keep, self._disk, self.path, self._seeded_by)
        self.durable_epoch = max(self.durable_epoch, epoch)
        left = {name: [each for each in found if each.epoch > epoch] for name, found in self._beyond.items()}
        self._beyond = {name: found for name, found in left.items() if found}

    async def settle(self) -> int:
        """Prepare for another master: withdraw what never became durable, and restore old data after an incomplete
        seeding. Return the number of withdrawn sessions."""
        assert all(channel.session is None for channel in self._channels.values())
        async with self._moving:
            withdrawn = sum(map(len, self._beyond.values()))
            if self._has_to_look or self.state.phase is not Phase.SETTLED:
                self._close_channels()
                await self._outside.blocking(self._start, False)
            elif withdrawn:
                await self._outside.blocking(self._withdraw)
            self._beyond, self._has_to_look = {}, False
        if self.compatible:  # the original's process serves one master, and counts the writes of that one
            self._epochs = EpochWriter(self._disk, self.path)
        self.promised_epoch = self.durable_epoch
        return withdrawn

    def _withdraw(self) -> None:
        for name, sessions in self._beyond.items():
            self._disk.overwrite(f"{self.path}/{name}", INVALIDATED, *(session.offset for session in sessions))

    async def set_back(self, epoch: int) -> None:
        """Forget all epochs after this one, even durable ones. Call `settle` first."""
        if epoch < self.durable_epoch:
            async with self._moving:
                self._close_channels()
                await self._outside.blocking(self._set_back, epoch)
            self.promised_epoch = self.durable_epoch

    def _set_back(self, epoch: int) -> None:
        listed = catalog.read(self._disk, self.path)
        if listed is not None and listed.compacted and listed.max_epoch_id > epoch:
            raise CannotSetBack(
                f"cannot go back to epoch {epoch}: {self.path} is compacted up to epoch {listed.max_epoch_id}",
                hint="seed this replica again",
            )
        # The epoch file first: after a crash, recovery invalidates the sessions that are not invalidated yet.
        files.replace(self._disk, self.path, names.EPOCH, names.EPOCH_TEMPORARY, record(epoch))
        self.durable_epoch = recover(self._disk, self.path).durable_epoch

    # --- compaction ---

    async def compact(self) -> Compacted:
        """Compact all sessions that are durable now. Other sessions may go on meanwhile, and blobs stay.

        Peers are not notified: like a master's, a replica's compaction is local."""
        if self.compatible:
            raise LimestoneError("cannot compact a running replica in compatible mode", hint="stop it first")
        async with self._moving:
            epoch = self.durable_epoch
            if epoch == 0:
                return Compacted(Catalog())
            milliseconds = int(self._outside.clock.wall() * 1000)
            self._has_to_look = True  # sessions after the epoch move to other files
            await self._rotate(milliseconds)
            return await self._outside.blocking(compact_online, self._disk, self.path, epoch, milliseconds)

    async def _rotate(self, milliseconds: int) -> None:
        """Rotate every log file, each when no session is open in it."""
        for name in self._disk.list_directory(self.path):
            path = f"{self.path}/{name}"
            if _NUMBERED.fullmatch(name) and self._disk.kind(path) == "file" and self._disk.size(path):
                channel = self.channel(int(name.removeprefix(names.PWAL_PREFIX)))
                async with channel.lock:
                    channel.close()
                    new = free_name(self._disk, self.path, name, milliseconds)
                    self._disk.rename(path, f"{self.path}/{new}")
        self._disk.sync_directory(self.path)

    # --- masters ---

    async def follow(self, instance: str | None) -> None:
        """Record the master whose data the directory contains from now on; None for a master that does not identify
        itself."""
        async with self._naming:
            if self.state.follows != instance:
                state = SeedingState(instance, self.state.phase)
                await self._outside.blocking(seeding.write, self._disk, self.path, state)
                self.state = state

    async def put_aside(self, instance: str) -> None:
        """Make room for the data of a master; old data is restored unless `commit` is called. Call `settle` first."""
        async with self._moving:
            self._close_channels()
            self._seeded_by = instance
            self.state = await self._outside.blocking(seeding.put_aside, self._disk, self.path)
        self._epochs = EpochWriter(self._disk, self.path)
        self._blob_directories.clear()
        self.durable_epoch = self.promised_epoch = 0

    def is_of_none(self, claims: AbstractSet[str]) -> bool:
        """Return True if the directory has durable data of none of these instances."""
        return self.durable_epoch > 0 and (self.state.follows or self.instance_uuid) not in claims

    @property
    def is_seeding(self) -> bool:
        return self.state.phase is Phase.SEEDING

    @property
    def has_discarded(self) -> bool:
        """True if `discard` has something to do."""
        return self.state.phase is Phase.DISCARDING

    async def discard(self) -> None:
        """Delete old data that was put aside, once new data is durable."""
        async with self._moving:
            if self.has_discarded:
                self.state = await self._outside.blocking(seeding.discard, self._disk, self.path, self.state)

    # --- opening ---

    def _start(self, collects: bool) -> None:
        self.state, self.was_restored = seeding.bring_back(self._disk, self.path)
        self._blob_directories.clear()
        settle_compaction(self._disk, self.path)
        self._epochs = EpochWriter.open(self._disk, self.path)
        found = self._recovered()
        self.durable_epoch = self.promised_epoch = found.durable_epoch
        if collects:
            _delete_temporaries(self._disk, self.path)
            _collect_blobs(self._disk, self.path, found)

    def _recovered(self) -> RecoveredDirectory:
        while True:
            try:
                return recover(self._disk, self.path)
            except DamagedFile as damaged:
                if not _cut_unacknowledged(self._disk, damaged.path):
                    raise

    def _close_channels(self) -> None:
        """Close all channels, because their files are about to change."""
        for channel in self._channels.values():
            channel.close()
        self._beyond = {}


def _delete_temporaries(disk: Disk, directory: str) -> None:
    """Delete blobs that were being received when the process died."""
    root = f"{directory}/{blobs.ROOT}"
    for child in disk.list_directory(root) if disk.kind(root) == "directory" else ():
        parent = f"{root}/{child}"
        for name in disk.list_directory(parent) if disk.kind(parent) == "directory" else ():
            if _BLOB_TEMPORARY.fullmatch(name):
                copying.remove(disk, f"{parent}/{name}")


def _collect_blobs(disk: Disk, directory: str, found: RecoveredDirectory) -> None:
    """Delete blobs that no session names. Blobs of overwritten rows are kept, because a master may set the replica back
    to any epoch in the files."""
    if not blobs.stored_ids(disk, directory):
        return
    named: set[int] = set()
    for name in (names.COMPACTED, names.COMPACTED_PREVIOUS, *(report.name for report in found.files)):
        if disk.kind(f"{directory}/{name}") == "file":
            for snippet in snippets(disk, f"{directory}/{name}"):
                for entry in snippet.with_blobs:
                    named.update(entry.blob_ids)
    blobs.collect_at_start(disk, directory, named, found.max_blob_id)


def _cut_unacknowledged(disk: Disk, path: str) -> bool:
    """Cut off a session of epoch 0 that ends inside an entry; return True if there was one.

    The original's replica, and ours in compatible mode, writes epoch 0 into its markers, so that its sessions count at
    once. An incomplete session was never acknowledged, but other readers cannot know that and report damage.
    """
    if not names.is_pwal(path.rpartition("/")[2]):
        return False
    head = epoch = None
    with disk.open(path) as file:
        for offset, token in walk(file.read_at, file.size()):
            if isinstance(token, Marker):
                is_begin = token.type in (EntryType.MARKER_BEGIN, EntryType.MARKER_INVALIDATED_BEGIN)
                head, epoch = (offset, token.epoch) if is_begin else (None, None)
            elif not isinstance(token, Entry):
                is_cut_short = isinstance(token, Torn) or token.zeros
                if head is None or epoch != 0 or not is_cut_short:
                    return False
                break
        else:
            return False
    with disk.append_to(path) as file:
        file.truncate(head)
        file.sync()
    return True
