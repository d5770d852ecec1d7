"""The other log: Limestone's data directory, log channels, epochs and replication, as Tsurugi writes and speaks them.

Relies on `outside/` for every byte that is read, written or sent. Knows nothing of Tarantool. What a program needs is
named here; importing this loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowstone.limestone.backup import Backup, BackupEntry
    from flowstone.limestone.blobs import BlobError, BlobPool
    from flowstone.limestone.blocking import BlockingBlobPool, Datastore, LogChannel
    from flowstone.limestone.channel import AsyncLogChannel
    from flowstone.limestone.compaction import Compacted
    from flowstone.limestone.cursor import StoreSnapshot
    from flowstone.limestone.datastore import AsyncDatastore, State, Status
    from flowstone.limestone.endpoint import Endpoint
    from flowstone.limestone.entries import Entry, EntryType, WriteVersion
    from flowstone.limestone.errors import DamagedFile, DatastoreFailed, LimestoneError, WrongTime
    from flowstone.limestone.propagation import QuorumLost
    from flowstone.limestone.replica import Replica
    from flowstone.limestone.settings import Settings

__all__ = [
    "AsyncDatastore",
    "AsyncLogChannel",
    "Backup",
    "BackupEntry",
    "BlobError",
    "BlobPool",
    "BlockingBlobPool",
    "Compacted",
    "DamagedFile",
    "Datastore",
    "DatastoreFailed",
    "Endpoint",
    "Entry",
    "EntryType",
    "LimestoneError",
    "LogChannel",
    "QuorumLost",
    "Replica",
    "Settings",
    "State",
    "Status",
    "StoreSnapshot",
    "WriteVersion",
    "WrongTime",
]

_LATER = {
    "AsyncDatastore": "datastore",
    "AsyncLogChannel": "channel",
    "Backup": "backup",
    "BackupEntry": "backup",
    "BlobError": "blobs",
    "BlobPool": "blobs",
    "BlockingBlobPool": "blocking",
    "Compacted": "compaction",
    "DamagedFile": "errors",
    "Datastore": "blocking",
    "DatastoreFailed": "errors",
    "Endpoint": "endpoint",
    "Entry": "entries",
    "EntryType": "entries",
    "LimestoneError": "errors",
    "LogChannel": "blocking",
    "QuorumLost": "propagation",
    "Replica": "replica",
    "Settings": "settings",
    "State": "datastore",
    "Status": "datastore",
    "StoreSnapshot": "cursor",
    "WriteVersion": "entries",
    "WrongTime": "errors",
}
"""Where each name lives: who only reads a file need not load a datastore."""


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'flowstone.limestone' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"flowstone.limestone.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
