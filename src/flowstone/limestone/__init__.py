"""Limestone, the log of Tsurugi: its data directory, log channels, epochs and replication.

Relies on `outside/` for every byte that is read, written or sent. Knows nothing of Tarantool. Exports the public names
lazily, so that importing the package loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowstone.lazy import lazy_names

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
    from flowstone.limestone.propagation import PropagationStatus, QuorumLost
    from flowstone.limestone.replica import CannotListen, Replica, ReplicaStatus
    from flowstone.limestone.replica_events import Event
    from flowstone.limestone.rotation import Rotated
    from flowstone.limestone.settings import Settings, SettingsFields

__all__ = [
    "AsyncDatastore",
    "AsyncLogChannel",
    "Backup",
    "BackupEntry",
    "BlobError",
    "BlobPool",
    "BlockingBlobPool",
    "CannotListen",
    "Compacted",
    "DamagedFile",
    "Datastore",
    "DatastoreFailed",
    "Endpoint",
    "Entry",
    "EntryType",
    "Event",
    "LimestoneError",
    "LogChannel",
    "PropagationStatus",
    "QuorumLost",
    "Replica",
    "ReplicaStatus",
    "Rotated",
    "Settings",
    "SettingsFields",
    "State",
    "Status",
    "StoreSnapshot",
    "WriteVersion",
    "WrongTime",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AsyncDatastore": "datastore",
        "AsyncLogChannel": "channel",
        "Backup": "backup",
        "BackupEntry": "backup",
        "BlobError": "blobs",
        "BlobPool": "blobs",
        "BlockingBlobPool": "blocking",
        "CannotListen": "replica",
        "Compacted": "compaction",
        "DamagedFile": "errors",
        "Datastore": "blocking",
        "DatastoreFailed": "errors",
        "Endpoint": "endpoint",
        "Entry": "entries",
        "EntryType": "entries",
        "Event": "replica_events",
        "LimestoneError": "errors",
        "LogChannel": "blocking",
        "PropagationStatus": "propagation",
        "QuorumLost": "propagation",
        "Replica": "replica",
        "ReplicaStatus": "replica",
        "Rotated": "rotation",
        "Settings": "settings",
        "SettingsFields": "settings",
        "State": "datastore",
        "Status": "datastore",
        "StoreSnapshot": "cursor",
        "WriteVersion": "entries",
        "WrongTime": "errors",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
