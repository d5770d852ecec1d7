"""Compaction of a running datastore, with the deletion of blobs that no reader can see any more.

It is requested by a call, or by a file `ctrl/start_compaction`, as scripts of the original do. `compaction.py` does the
work in a worker; this module rotates the files and waits for durability first. Replicas are not notified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, Protocol

from flowstone.limestone.errors import WrongTime
from flowstone.limestone.format import catalog
from flowstone.limestone.format.catalog import Catalog
from flowstone.limestone.format.entries import WriteVersion
from flowstone.limestone.store.backup import OpenBackups
from flowstone.limestone.store.blobs import Blobs
from flowstone.limestone.store.compaction import Collection, Compacted, compact_online
from flowstone.limestone.store.rotation import Rotated
from flowstone.outside import Outside

CONTROL: Final = "ctrl"
"""The directory for requests of programs that cannot call the datastore."""

START_COMPACTION: Final = f"{CONTROL}/start_compaction"
LOOK_SECONDS: Final = 1.0


class Rotating(Protocol):
    """The store, as far as compaction needs it."""

    async def rotate(self) -> Rotated: ...
    async def until_durable(self, epoch: int) -> None: ...


class Upkeep:
    """Compaction of one store from `ready` to `close`. `boundary`: no reader reads versions before it."""

    def __init__(self, outside: Outside, directory: str, blobs: Blobs, store: Rotating) -> None:
        self.boundary: WriteVersion | None = None
        self.open_backups = OpenBackups()
        self._outside = outside
        self._directory = directory
        self._blobs = blobs
        self._store = store
        self.in_worker = asyncio.Lock()
        """Held while a worker compacts."""
        self._is_compacting = False
        self._work: asyncio.Task[Compacted] | None = None
        self._watching = asyncio.ensure_future(self._watch())

    async def compact(self) -> Compacted:
        """Compact all sessions up to the current epoch, once that epoch is durable.

        The caller must have a later epoch begun meanwhile. The compacted log files are listed as detached, and stay. A
        cancelled call returns at once; a worker that has started runs to its end, and no other compaction begins before
        that."""
        if self._is_compacting:
            raise WrongTime(f"compaction of {self._directory} is running", hint="try again when it has ended")
        self._refuse_in_backup()
        with ExitStack() as guards:
            guards.enter_context(self._alone())
            guards.enter_context(self._blobs.watching())
            rotated = await self._store.rotate()
            await self._store.until_durable(rotated.epoch)
            self._work = asyncio.ensure_future(self._compact_guarded(rotated.epoch, guards.pop_all()))
        return await asyncio.shield(self._work)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._is_compacting = True
        try:
            yield
        finally:
            self._is_compacting = False

    def _refuse_in_backup(self) -> None:
        """Raise WrongTime if a backup is open: a newer catalog, copied with an older list of files, would lose rows."""
        if self.open_backups:
            raise WrongTime(f"backup of {self._directory} is open", hint="call notify_end_backup first")

    async def _compact_guarded(self, epoch: int, guards: ExitStack) -> Compacted:
        """Run as a task of its own: the guards are held until the worker ends, even if the caller is cancelled."""
        with guards:
            async with self.in_worker:
                self._refuse_in_backup()
                return await self._outside.blocking(self._compact, epoch)

    def _compact(self, epoch: int) -> Compacted:
        disk = self._outside.disk
        listed = catalog.read(disk, self._directory) or Catalog()
        collection = None
        if self.boundary is not None and self.boundary.major > listed.max_epoch_id:
            collection = Collection(self.boundary, self._blobs.held)
        milliseconds = int(self._outside.clock.wall() * 1000)
        return compact_online(disk, self._directory, epoch, milliseconds, collection=collection)

    async def _watch(self) -> None:
        disk, path = self._outside.disk, f"{self._directory}/{START_COMPACTION}"
        while True:
            await self._outside.clock.sleep(LOOK_SECONDS)
            try:
                if disk.kind(path) == "file":
                    disk.unlink(path)
                    await self.compact()
            except Exception as error:
                # The store continues without it, and the request can be repeated.
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"compaction of {self._directory} failed", "exception": error}
                )

    async def close(self) -> None:
        """Stop watching for requests. A running compaction runs to its end first."""
        self._watching.cancel()
        for work in (self._watching, self._work):
            if work is not None:
                with suppress(Exception, asyncio.CancelledError):
                    await work
