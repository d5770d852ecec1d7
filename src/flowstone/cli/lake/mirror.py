"""`flowstone mirror`: copy the settled changes of live servers, archives or log directories to Delta tables.

Parses the options, reports events and handles signals; the mirror itself is `spark/mirror/mirror.py`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Final, Literal, TextIO

import typer

from flowstone.cli import extras
from flowstone.cli.console import OK, UsageError, say
from flowstone.cli.http_options import HttpListen, HttpPlace, HttpToken, place_of
from flowstone.cli.log import JSON, PLAIN, LogFormat, say_event, set_format
from flowstone.cli.logs.play import PASSWORD_HELP, USERNAME_VARIABLE, login
from flowstone.cli.logs.row_options import DecimalScale, advice

if TYPE_CHECKING:
    from types import FrameType

    from rich.live import Live
    from rich.table import Table as RichTable

    from flowstone.spark.mirror.mirror import Mirror
    from flowstone.spark.mirror.progress import MirrorEvent, MirrorProgress

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=replicator TT_CLI_PASSWORD=secret flowstone mirror db1:3301,db2:3301 /lake/shop`\n\n"
    "An archive, once, without a space: `flowstone mirror --once --exclude queue /backup/db1 /lake/shop`\n\n"
    "Masked: `flowstone mirror --mask users.email=sha256 --spool /var/lib/flowstone db1:3301 s3a://bucket/shop`"
)

EXIT_CODES = """Exit codes: 0 stopped by a signal, or finished with --once; 1 a source rejects the mirror, has lost rows
or (with --once) is unreachable, another mirror writes to the lake, or the disk is full; 2 the command line or a path is
wrong."""

STDERR: Final = 2
STOPPING: Final = b"flowstone: stopping after the current batch; repeat the signal to stop immediately\n"

LINE_SECONDS: Final = 10.0
"""Interval between progress lines when stderr is not a terminal: a log may keep these lines for months."""

LOGGER: Final = "flowstone.mirror"
SALT_VARIABLE: Final = "FLOWSTONE_MASK_SALT"


def mirror(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A live replica set ([user[:password]@]host:port, members separated by commas), or the directory of "
            "an archive, of .snap and .xlog files, or of Limestone data. With several sources, each table has the rows "
            "of all of them.",
            show_default=False,
        ),
    ],
    lake: Annotated[str, typer.Argument(metavar="LAKE", help="Path or URL of the directory for the tables.")],
    once: Annotated[
        bool, typer.Option("--once", help="Stop when everything the sources had at the start is mirrored.")
    ] = False,
    history: Annotated[
        bool,
        typer.Option("--history", help="Keep every state of every row, with the times between which it was valid."),
    ] = False,
    changes: Annotated[
        bool | None,
        typer.Option(
            "--changes/--no-changes",
            help="Also keep a change table for each space: each settled change, with the row before and after it. "
            "Default: as the lake does, and not in a new lake.",
            show_default=False,
        ),
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(
            "--space",
            metavar="ID|NAME",
            help="Mirror only this space, or the spaces that match a pattern (shop_*). May be repeated. Default: all "
            "user spaces.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="ID|NAME",
            help="Skip this space, or the spaces that match a pattern. May be repeated.",
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--columns",
            metavar="SPACE=FIELD,…",
            help="Typed columns of a table; `_tuple` always has all fields. May be repeated.",
        ),
    ] = None,
    unsigned_as: Annotated[
        Literal["int64", "decimal", "double"], typer.Option("--unsigned-as", help="Column type of unsigned fields.")
    ] = "int64",
    decimal_scale: DecimalScale = None,
    strings_as: Annotated[
        Literal["string", "binary"],
        typer.Option("--strings-as", help="Column type of string fields; binary also holds values that are not UTF-8."),
    ] = "string",
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            metavar="SPACE.FIELD=TYPE",
            help="Type of one column: bigint, decimal(P,S), double, string, binary, boolean or timestamp. May be "
            "repeated.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="TOML file with types: [types.orders], id = 'decimal(20,0)'."),
    ] = None,
    retype: Annotated[
        list[str] | None,
        typer.Option(
            "--retype",
            metavar="SPACE.FIELD=TYPE",
            help="Change the type of one column of a lake: rewrite its table from the tuples, then go on. May be "
            "repeated.",
        ),
    ] = None,
    resync: Annotated[
        list[str] | None,
        typer.Option(
            "--resync",
            metavar="ID|NAME",
            help="Take the table of this space anew, from its current rows, then go on; the other tables stay. May be "
            "repeated, or a pattern.",
        ),
    ] = None,
    on_misfit: Annotated[
        Literal["quarantine", "stop"],
        typer.Option(
            "--on-misfit",
            help="For a value that does not fit its column: keep null there and add a row to the quarantine table of "
            "the lake, or stop with an error.",
        ),
    ] = "quarantine",
    mask: Annotated[
        list[str] | None,
        typer.Option(
            "--mask",
            metavar="SPACE.FIELD=KIND",
            help="Mask a field in the lake; KIND is sha256, redact (***) or null. May be repeated. Needs --spool.",
        ),
    ] = None,
    mask_salt: Annotated[
        str | None,
        typer.Option("--mask-salt", envvar=SALT_VARIABLE, show_envvar=True, help="Key that turns sha256 into an HMAC."),
    ] = None,
    spool: Annotated[
        str | None,
        typer.Option(
            "--spool",
            metavar="DIR",
            help="Directory that keeps the log of live sources until it is in the lake and, with --mask, the unmasked "
            "tuples permanently. Default: _flowstone_spool in a local lake.",
        ),
    ] = None,
    trigger_seconds: Annotated[
        float,
        typer.Option("--trigger-seconds", metavar="SECONDS", min=0, help="Minimum time between two batches."),
    ] = 1.0,
    max_rows: Annotated[
        int, typer.Option("--max-rows", metavar="ROWS", min=1, help="Approximate number of log rows per batch.")
    ] = 500_000,
    register: Annotated[
        bool,
        typer.Option(
            "--register",
            help="Register as a member of live replica sets, so that they keep their logs until the mirror has them.",
        ),
    ] = False,
    fail_on_data_loss: Annotated[
        bool,
        typer.Option(
            "--fail-on-data-loss/--no-fail-on-data-loss",
            help="Stop if rows are permanently lost; otherwise replace the tables with the state of a new snapshot.",
        ),
    ] = True,
    compact_every: Annotated[
        float,
        typer.Option("--compact-every", metavar="SECONDS", min=0, help="Time between table compactions; 0: never."),
    ] = 300.0,
    vacuum_after: Annotated[
        float,
        typer.Option(
            "--vacuum-after",
            metavar="HOURS",
            min=0,
            help="Remove the files of older table versions after this time; 0: never.",
        ),
    ] = 168.0,
    master: Annotated[
        str, typer.Option("--master", help="Spark master, as for `spark-submit --master`.")
    ] = "local[*,4]",
    conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="Spark setting. May be repeated.")
    ] = None,
    transport: Annotated[
        Literal["auto", "file", "inline", "tcp"],
        typer.Option("--transport", help="How executors receive the log; file requires a directory that they share."),
    ] = "auto",
    transport_address: Annotated[
        str | None,
        typer.Option(
            "--transport-address",
            metavar="HOST",
            help="Address of this machine from which executors fetch the log over TCP. Default: spark.driver.host.",
        ),
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option("--catalog", metavar="SCHEMA", help="Register the tables in this schema of Spark's catalog."),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw", help="Mirror Tsurugi's tables as storages, with raw keys and values, instead of typed columns."
        ),
    ] = False,
    username: Annotated[
        str | None, typer.Option("--username", "-u", help=f"User to replicate as. Default: {USERNAME_VARIABLE}.")
    ] = None,
    password: Annotated[str | None, typer.Option("--password", "-p", help=PASSWORD_HELP)] = None,
    http_listen: HttpListen = None,
    http_token: HttpToken = None,
    log_format: LogFormat = PLAIN,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON, one object per line (docs/reference/mirror.md).")
    ] = False,
) -> int:
    """Mirror Tarantool spaces into Delta tables: each settled change exactly once, and no change that was rolled back.

    The mirror starts with a snapshot, then follows the log, and resumes where it stopped. Tables follow the definitions
    of their spaces. Users of live sources need the role `replication`.
    """
    extras.need("spark", "flowstone mirror")
    from flowstone.lake.masks import Masking
    from flowstone.spark.mirror.choice import MirrorChoice
    from flowstone.spark.mirror.field_types import FieldTypes
    from flowstone.spark.mirror.mirror import Mirror

    place = place_of(http_listen, http_token)
    username, password = login(sources, username, password)
    with _usage_errors(), advice(force=False), ExitStack() as stack:
        choice = MirrorChoice.parse(space or (), exclude or (), columns or ())
        masks = Masking.parse(mask or ()).masks
        teller = Teller(as_json, log_format)
        handlers: list[Callable[[MirrorEvent], object]] = [teller.tell]
        job = Mirror(
            sources,
            lake,
            on_event=lambda event: [handle(event) for handle in handlers],
            history=history,
            changes=changes,
            space=choice.spaces,
            exclude=choice.excluded,
            columns=choice.columns,
            unsigned_as=unsigned_as,
            decimal_scale=decimal_scale,
            strings_as=strings_as,
            types=_types(types or (), config),
            retype={f"{space}.{name}": str(kind) for space, name, kind in FieldTypes.parse(retype or ())},
            resync=[int(text) if text.isdecimal() else text for text in resync or ()],
            on_misfit=on_misfit,
            mask={f"{each.space}.{each.field}": each.kind for each in masks},
            mask_salt=mask_salt,
            spool=spool,
            trigger_seconds=trigger_seconds,
            max_rows=max_rows,
            register=register,
            fail_on_data_loss=fail_on_data_loss,
            compact_every=compact_every,
            vacuum_after=vacuum_after,
            transport=transport,
            transport_address=transport_address,
            catalog=catalog,
            raw=raw,
            username=username,
            password=password,
            master=master,
            conf=_settings(conf or ()),
        )
        set_format(log_format)
        stack.callback(teller.close)
        stack.enter_context(job)
        stack.enter_context(stopped_by_signals(job))
        if place is not None:
            handlers.insert(0, _metrics(place, lake, stack))
        job.run_once() if once else job.run()
    return OK


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turn errors about the options into UsageError, wherever they are detected."""
    from flowstone.columns.column_types import WrongType
    from flowstone.lake.masks import WrongMask
    from flowstone.spark.mirror.choice import WrongChoice
    from flowstone.spark.mirror.start_checks import OtherSettings, WrongPlace

    try:
        yield
    except (WrongMask, WrongChoice, WrongType, WrongPlace, OtherSettings) as error:
        raise UsageError(error.message, hint=error.hint) from error


