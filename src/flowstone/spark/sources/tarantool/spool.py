"""The spool of a live source: a directory that keeps the rows offered to Spark until they are committed.

It is an archive (`archive/spooler.py`) that runs in an event loop in its own thread, so all methods here are plain
calls from one thread. One process at a time writes to a spool: the lock is held from `open` until `close` or until the
process dies. Rows are acknowledged to the server once they are durable, regardless of the reader's progress.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from flowstone.archive.definitions_file import DefinitionRow
from flowstone.archive.events import ArchiveEvent
from flowstone.archive.spool_files import WAL_MAX_SIZE
from flowstone.archive.spooler import Beginning, Spooling
from flowstone.archive.upstream_query import UpstreamFacts, ask_ballot, ask_facts, first_of
from flowstone.client import rights
from flowstone.errors import FlowstoneError
from flowstone.iproto import errors
from flowstone.iproto.uri import Uri
from flowstone.outside import production
from flowstone.outside.disk import AlreadyLocked
from flowstone.outside.loop_thread import LoopThread
from flowstone.replication.vclock import VClock
from flowstone.spark.index.log_index import ArchiveIndex

__all__ = ["Beginning", "Spool", "SpoolCannotFollow", "SpoolEnded", "SpoolLocked", "facts_of"]

LOCK_SECONDS: Final = 5.0
"""Grace period for an orphaned reader to release its lock."""

_POLL_SECONDS: Final = 0.05


class SpoolEnded(FlowstoneError):
    """The spool stopped receiving without an error."""


class SpoolCannotFollow(FlowstoneError):
    """The server does not let this user replicate."""


class SpoolLocked(AlreadyLocked):
    """Another process writes to the spool."""


class Spool:
    """Created by `open`. `index` covers the durable rows; `check` raises the error that ended receiving."""

    def __init__(self, members: Sequence[Uri], directory: str, make: Callable[[Spool], Spooling]) -> None:
        self._files = threading.Lock()
        self._archive = make(self)
        self._members = tuple(members)
        self._directory = directory
        self._thread = LoopThread("flowstone-spool")
        self._moved = threading.Condition()
        self._durable = self._seen = VClock()
        self._failure: BaseException | None = None
        self._task: asyncio.Task[None] | None = None
        self._index: ArchiveIndex | None = None
        self._generation = -1
        self._pid = os.getpid()

    @classmethod
    def open(
        cls,
        members: Sequence[Uri],
        directory: str,
        *,
        begin: Beginning,
        is_anew: bool = False,
        definitions: Sequence[DefinitionRow] | None = None,
        fail_on_data_loss: bool = True,
        register: bool = False,
        wal_max_size: int = WAL_MAX_SIZE,
        replication_timeout: float = 1.0,
        on_event: Callable[[ArchiveEvent], None] = lambda event: None,
    ) -> Spool:
        """Open a spool; return once it has a position to read from: for a new spool, once its snapshot is durable.

        `begin` is the start of a new spool, see `Spooling`. `is_anew` discards the content of an earlier spool.
        Raise errors that need intervention. An unreachable server is an error only for a new spool.
        """

        def make(spool: Spool) -> Spooling:
            return Spooling(
                members,
                directory,
                begin=begin,
                is_anew=is_anew,
                definitions=definitions,
                fail_on_data_loss=fail_on_data_loss,
                register=register,
                wal_max_size=wal_max_size,
                replication_timeout=replication_timeout,
                on_event=on_event,
                on_durable=spool._note_durable,
                guard=spool._files,
            )

        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            spool = cls(members, directory, make)
            try:
                spool._start()
            except AlreadyLocked as error:
                spool.close()
                if time.monotonic() < deadline:
                    time.sleep(_POLL_SECONDS * 4)
                    continue
                raise SpoolLocked(
                    f"spool {directory} is in use by another process",
                    hint="stop the other query, or use another spoolLocation",
                ) from error
            except BaseException:
                spool.close()
                raise
            return spool

    def _start(self) -> None:
        async def begin() -> None:
            self._task = asyncio.get_running_loop().create_task(self._run())

        self._thread.run(begin())
        with self._moved:
            while not self._archive.is_begun and self._failure is None:
                self._moved.wait(_POLL_SECONDS)
        self.check()
        self._seen = self._durable = self._durable.merged(self.index.settled)

    async def _run(self) -> None:
        try:
            await self._archive.run()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._failure = error
        else:
            self._failure = SpoolEnded(f"spool {self._directory} was stopped")
        finally:
            with self._moved:
                self._moved.notify_all()

    def _note_durable(self) -> None:
        """Advance the durable position. Called in the event loop while no worker changes the files."""
        with self._moved:
            self._durable = self._durable.merged(self._archive.settled)
            self._moved.notify_all()

    # --- reading ---

    @property
    def directory(self) -> str:
        return self._directory

    @property
    def index(self) -> ArchiveIndex:
        """The index of the durable rows as of this call."""
        with self._files:
            generation = self._archive.generation
            if self._index is None or generation != self._generation:
                self._generation = generation
                self._index = ArchiveIndex.open(production().disk, self._directory)
            else:
                self._index.refresh()
            return self._index

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for more settled rows than at the last call. Return True if there are any."""
        deadline = time.monotonic() + seconds
        with self._moved:
            while self._durable == self._seen and self._failure is None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._moved.wait(left):
                    break
            has_moved, self._seen = self._durable != self._seen, self._durable
        return has_moved

    def check(self) -> None:
        """Raise the error that ended receiving, if any. An unreachable server does not end it."""
        if self._failure is not None:
            raise self._failure

    def target(self) -> VClock:
        """Return the current position of the server from its ballot: a run up to it has all rows of its start."""
        return self._thread.run(
            first_of(self._members, lambda uri: ask_ballot(production(), uri))
        ).vclock.without_zero()

    @property
    def settled(self) -> VClock:
        """The position up to which rows can no longer be rolled back; `index` may be slightly ahead."""
        return self._durable

    @property
    def position(self) -> VClock:
        """The position of the durable rows, settled or not."""
        return self._archive.position

    @property
    def lag(self) -> float | None:
        """Seconds that the newest row took to arrive; None while no server is followed."""
        return self._archive.lag

    def collect(self, position: VClock) -> None:
        """Drop the rows up to `position`, which must not be requested again. The definitions at it stay known."""
        if self._failure is None:
            self._thread.run(self._archive.collect(position))

    def close(self) -> None:
        """Write all received rows and release the lock. Closing twice is harmless."""
        if os.getpid() != self._pid:
            return  # a forked copy has no event loop

        async def end() -> None:
            self._archive.stop()
            if self._task is not None:
                with suppress(FlowstoneError, asyncio.CancelledError):
                    await self._task

        with suppress(FlowstoneError):  # the loop may have ended already
            self._thread.run(end())
        self._thread.close()


def facts_of(members: Sequence[Uri]) -> UpstreamFacts:
    """Return the facts about the first member that answers. If none does, raise the error of the last one."""
    return asyncio.run(first_of(members, _facts_of))


async def _facts_of(uri: Uri) -> UpstreamFacts:
    try:
        return await ask_facts(production(), uri)
    except errors.AccessDenied as error:
        user = uri.user or rights.GUEST
        raise SpoolCannotFollow(
            f"{uri.address} rejects replication to user {user!r}: {error.message}", hint=rights.to_replicate(uri.user)
        ) from error
