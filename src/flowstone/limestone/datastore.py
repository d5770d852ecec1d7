"""The datastore: a directory, its log channels, and the epochs that make what they write durable.

Async, on the Outside it is handed; `blocking.py` is the same for threads. The rules are in `epochs.py`, files in
`directory.py` and `channel.py`, replicas behind `propagation.py`. An error of the disk, or of replicas that were not to
be lost, ends it: nothing more is written, nothing more is reported durable, and every call but `shutdown` says why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Self

from flowstone.limestone import names
from flowstone.limestone.channel import AsyncLogChannel, Parts
from flowstone.limestone.directory import DataDirectory
from flowstone.limestone.epochs import Due, EpochRules
from flowstone.limestone.errors import DatastoreFailed, WrongTime
from flowstone.limestone.files import write_whole
from flowstone.limestone.recovery import Recovered
from flowstone.limestone.settings import Settings
from flowstone.limestone.snapshot import encode_snapshot
from flowstone.outside import Disk, Outside

Callback = Callable[[int], object]


class State(Enum):
    """From top to bottom, and never back."""

    NEW = "new"
    READY = "ready"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class Status:
    """What a store can say of itself. `informed_epoch` is the one that callbacks were last told."""

    state: State
    instance_uuid: str | None
    channels: int
    current_epoch: int
    durable_epoch: int
    informed_epoch: int
    failure: str | None


class AsyncDatastore:
    """Make channels, then `ready`, then use them, then `shutdown`; or `async with`, which ends with it.

    All calls are made in one loop. What is called at the wrong time raises WrongTime and changes nothing.
    """

    def __init__(self, outside: Outside, settings: Settings) -> None:
        self.settings = settings
        self._outside = outside
        self._state = State.NEW
        self._rules = EpochRules()
        self._channels: list[AsyncLogChannel] = []
        self._directory: DataDirectory | None = None
        self._recovered: Recovered | None = None
        self._failure: BaseException | None = None
        self._persistent: list[Callback] = []
        self._write_epoch: list[Callback] = []
        self._opening = asyncio.Lock()
        self._recording: asyncio.Task[None] | None = None

    # --- life ---

    async def create_channel(self) -> AsyncLogChannel:
        """A log channel more. Before `ready` only."""
        self._check_new("create_channel")
        async with self._opening:
            directory = await self._opened()
            number = self._rules.add_channel()
            channel = AsyncLogChannel(self, self._outside, directory.path, number, self.settings.spill)
            self._channels.append(channel)
            return channel

    async def ready(self) -> None:
        """Recover what the directory holds, and let sessions begin once an epoch has been switched to."""
        self._check_new("ready")
        async with self._opening:
            directory = await self._opened()
            recovered = self._recovered = await directory.recover()
            await self._outside.blocking(_write_snapshot, self._outside.disk, directory.path, recovered)
            await self._outside.blocking(_begin_epochs, self._outside.disk, directory, recovered)
            channels = len(self._channels)
            self._rules = EpochRules(recovered.last_epoch)
            for _ in range(channels):
                self._rules.add_channel()
            self._state = State.READY

    async def shutdown(self) -> None:
        """Let go of everything; twice is harmless. Sessions that are open are left behind, and do not count."""
        self._state = State.CLOSED
        if self._directory is not None:
            self._directory.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.shutdown()

    async def _opened(self) -> DataDirectory:
        if self._directory is None:
            self._directory = await DataDirectory.open(self._outside, self.settings.path)
        return self._directory

    # --- epochs ---

    @property
    def last_epoch(self) -> int:
        """The largest epoch that recovery has found; the first one to switch to is larger."""
        self.check()
        assert self._recovered is not None
        return self._recovered.last_epoch

    @property
    def durable_epoch(self) -> int:
        """The largest epoch that was recorded."""
        return self._rules.durable

    async def switch_epoch(self, epoch: int) -> None:
        """Sessions that begin from now on are of this epoch. What becomes durable by that is recorded first."""
        self.check()
        await self._done(self._rules.switch(epoch))

    def add_persistent_callback(self, callback: Callback) -> None:
        """Have `callback` called with each epoch that is durable, and all before it with it; some are skipped.

        In the store's loop: it must not wait for the store. Its errors are the loop's exception handler's."""
        self._persistent.append(callback)

    def add_write_epoch_callback(self, callback: Callback) -> None:
        """Have `callback` called with each epoch that has been recorded, before it is told to be durable."""
        self._write_epoch.append(callback)

    async def _done(self, due: Due) -> None:
        """Wait for what this has made due, and for nothing that others make due meanwhile."""
        if (recording := self._act(due)) is not None:
            await asyncio.shield(recording)

    def _act(self, due: Due) -> asyncio.Task[None] | None:
        """Tell at once, so that nobody tells of a later epoch first; begin to record."""
        if due.inform is not None:
            self._call(self._persistent, due.inform)
        if due.record is None:
            return None
        self._recording = asyncio.ensure_future(self._record(due.record))
        self._recording.add_done_callback(_seen)
        return self._recording

    async def _record(self, epoch: int) -> None:
        assert self._directory is not None
        try:
            await self._outside.blocking(self._directory.epochs.write, epoch)
        except BaseException as error:
            self.fail(error)
            raise
        self.check()
        self._call(self._write_epoch, epoch)
        self._act(self._rules.recorded(epoch))

    def _call(self, callbacks: Sequence[Callback], epoch: int) -> None:
        for callback in callbacks:
            try:
                callback(epoch)
            except Exception as error:
                asyncio.get_running_loop().call_exception_handler(
                    {"message": f"a callback of epoch {epoch} failed", "exception": error}
                )

    # --- what channels ask ---

    def begin(self, channel: int) -> int:
        return self._rules.begin(channel)

    def check(self) -> None:
        """Raise unless the store is ready and sound."""
        if self._state is State.READY:
            return
        if self._state is State.FAILED:
            raise DatastoreFailed(
                f"the datastore {self.settings.path} has stopped: {self._failure}",
                hint="see to the cause, shut it down and open it again",
            ) from self._failure
        if self._state is State.CLOSED:
            raise WrongTime(f"the datastore {self.settings.path} is shut down")
        raise WrongTime(f"the datastore {self.settings.path} is not ready", hint="call ready() first")

    def fail(self, error: BaseException) -> None:
        """Nothing more is written or reported; the first error is the one that is told."""
        if self._state in (State.NEW, State.READY):
            self._state, self._failure = State.FAILED, error

    def uses_blobs(self, blob_ids: Sequence[int]) -> None:
        """These are named by an entry."""

    def replicated(self, channel: int, epoch: int, parts: Parts) -> Coroutine[Any, Any, None] | None:
        return None

    async def finished(self, channel: int) -> None:
        self.check()
        await self._done(self._rules.finish(channel))

    async def aborted(self, channel: int) -> None:
        self.check()
        await self._done(self._rules.abort(channel))

    # --- what it can say ---

    def status(self) -> Status:
        """At any time."""
        return Status(
            self._state,
            self._directory.instance_uuid if self._directory else None,
            len(self._channels),
            self._rules.switched,
            self._rules.durable,
            self._rules.informed,
            None if self._failure is None else str(self._failure),
        )

    def _check_new(self, what: str) -> None:
        if self._state is State.NEW:
            return
        if self._state is State.READY:
            raise WrongTime(f"{what}() comes too late: the datastore {self.settings.path} is ready")
        self.check()


def _seen(task: asyncio.Task[None]) -> None:
    """The store keeps the error of a task that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


def _write_snapshot(disk: Disk, directory: str, recovered: Recovered) -> None:
    """`data/snapshot`, as the original leaves it. Ours reads no row from it, so a crash in between is harmless."""
    disk.make_directory(f"{directory}/data")
    changes = recovered.snapshot.changes(with_removes=bool(recovered.catalog.compacted))
    write_whole(disk, f"{directory}/{names.SNAPSHOT}", encode_snapshot(changes))


def _begin_epochs(disk: Disk, directory: DataDirectory, recovered: Recovered) -> None:
    """Record that all that was found is durable: what is not has been marked. Rotated epoch files have served."""
    if recovered.last_epoch:
        directory.epochs.write(recovered.last_epoch)
    put_aside = [name for name in disk.list_directory(directory.path) if names.is_epoch_file(name)]
    for name in put_aside:
        if name != names.EPOCH:
            disk.unlink(f"{directory.path}/{name}")
    disk.make_directory(f"{directory.path}/ctrl")
