"""Limestone, the log of Tsurugi: its data directory, log channels, epochs and replication.

Relies on `outside/` for every byte that is read, written or sent. Knows nothing of Tarantool. Exports the public names
lazily, so that importing the package loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowstone.errors import CannotListen
from flowstone.lazy import lazy_names

if TYPE_CHECKING:
    from flowstone.limestone.errors import (
        BadMetadata,
        BadRow,
        DamagedFile,
        DatastoreFailed,
        LimestoneError,
        NoSuchTable,
        WrongTime,
    )
    from flowstone.limestone.format.endpoint import Endpoint, EndpointError
    from flowstone.limestone.format.entries import Entry, EntryType, WriteVersion
    from flowstone.limestone.master.propagation import PropagationStatus, QuorumLost
    from flowstone.limestone.replica.events import Event
    from flowstone.limestone.replica.replica import Replica, ReplicaStatus
    from flowstone.limestone.settings import Settings, SettingsFields
    from flowstone.limestone.store.backup import Backup, BackupEntry
    from flowstone.limestone.store.blobs import BlobError, BlobPool
    from flowstone.limestone.store.blocking import BlockingBlobPool, Datastore, LogChannel
    from flowstone.limestone.store.channel import AsyncLogChannel
    from flowstone.limestone.store.compaction import Compacted
    from flowstone.limestone.store.cursor import StoreSnapshot
    from flowstone.limestone.store.datastore import AsyncDatastore, State, Status
    from flowstone.limestone.store.rotation import Rotated
    from flowstone.limestone.tsurugi.definitions import SqlTable
    from flowstone.limestone.tsurugi.table_reader import read_table, tables

__all__ = [
    "AsyncDatastore",
    "AsyncLogChannel",
    "Backup",
    "BackupEntry",
    "BadMetadata",
    "BadRow",
    "BlobError",
    "BlobPool",
    "BlockingBlobPool",
    "CannotListen",
    "Compacted",
    "DamagedFile",
    "Datastore",
    "DatastoreFailed",
    "Endpoint",
    "EndpointError",
    "Entry",
    "EntryType",
    "Event",
    "LimestoneError",
    "LogChannel",
    "NoSuchTable",
    "PropagationStatus",
    "QuorumLost",
    "Replica",
    "ReplicaStatus",
    "Rotated",
    "Settings",
    "SettingsFields",
    "SqlTable",
    "State",
    "Status",
    "StoreSnapshot",
    "WriteVersion",
    "WrongTime",
    "read_table",
    "tables",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AsyncDatastore": "store.datastore",
        "AsyncLogChannel": "store.channel",
        "Backup": "store.backup",
        "BackupEntry": "store.backup",
        "BadMetadata": "errors",
        "BadRow": "errors",
        "BlobError": "store.blobs",
        "BlobPool": "store.blobs",
        "BlockingBlobPool": "store.blocking",
        "Compacted": "store.compaction",
        "DamagedFile": "errors",
        "Datastore": "store.blocking",
        "DatastoreFailed": "errors",
        "Endpoint": "format.endpoint",
        "EndpointError": "format.endpoint",
        "Entry": "format.entries",
        "EntryType": "format.entries",
        "Event": "replica.events",
        "LimestoneError": "errors",
        "LogChannel": "store.blocking",
        "NoSuchTable": "errors",
        "PropagationStatus": "master.propagation",
        "QuorumLost": "master.propagation",
        "Replica": "replica.replica",
        "ReplicaStatus": "replica.replica",
        "Rotated": "store.rotation",
        "Settings": "settings",
        "SettingsFields": "settings",
        "SqlTable": "tsurugi.definitions",
        "State": "store.datastore",
        "Status": "store.datastore",
        "StoreSnapshot": "store.cursor",
        "WriteVersion": "format.entries",
        "WrongTime": "errors",
        "read_table": "tsurugi.table_reader",
        "tables": "tsurugi.table_reader",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