def _types(texts: Sequence[str], config: str | None) -> dict[str, str]:
    """Return the types of the options and of the TOML file, by SPACE.FIELD."""
    from flowstone.columns.column_types import WrongType
    from flowstone.spark.mirror.field_types import FieldTypes, read_types

    given = FieldTypes.parse(texts)
    read = read_types(config) if config is not None else FieldTypes()
    for place in given.types.keys() & read.types.keys():
        if given.types[place] != read.types[place]:
            raise WrongType(
                f"{'.'.join(place)} is {given.types[place]} by --type and {read.types[place]} in {config}",
                hint="specify each field once",
            )
    return {f"{space}.{name}": str(kind) for space, name, kind in given | read}


def _settings(texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise UsageError(f"--conf {name!r} has no value", hint="write it as NAME=VALUE")
    return {name: value for name, _, value in pairs}


@contextmanager
def stopped_by_signals(job: Mirror) -> Iterator[None]:
    """Let SIGTERM and SIGINT stop the job after the current batch; a second signal interrupts it immediately."""

    def stop(number: int, frame: FrameType | None) -> None:
        job.stop()
        with suppress(OSError):  # stderr may be closed
            os.write(STDERR, STOPPING)  # print is not reentrant, and the signal may have interrupted one
        for each in before:
            signal.signal(each, signal.default_int_handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _metrics(place: HttpPlace, lake: str, stack: ExitStack) -> Callable[[MirrorEvent], object]:
    """Serve the metrics of the mirror over HTTP until `stack` closes. Return the handler of its events."""
    from flowstone.web.background import BackgroundServer
    from flowstone.web.mirror_metrics import MirrorMetrics

    metrics = MirrorMetrics(lake)
    place.tell(stack.enter_context(BackgroundServer(lambda: place.server(metrics))).url)
    return metrics.note


class Teller:
    """Reports events: as JSON lines on stdout, or as log lines on stderr, with a live table if that is a terminal."""

    def __init__(
        self,
        as_json: bool,
        log_format: str = PLAIN,
        screen: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._as_json = as_json
        self._log_format = log_format
        self._now = now
        self._line_at = now()
        self._unsaid: MirrorProgress | None = None
        self._screen = screen if screen is not None else sys.stderr
        self._is_terminal = self._screen is not None and self._screen.isatty()
        self._live: Live | None = None
        self._lock = threading.Lock()

    def tell(self, event: MirrorEvent) -> None:
        """Report `event`. Spools call this from their own threads, so a lock keeps lines whole."""
        with self._lock:
            self._tell(event)

    def _tell(self, event: MirrorEvent) -> None:
        from flowstone.spark.mirror.progress import MirrorCaughtUp, MirrorProgress, MirrorStopped

        if self._as_json:
            import msgspec

            print(msgspec.json.encode(event).decode(), flush=True)
        elif self._log_format == JSON:
            if not isinstance(event, MirrorProgress):
                say_event(event, LOGGER)
        elif not isinstance(event, MirrorProgress):
            if isinstance(event, (MirrorCaughtUp, MirrorStopped)):
                self._say_progress()
            self._say(f"flowstone: {event}")
        elif self._is_terminal:
            self._draw(event)
        elif event.changes_per_second or self._unsaid is not None:
            self._unsaid = event
            if self._now() >= self._line_at:
                self._say_progress()

    def _say_progress(self) -> None:
        """Print the newest progress that has not been printed yet."""
        if self._unsaid is not None:
            say(f"flowstone: {self._unsaid}")
            self._line_at = self._now() + LINE_SECONDS
            self._unsaid = None

    def _say(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            say(line)

    def _draw(self, progress: MirrorProgress) -> None:
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=Console(file=self._screen), auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(figures(progress), refresh=True)

    def close(self) -> None:
        """Remove the table from the terminal, and print progress that has not been printed yet."""
        self._say_progress()
        if self._live is not None:
            self._live.stop()
            self._live = None


def figures(progress: MirrorProgress) -> RichTable:
    """Return the figures of `progress`: one line per table, then the total."""
    from rich.table import Table

    lag = "?" if progress.lag is None else f"{progress.lag:.1f} s"
    table = Table(title=f"lag {lag} and {progress.lag_lsn:,} rows", title_justify="left")
    for name, justify in (("table", "left"), ("changes", "right"), ("changes/s", "right"), ("version", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # a Literal there
    for name, each in progress.tables.items():
        version = "" if each.version is None else f"{each.version:,}"
        table.add_row(name, f"{each.changes:,}", f"{each.changes_per_second:,.0f}", version)
    table.add_section()
    table.add_row("all", f"{progress.changes:,}", f"{progress.changes_per_second:,.0f}", "")
    return table
