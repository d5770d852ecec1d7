"""The datastore for programs with threads and without an event loop: one thread per log channel, epochs from another.

Every call is that of `datastore.py` and `channel.py`, made in a loop in a thread of its own and waited for. Adding to a
session stays in the caller's thread. Callbacks are called in the loop's thread: they must not call the store.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from flowstone.limestone.channel import AsyncLogChannel
from flowstone.limestone.datastore import AsyncDatastore, Callback, Status
from flowstone.limestone.settings import Settings
from flowstone.outside import Outside, production
from flowstone.outside.loop_thread import LoopThread


class LogChannel:
    """Made by `Datastore.create_channel`; used by one thread at a time."""

    def __init__(self, channel: AsyncLogChannel, thread: LoopThread) -> None:
        self.id = channel.id
        self._channel = channel
        self._thread = thread
        # These are the channel's own: they are called a million times a second.
        self.add_entry = channel.add_entry
        self.add_entries = channel.add_entries
        self.remove_entry = channel.remove_entry
        self.add_storage = channel.add_storage
        self.remove_storage = channel.remove_storage
        self.truncate_storage = channel.truncate_storage

    def begin_session(self) -> None:
        """What is added from now on belongs together, and to the current epoch."""
        self._thread.run(self._channel.begin_session())

    def end_session(self) -> None:
        """Return when the session is on disk here and on every replica that counts."""
        self._thread.run(self._channel.end_session())

    def abort_session(self) -> None:
        """Take back what was added since the session began."""
        self._thread.run(self._channel.abort_session())


class Datastore:
    """Make channels, then `ready`, then use them, then `shutdown`; or `with`, which ends with it.

    `settings` is a Settings, or the path of a directory with the fields of Settings as keywords.
    """

    def __init__(self, settings: Settings | str, *, outside: Outside | None = None, **fields: Any) -> None:
        if isinstance(settings, str):
            settings = Settings(settings, **fields)
        elif fields:
            raise TypeError("fields of settings are given with a path, not with Settings")
        self._is_closed = False
        self._thread = LoopThread("flowstone-limestone")
        self._store = AsyncDatastore(outside or production(), settings)

    @classmethod
    def from_environment(cls, path: str, environment: Mapping[str, str], **fields: Any) -> Datastore:
        """A store as the original's variables want it, `os.environ` or another mapping."""
        return cls(Settings.from_environment(path, environment, **fields))

    def create_channel(self) -> LogChannel:
        """A log channel more. Before `ready` only."""
        return LogChannel(self._thread.run(self._store.create_channel()), self._thread)

    def ready(self) -> None:
        """Recover what the directory holds, and let sessions begin once an epoch has been switched to."""
        self._thread.run(self._store.ready())

    @property
    def last_epoch(self) -> int:
        """The largest epoch that recovery has found; the first one to switch to is larger."""
        return self._store.last_epoch

    @property
    def durable_epoch(self) -> int:
        """The largest epoch that was recorded."""
        return self._store.durable_epoch

    def switch_epoch(self, epoch: int) -> None:
        """Sessions that begin from now on are of this epoch. What becomes durable by that is recorded first."""
        self._thread.run(self._store.switch_epoch(epoch))

    def add_persistent_callback(self, callback: Callback) -> None:
        """Have `callback` called with each epoch that is durable, and all before it with it; some are skipped."""
        self._store.add_persistent_callback(callback)

    def add_write_epoch_callback(self, callback: Callback) -> None:
        """Have `callback` called with each epoch that has been recorded, before it is told to be durable."""
        self._store.add_write_epoch_callback(callback)

    def status(self) -> Status:
        """At any time."""
        return self._store.status()

    def shutdown(self) -> None:
        """Let go of everything; twice is harmless. Sessions that are open are left behind, and do not count."""
        if not self._is_closed:
            self._is_closed = True
            self._thread.run(self._store.shutdown())
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
