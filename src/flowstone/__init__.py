"""Flowstone: Python as a full member of a replicated log.

This is the public surface; everything below it may move. Importing it loads nothing heavy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING, Literal

from flowstone.errors import FlowstoneError

if TYPE_CHECKING:
    import pyarrow

    from flowstone import spark
    from flowstone.history.reading import Report
    from flowstone.iproto.errors import TarantoolError
    from flowstone.node.changes import Change, SettledChange
    from flowstone.node.follow import follow
    from flowstone.node.node import Node
    from flowstone.node.replica import CannotFollow, Replica
    from flowstone.node.replica_blocking import BlockingReplica
    from flowstone.node.spaces import Index, Space
    from flowstone.node.synchro_queue import OutcomeUnknown
    from flowstone.node.transactions import Transaction, View
    from flowstone.node.tuples import Tuple
    from flowstone.replication.vclock import VClock

__version__ = "0.1.0"
__all__ = [
    "BlockingReplica",
    "CannotFollow",
    "Change",
    "FlowstoneError",
    "Index",
    "Node",
    "OutcomeUnknown",
    "Replica",
    "SettledChange",
    "Space",
    "TarantoolError",
    "Transaction",
    "Tuple",
    "VClock",
    "View",
    "__version__",
    "follow",
    "read_log",
    "spark",
]

_LATER = {
    "BlockingReplica": "node.replica_blocking",
    "CannotFollow": "node.replica",
    "Change": "node.changes",
    "Index": "node.spaces",
    "Node": "node.node",
    "OutcomeUnknown": "node.synchro_queue",
    "Replica": "node.replica",
    "SettledChange": "node.changes",
    "Space": "node.spaces",
    "TarantoolError": "iproto.errors",
    "Transaction": "node.transactions",
    "Tuple": "node.tuples",
    "VClock": "replication.vclock",
    "View": "node.transactions",
    "follow": "node.follow",
}
"""Where each name lives: who only reads logs need not load a node."""


def __getattr__(name: str) -> object:
    if name not in _LATER and name != "spark":
        raise AttributeError(f"module 'flowstone' has no attribute {name!r}")
    from importlib import import_module

    if name == "spark":
        return import_module("flowstone.spark")
    return getattr(import_module(f"flowstone.{_LATER[name]}"), name)


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
    """Rows of `.xlog` and `.snap` files, or of directories of them, as Arrow record batches, in log order.

    With `space`, an id or a name, its fields are typed columns beside `_lsn`, `_type`, `_timestamp` and so on; where
    its format changed, there are the columns of all its formats. Without, keys and tuples are MessagePack. Rows that
    were rolled back, or are not decided yet, are left out unless `settled` is off. Damage and gaps are errors unless
    `force` is on. What a reader should know of the log (a torn end, rows held back) goes to the logger "flowstone".
    Memory is bounded by a few batches, whatever the size of the log.
    """
    import pyarrow

    from flowstone.history.columnar import GenericShape, TypedShape, typed_reader
    from flowstone.history.files import find_logs
    from flowstone.history.reading import Reading
    from flowstone.history.selection import Selection
    from flowstone.outside import production
    from flowstone.xlog.columns import ColumnOptions

    outside = production()
    files = find_logs(outside.disk, [fspath(path) for path in paths], recursive=recursive)
    selection = Selection(spaces=() if space is None else (space,), replicas=tuple(replicas), show_system=show_system)

    def reading(on_end: Callable[[Report], None] | None = None) -> Reading:
        return Reading(outside, files, selection=selection, settled=settled, force=force, on_end=on_end)

    if space is None:
        generic = GenericShape(columns)
        return pyarrow.RecordBatchReader.from_batches(generic.schema(), generic.batches(reading(_log).pieces()))
    has_logs = any(path.endswith(".xlog") for path in files)
    shape = TypedShape(ColumnOptions(unsigned_as, decimal_scale, strings_as), columns, partial=has_logs)
    return typed_reader((reading(), reading(_log)), shape)


def _log(report: Report) -> None:
    logger = logging.getLogger("flowstone")
    for line in (*report.warnings(), *report.notes()):
        logger.warning(line)
