"""Flowstone: Python as a full member of a replicated log.

This is the public surface; everything below it may move. Importing it loads nothing heavy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Literal

from flowstone.errors import CannotListen, FlowstoneError, LocalProtocolError, OutcomeUnknown, RemoteProtocolError
from flowstone.lazy import lazy_names

if type(__spec__.loader).__name__ == "zipimporter":
    raise ImportError(
        "flowstone cannot be imported from a zip file: its compiled modules are shared libraries;"
        " install it on every machine, or ship a packed environment with spark.archives"
    )

if os.environ.get("FLOWSTONE_INTERPRETED") == "1":
    from flowstone.native.interpreted import install

    install()

if TYPE_CHECKING:
    import pyarrow

    from flowstone import limestone, spark
    from flowstone.archive.archive import Archive
    from flowstone.archive.manifest import NotAnArchive
    from flowstone.archive.refusals import ArchiveRefused
    from flowstone.box.row_forms import RowMismatch
    from flowstone.box.schema import UnknownSpace
    from flowstone.box.tuples import Tuple
    from flowstone.client.batch import RowsFailed
    from flowstone.client.blocking_client import (
        BlockingClient,
        BlockingClientIndex,
        BlockingClientSpace,
        BlockingClientTransaction,
    )
    from flowstone.client.client import Client, ClientMember
    from flowstone.client.connect import Connecting, connect
    from flowstone.client.connection import ConnectionFailed
    from flowstone.client.pool import NoMember
    from flowstone.client.spaces import ClientIndex, ClientSpace
    from flowstone.client.transaction import ClientTransaction
    from flowstone.history.log_reading import ReadReport
    from flowstone.iproto.errors import TarantoolError
    from flowstone.iproto.uri import UriError
    from flowstone.node.changes import Change, SettledChange
    from flowstone.node.configuration import Configuration, NodeOptions
    from flowstone.node.node import Node, NotRunning
    from flowstone.node.object_spaces import ObjectIndex, ObjectSpace
    from flowstone.node.server.procedure_call import ProcedureCall, procedure
    from flowstone.node.spaces import Index, Space, TransactionIndex, TransactionSpace, ViewIndex, ViewSpace
    from flowstone.node.statistics import DiskUsage, Statistics
    from flowstone.node.transactions import Transaction, View
    from flowstone.node.upstream.node_sink import JoinRefused
    from flowstone.node.wal.replay import RecoveryError
    from flowstone.outside.disk import AlreadyLocked
    from flowstone.replica.blocking_replica import BlockingIndex, BlockingReplica, BlockingSpace
    from flowstone.replica.change_stream import ChangesMissed, ChangeStream
    from flowstone.replica.follow import Following, follow
    from flowstone.replica.replica import CannotFollow, NotReached, Replica, ReplicaState, StaleReplica
    from flowstone.replication.applier.states import ApplierState
    from flowstone.replication.vclock import Order, VClock, VClockError
    from flowstone.xlog.errors import XlogError

__version__ = "0.1.0"
__all__ = [
    "AlreadyLocked",
    "ApplierState",
    "Archive",
    "ArchiveRefused",
    "BlockingClient",
    "BlockingClientIndex",
    "BlockingClientSpace",
    "BlockingClientTransaction",
    "BlockingIndex",
    "BlockingReplica",
    "BlockingSpace",
    "CannotFollow",
    "CannotListen",
    "Change",
    "ChangeStream",
    "ChangesMissed",
    "Client",
    "ClientIndex",
    "ClientMember",
    "ClientSpace",
    "ClientTransaction",
    "Configuration",
    "Connecting",
    "ConnectionFailed",
    "DiskUsage",
    "FlowstoneError",
    "Following",
    "Index",
    "JoinRefused",
    "LocalProtocolError",
    "NoMember",
    "Node",
    "NodeOptions",
    "NotAnArchive",
    "NotReached",
    "NotRunning",
    "ObjectIndex",
    "ObjectSpace",
    "Order",
    "OutcomeUnknown",
    "ProcedureCall",
    "RecoveryError",
    "RemoteProtocolError",
    "Replica",
    "ReplicaState",
    "RowMismatch",
    "RowsFailed",
    "SettledChange",
    "Space",
    "StaleReplica",
    "Statistics",
    "TarantoolError",
    "Transaction",
    "TransactionIndex",
    "TransactionSpace",
    "Tuple",
    "UnknownSpace",
    "UriError",
    "VClock",
    "VClockError",
    "View",
    "ViewIndex",
    "ViewSpace",
    "XlogError",
    "__version__",
    "connect",
    "follow",
    "limestone",
    "procedure",
    "read_log",
    "spark",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AlreadyLocked": "outside.disk",
        "ApplierState": "replication.applier.states",
        "Archive": "archive.archive",
        "ArchiveRefused": "archive.refusals",
        "BlockingClient": "client.blocking_client",
        "BlockingClientIndex": "client.blocking_client",
        "BlockingClientSpace": "client.blocking_client",
        "BlockingClientTransaction": "client.blocking_client",
        "BlockingIndex": "replica.blocking_replica",
        "BlockingReplica": "replica.blocking_replica",
        "BlockingSpace": "replica.blocking_replica",
        "CannotFollow": "replica.replica",
        "Change": "node.changes",
        "ChangeStream": "replica.change_stream",
        "ChangesMissed": "replica.change_stream",
        "Client": "client.client",
        "ClientIndex": "client.spaces",
        "ClientMember": "client.client",
        "ClientSpace": "client.spaces",
        "ClientTransaction": "client.transaction",
        "Configuration": "node.configuration",
        "Connecting": "client.connect",
        "ConnectionFailed": "client.connection",
        "DiskUsage": "node.statistics",
        "Following": "replica.follow",
        "Index": "node.spaces",
        "JoinRefused": "node.upstream.node_sink",
        "NoMember": "client.pool",
        "Node": "node.node",
        "NodeOptions": "node.configuration",
        "NotAnArchive": "archive.manifest",
        "NotReached": "replica.replica",
        "NotRunning": "node.node",
        "ObjectIndex": "node.object_spaces",
        "ObjectSpace": "node.object_spaces",
        "Order": "replication.vclock",
        "ProcedureCall": "node.server.procedure_call",
        "RecoveryError": "node.wal.replay",
        "Replica": "replica.replica",
        "ReplicaState": "replica.replica",
        "RowMismatch": "box.row_forms",
        "RowsFailed": "client.batch",
        "SettledChange": "node.changes",
        "Space": "node.spaces",
        "StaleReplica": "replica.replica",
        "Statistics": "node.statistics",
        "TarantoolError": "iproto.errors",
        "Transaction": "node.transactions",
        "TransactionIndex": "node.spaces",
        "TransactionSpace": "node.spaces",
        "Tuple": "box.tuples",
        "UnknownSpace": "box.schema",
        "UriError": "iproto.uri",
        "VClock": "replication.vclock",
        "VClockError": "replication.vclock",
        "View": "node.transactions",
        "ViewIndex": "node.spaces",
        "ViewSpace": "node.spaces",
        "XlogError": "xlog.errors",
        "connect": "client.connect",
        "follow": "replica.follow",
        "limestone": "",
        "procedure": "node.server.procedure_call",
        "spark": "",
    },
)


def read_log(
    *paths: str | PathLike[str],
    space: int | str | None = None,
    settled: bool = True,
    columns: Collection[str] | None = None,
    replicas: Sequence[int] = (),
    show_system: bool = False,
    recursive: bool = False,
    force: bool = False,
    unsigned_as: Literal["int64", "decimal", "double"] = "int64",
    decimal_scale: int | None = None,
    strings_as: Literal["string", "binary"] = "string",
) -> pyarrow.RecordBatchReader:
    """Read rows of `.xlog` and `.snap` files as Arrow record batches, in log order.

    Memory is bounded by a few batches, whatever the size of the log. Warnings about the log, such as a torn end or rows
    that are not settled yet, go to the logger "flowstone".

    Args:
        paths: Log files, or directories of log files.
        space: Read only this space, by id or name. Its fields are typed columns next to `_lsn`, `_type`, `_timestamp`
            and so on; if its format changed, there are the columns of all its formats. Without a space, keys and tuples
            are MessagePack.
        settled: Leave out rows that were rolled back or are not settled yet.
        columns: Names of the columns to read. By default, all.
        replicas: Read only rows written by these replicas, by id.
        show_system: Include rows of system spaces.
        recursive: Search subdirectories.
        force: Continue past damage and gaps instead of raising an error.
        unsigned_as: Column type of unsigned fields.
        decimal_scale: Store decimals with this many digits after the point, not as text.
        strings_as: Column type of string fields; binary also holds values that are not UTF-8.

    Returns:
        A reader of record batches. Rows are read as the reader advances.

    Raises:
        XlogError: A file is damaged or incomplete, or rows are missing between two files.
        UnknownSpace: No log defines `space`.
        FlowstoneError: A path contains no log file, a column does not exist, or pyarrow is not installed.

    Example:
        orders = flowstone.read_log("/var/lib/tarantool/shop", space="orders").read_all()
    """
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise FlowstoneError(
            "read_log needs pyarrow, which is not installed", hint="pip install 'flowstone[arrow]'"
        ) from None

    from flowstone.columns.arrow_columns import ColumnOptions
    from flowstone.columns.log_batches import GenericShape, TypedShape, typed_reader
    from flowstone.history.files import find_logs
    from flowstone.history.log_reading import Reading
    from flowstone.history.selection import Selection
    from flowstone.outside import production

    outside = production()
    files = find_logs(outside.disk, [fspath(path) for path in paths], recursive=recursive)
    selection = Selection(spaces=() if space is None else (space,), replicas=tuple(replicas), show_system=show_system)

    def reading(on_end: Callable[[ReadReport], None] | None = None) -> Reading:
        return Reading(outside, files, selection=selection, settled=settled, force=force, on_end=on_end)

    if space is None:
        generic = GenericShape(columns)
        return pyarrow.RecordBatchReader.from_batches(generic.schema(), generic.batches(reading(_log).pieces()))
    has_logs = any(path.endswith(".xlog") for path in files)
    shape = TypedShape(ColumnOptions(unsigned_as, decimal_scale, strings_as), columns, partial=has_logs)
    return typed_reader((reading(), reading(_log)), shape)


def _log(report: ReadReport) -> None:
    logger = logging.getLogger("flowstone")
    for line in (*report.warnings(), *report.notes()):
        logger.warning(line)
