"""`flowstone.spark.restore`: the state at a settled position of a log, as files. The job of `flowstone restore`.

Checks the arguments, finds the position and starts Spark if needed; the work is done by `archive_restore.py` and
`limestone_restore.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from os import PathLike, fspath
from typing import TYPE_CHECKING, Final

from flowstone.errors import FlowstoneError
from flowstone.outside import production
from flowstone.replication.vclock import VClock
from flowstone.spark.index.limestone_index import LimestoneIndex, is_limestone
from flowstone.spark.index.log_index import ArchiveIndex
from flowstone.spark.restoration import archive_restore, limestone_restore
from flowstone.spark.restoration.archive_restore import (
    Format,
    OutputTaken,
    Restored,
    VinylSpaces,
    check_output,
    fits_in_memory,
    restore_archive,
    restore_in_memory,
)
from flowstone.spark.restoration.limestone_restore import restore_limestone
from flowstone.spark.sources.options import AsOf, When, WrongOption, as_of
from flowstone.spark.spark_session import MASTER, SparkUnavailable, session_for

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pyspark.sql import SparkSession

NEWEST: Final = "newest"


def restore(
    source: str | PathLike[str],
    destination: str | PathLike[str],
    *,
    to: When = NEWEST,
    format: Format | Sequence[Format] | None = None,
    spark: SparkSession | None = None,
    master: str = MASTER,
    conf: Mapping[str, str] | None = None,
    on_step: Callable[[str], object] | None = None,
) -> Restored:
    """Write the state at a settled position: a snapshot that Tarantool can start from, or Delta or Parquet tables.

    The state is the newest snapshot before the position plus the changes up to the position, without changes that were
    rolled back. A server started from the result has the identity of the archived instance: do not let it join the live
    one. A failed restore leaves no files. A snapshot of a state that fits into memory is written without Spark and
    Java, unless `spark` or `master` is given.

    Args:
        source: The directory of an archive, of `.snap` and `.xlog` files, or of Limestone data.
        destination: A new or empty directory. With several formats, it gets a subdirectory for each.
        to: The position: a time with its zone (`"2026-05-01T12:00:00Z"` or a `datetime`), a vclock (`"{1: 500}"`), an
            LSN if only one instance has written, or `"newest"`. For Limestone, an epoch.
        format: `"snap"` (default), `"limestone"` (default for Limestone data), `"delta"` or `"parquet"`, or several of
            them.
        spark: Session to use. By default, the running session of this process is used, or one is started.
        master: Spark master of a session that is started here.
        conf: Spark settings of a session that is started here.
        on_step: Called with a line of text at each step.

    Returns:
        The position, the number of rows by space, and the path of each format.

    Raises:
        OutputTaken: `destination` is not empty, not usable, or being written by another process.
        NotSettled: The position lies inside a transaction, is still pending or is after the end of the log.
        NotDurable: The epoch is not durable yet.
        EpochLost: The epoch has been compacted.
        DataLoss: Rows or the snapshot that the state needs do not exist.
        VinylSpaces: A snapshot is requested of spaces whose tuples snapshots do not hold.
        WrongOption: `to` is not a position, or `format` is unknown.
        SparkUnavailable: Spark cannot be started here.
        FlowstoneError: The log is damaged, or `source` has none.

    Example:
        restored = flowstone.spark.restore("/backup/db1", "/restored/db1", to="2026-05-01T12:00:00Z")
        print(restored.position, restored.row_count, restored.files["snap"])
    """
    source, destination = fspath(source), fspath(destination)
    tell = on_step if on_step is not None else lambda text: None
    check_output(destination)
    tell("reading the index")

    def session() -> AbstractContextManager[SparkSession]:
        if spark is None and find_spec("pyspark") is None:
            what = "this restore needs Spark: tables, Limestone data, or a state that does not fit into memory"
            raise SparkUnavailable(what, hint="pip install 'flowstone[spark]', and Java 17")
        tell("starting Spark")
        return session_for(spark, "flowstone restore", master=master, conf=conf)

    if is_limestone(source):
        formats = _formats(format, limestone_restore.FORMATS)
        index = LimestoneIndex.open(production().disk, source)
        epoch = index.durable if to == NEWEST else _epoch(to)
        index.check_state(epoch)
        with session() as running:
            return restore_limestone(running, index, epoch, destination, formats=formats, tell=tell)
    formats, moment = _formats(format, archive_restore.FORMATS), _moment(to)
    archive = ArchiveIndex.open(production().disk, os.path.abspath(source))
    position = archive.settled if moment is None else archive.resolve(moment)
    archive.snapshot_at(position)
    doubt = archive.doubt(moment) if moment is not None else None
    restored = None
    if formats == ("snap",) and spark is None and master == MASTER and fits_in_memory(archive, position):
        restored = _in_memory(archive, position, destination, tell)
    if restored is None:
        with session() as running:
            restored = restore_archive(running, archive, position, destination, formats=formats, tell=tell)
    return restored if doubt is None else replace(restored, notes=(doubt, *restored.notes))


def _in_memory(
    archive: ArchiveIndex, position: VClock, destination: str, tell: Callable[[str], object]
) -> Restored | None:
    """Restore a snapshot without Spark; return None if only Spark can, and is installed."""
    try:
        return restore_in_memory(archive, position, destination, tell=tell)
    except (OutputTaken, VinylSpaces):
        raise
    except FlowstoneError as error:
        if find_spec("pyspark") is None:
            raise
        tell(f"cannot rebuild the state in memory: {error.message}")
        return None


def _formats(given: Format | Sequence[Format] | None, known: tuple[Format, ...]) -> tuple[Format, ...]:
    """Return the requested formats in the order of `known`, whose first format is the default."""
    wanted = [given] if isinstance(given, str) else given or known[:1]
    for each in wanted:
        if each not in known:
            raise WrongOption(f"invalid format: {each!r}", hint=f"choose from {', '.join(known)}")
    return tuple(each for each in known if each in wanted)


def _moment(to: When) -> AsOf | None:
    """Return the moment; None is the newest position."""
    try:
        return None if to == NEWEST else as_of(to)
    except ValueError as error:
        raise WrongOption(f"invalid position: {to!r}", hint=f"{error}, or {NEWEST}") from None


def _epoch(to: When) -> int:
    if isinstance(to, int):
        return to
    if not (isinstance(to, str) and to.isascii() and to.isdigit()):
        raise WrongOption(
            f"invalid position: {to!r}", hint=f"for Limestone, specify an epoch (a whole number) or {NEWEST}"
        )
    return int(to)
