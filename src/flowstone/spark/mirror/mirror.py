"""`Mirror`, a mirror inside a program; public as `flowstone.spark.Mirror`, and the job of `flowstone mirror`.

Checks the arguments and keeps the Spark session; each run is a `MirrorRun` (`mirror_run.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from os import PathLike, fspath
from types import TracebackType
from typing import TYPE_CHECKING, Final, Literal, Self, get_args

from flowstone.columns.arrow_columns import ColumnOptions
from flowstone.lake.masks import Masking, MaskKind
from flowstone.spark.index.slice_bytes import Transport
from flowstone.spark.mirror.choice import MirrorChoice, WrongChoice
from flowstone.spark.mirror.field_types import FieldTypes
from flowstone.spark.mirror.mirror_run import KEEP_HOURS, LakePlace, MirrorOptions, MirrorRun, OnMisfit
from flowstone.spark.mirror.progress import MirrorEvent, MirrorStopped
from flowstone.spark.mirror.start_checks import Source, check_start, parse_source
from flowstone.spark.spark_session import session_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MASTER: Final = "local[*,4]"
"""All cores of this machine. A task whose worker dies is retried, as on a cluster: four attempts in total."""

HOUR: Final = 3600.0


class Mirror:
    """Mirrors the settled changes of its sources into the Delta tables of a lake, one table per space.

    Each change is applied exactly once, and no change that was rolled back. The first run loads a snapshot; later runs
    resume where the last one stopped, also in another process. Tables follow the definitions of their spaces. Inside a
    `with` block all runs share one Spark session; outside, each run starts its own unless `spark` is given.

    Args:
        sources: A live replica set (`[user[:password]@]host:port`, members separated by commas), or the directory of an
            archive, of `.snap` and `.xlog` files, or of Limestone data. With several sources, each table contains the
            rows of all sources. Users of live sources need the role `replication`.
        lake: Path or URL of the directory for the tables.
        spark: Session to use. By default, the running session of this process is used, or one is started.
        on_event: Called with each event, also from threads that receive the log.
        history: Keep every state of every row, with the times between which it was valid.
        changes: Also keep a change table for each space: each settled change, with the row before and after it. By
            default, a lake stays as it is, and a new lake has none.
        space: Mirror only these spaces, by name, id or pattern (`shop_*`). By default, all user spaces.
        exclude: Skip these spaces.
        columns: Typed columns of a table, by space; `_tuple` always has all fields.
        unsigned_as: Column type of unsigned fields.
        decimal_scale: Store decimals with this many digits after the point, not as text.
        strings_as: Column type of string fields; binary also holds values that are not UTF-8.
        types: Column types by `SPACE.FIELD`, such as `{"orders.id": "decimal(20,0)"}`; other columns have the types
            that the options above choose.
        retype: Change the types of columns of a lake, in the same form. Their tables are rewritten from the tuples when
            a run starts.
        resync: Take the tables of these spaces (names, ids or patterns) anew when the first run starts; the others go
            on.
        mask: Masks by `SPACE.FIELD`, such as `{"users.email": "sha256"}`. They need `spool`.
        mask_salt: Key that turns sha256 into an HMAC.
        spool: Directory that keeps the log of live sources until it is in the lake and, with masks, the unmasked tuples
            permanently. By default, `_flowstone_spool` in a local lake.
        trigger_seconds: Minimum time between two batches.
        max_rows: Approximate number of log rows per batch.
        register: Register as a member of live replica sets, so that they keep their logs until the mirror has them.
        fail_on_data_loss: Stop if rows are permanently lost; otherwise replace the tables with a new snapshot.
        compact_every: Seconds between table compactions; 0: never.
        vacuum_after: Hours after which the files of older table versions are removed; 0: never.
        transport: How executors receive the log; `file` requires a directory that they share.
        transport_address: Address of this machine from which executors fetch the log over TCP.
        on_misfit: `quarantine`: if a value does not fit its column, the column is null, and the quarantine table of the
            lake gets a row with the value. `stop`: such a value stops the mirror with an error.
        catalog: Register the tables in this schema of Spark's catalog.
        raw: Mirror Tsurugi's tables as storages, with raw keys and values, instead of typed columns.
        username: User of live sources whose URI names none.
        password: Password of that user.
        storage_options: Options for a lake in object storage, as in deltalake.
        master: Spark master of a session that is started here.
        conf: Spark settings of a session that is started here.

    Raises:
        WrongPlace: The sources, the lake or the spool cannot be used as given.
        WrongChoice: The choice of spaces or columns contradicts itself.
        WrongMask: A mask is invalid.
        WrongType: A type is invalid.
        UriError: The address of a source is invalid.

    Example:
        with flowstone.spark.Mirror("replicator:secret@db1:3301", "/lake/shop", on_event=print) as mirror:
            done = mirror.run_once()            # returns when the lake has all rows that the server has now
            print(done.positions, done.changes)
            mirror.run()                        # until another thread calls mirror.stop()
    """

    def __init__(
        self,
        sources: str | PathLike[str] | Sequence[str | PathLike[str]],
        lake: str | PathLike[str],
        *,
        spark: SparkSession | None = None,
        on_event: Callable[[MirrorEvent], object] | None = None,
        history: bool = False,
        changes: bool | None = None,
        space: int | str | Collection[int | str] = (),
        exclude: int | str | Collection[int | str] = (),
        columns: Mapping[str, Sequence[str]] | None = None,
        unsigned_as: Literal["int64", "decimal", "double"] = "int64",
        decimal_scale: int | None = None,
        strings_as: Literal["string", "binary"] = "string",
        types: Mapping[str, str] | None = None,
        retype: Mapping[str, str] | None = None,
        resync: int | str | Collection[int | str] = (),
        mask: Mapping[str, MaskKind] | None = None,
        mask_salt: str | None = None,
        spool: str | PathLike[str] | None = None,
        trigger_seconds: float = 1.0,
        max_rows: int = 500_000,
        register: bool = False,
        fail_on_data_loss: bool = True,
        compact_every: float = 300.0,
        vacuum_after: float = KEEP_HOURS,
        transport: Transport = "auto",
        transport_address: str | None = None,
        on_misfit: OnMisfit = "quarantine",
        catalog: str | None = None,
        raw: bool = False,
        username: str | None = None,
        password: str | None = None,
        storage_options: Mapping[str, str] | None = None,
        master: str = MASTER,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        texts = [fspath(sources)] if isinstance(sources, str | PathLike) else [fspath(each) for each in sources]
        self._sources: list[Source] = [parse_source(text, username, password) for text in texts]
        self._options = MirrorOptions(
            choice=MirrorChoice.of(_listed(space), _listed(exclude), columns or {}),
            masking=Masking.parse([f"{field}={kind}" for field, kind in (mask or {}).items()], mask_salt),
            types=ColumnOptions(unsigned_as, decimal_scale, strings_as),
            field_types=FieldTypes.of(types or {}),
            retype=FieldTypes.of(retype or {}),
            resync=tuple(_listed(resync)),
            history=history,
            changes=changes,
            trigger_seconds=trigger_seconds,
            max_rows=max_rows,
            register=register,
            fail_on_data_loss=fail_on_data_loss,
            compact_every=compact_every or None,
            vacuum_after=vacuum_after * HOUR or None,
            transport=transport,
            transport_address=transport_address,
            catalog=catalog,
            on_misfit=checked_on_misfit(on_misfit),
            raw=raw,
        )
        place = LakePlace.of(
            fspath(lake),
            None if spool is None else fspath(spool),
            is_masked=bool(self._options.masking),
            has_live=any(not isinstance(each, str) for each in self._sources),
        )
        self._place = replace(place, storage_options=dict(storage_options or {}))
        self._given, self._running = spark, spark
        self._master, self._conf = master, conf
        self._tell = on_event if on_event is not None else lambda event: None
        self._stopping = threading.Event()
        self._checked: list[Source] | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Check the sources and start a Spark session if there is none.

        Raises:
            OtherSettings: The lake was created with other options.
            MirrorBusy: Another mirror writes to the lake.
            SparkUnavailable: Spark cannot be started here.
            FlowstoneError: A source is unreachable or damaged, or rejects the mirror.
        """
        self._checked = self._check()
        self._running = self._stack.enter_context(self._session())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running = self._given
        self._stack.__exit__(kind, error, trace)

    def run_once(self) -> MirrorStopped:
        """Mirror until the lake has all rows that the sources had at the start.

        Returns:
            The positions that the lake has reached, and the number of changes and batches of this run.

        Raises:
            DataLoss: Rows are permanently lost, and `fail_on_data_loss` is on.
            MirrorBusy: Another mirror writes to the lake.
            OtherSettings: The lake was created with other options.
            SparkUnavailable: Spark cannot be started here.
            FlowstoneError: A source is unreachable or damaged, or rejects the mirror.
        """
        return self._run(once=True)

    def run(self) -> MirrorStopped:
        """Mirror until `stop` is called. Live sources that are lost are contacted again until they answer.

        Returns:
            The positions that the lake has reached, and the number of changes and batches of this run.

        Raises:
            FlowstoneError: As in `run_once`; a source that the lake knows already may be unreachable.
        """
        return self._run(once=False)

    def stop(self) -> None:
        """End the current run after its current batch; the next run, if none is running.

        May be called from any thread and from signal handlers.
        """
        self._stopping.set()

    def _run(self, *, once: bool) -> MirrorStopped:
        checked, self._checked = self._checked or self._check(), None
        options = replace(self._options, once=once)
        try:
            with self._session() as spark:
                run = MirrorRun(spark, checked, self._place, options, on_event=self._tell, stopping=self._stopping)
                done = run.run()
                self._options = replace(self._options, resync=())
                return done
        finally:
            self._stopping.clear()

    def _check(self) -> list[Source]:
        return check_start(self._sources, self._place.lake, self._options)

    def _session(self) -> AbstractContextManager[SparkSession]:
        return session_for(self._running, "flowstone mirror", master=self._master, conf=self._conf)


def checked_on_misfit(text: str) -> OnMisfit:
    """Return the option, or raise WrongChoice."""
    for known in get_args(OnMisfit):
        if text == known:
            return known  # type: ignore[no-any-return]  # one of the literals
    raise WrongChoice(f"unknown on_misfit {text!r}", hint="use quarantine or stop")


def _listed(spaces: int | str | Collection[int | str]) -> Collection[int | str]:
    return (spaces,) if isinstance(spaces, int | str) else spaces
