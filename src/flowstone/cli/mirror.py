"""`flowstone mirror`: settled changes of live servers, archives or log directories as Delta tables, one per space."""

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
from flowstone.cli.console import OK, UsageError, note_compilation, say
from flowstone.cli.http_options import HttpListen, HttpToken, place_of
from flowstone.cli.http_options import Place as HttpPlace
from flowstone.cli.log import JSON, PLAIN, LogFormat, say_event, set_format
from flowstone.cli.options import advice
from flowstone.cli.play import PASSWORD_HELP, USERNAME_VARIABLE, address

if TYPE_CHECKING:
    from types import FrameType

    from rich.live import Live
    from rich.table import Table as RichTable

    from flowstone.iproto.uri import Uri
    from flowstone.spark.mirror import Mirror
    from flowstone.spark.mirror_progress import Event, Progress
    from flowstone.spark.mirror_start import Source

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=replicator TT_CLI_PASSWORD=secret flowstone mirror db1:3301,db2:3301 /lake/shop`\n\n"
    "An archive, once, without a space: `flowstone mirror --once --exclude queue /backup/db1 /lake/shop`\n\n"
    "Masked: `flowstone mirror --mask users.email=sha256 --spool /var/lib/flowstone db1:3301 s3a://bucket/shop`"
)

EXIT_CODES = """Exit codes: 0 stopped by a signal, or with --once at the end; 1 a source refuses, has lost rows, or
(with --once) is away, another mirror writes to the lake, or the disk is full; 2 the command line or a path is wrong."""

MASTER: Final = "local[*,4]"
"""All cores of this machine; a task whose worker dies is tried again, as on a cluster, up to four times in all."""

STDERR: Final = 2
STOPPING: Final = b"flowstone: stopping behind the batch under way; once more to stop at once\n"

LINE_SECONDS: Final = 10.0
"""Between two lines about the progress where there is no terminal: they stay, in a log for months."""

LOGGER: Final = "flowstone.mirror"
SALT_VARIABLE: Final = "FLOWSTONE_MASK_SALT"


def mirror(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A live replica set ([user[:password]@]host:port, several members with commas), the directory of an "
            "archive, one with .snap and .xlog files, or the data directory of a Limestone. Several: a table has the "
            "rows of all.",
            show_default=False,
        ),
    ],
    lake: Annotated[str, typer.Argument(metavar="LAKE", help="Where the tables are, or are to be: a path or a URL.")],
    once: Annotated[
        bool, typer.Option("--once", help="Stop when all is there that the sources had at the start.")
    ] = False,
    history: Annotated[
        bool,
        typer.Option("--history", help="Keep every state of every row, with the time from when to when it was so."),
    ] = False,
    space: Annotated[
        list[str] | None,
        typer.Option(
            "--space", metavar="ID|NAME", help="Mirror this space only. May be repeated. Else all users' spaces."
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="ID|NAME", help="Leave this space out. May be repeated.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--columns", metavar="SPACE=FIELD,…", help="Columns of a table; `_tuple` has all fields. May be repeated."
        ),
    ] = None,
    unsigned_as: Annotated[
        Literal["int64", "decimal", "double"], typer.Option("--unsigned-as", help="Column type of unsigned fields.")
    ] = "int64",
    decimal_scale: Annotated[
        int | None,
        typer.Option("--decimal-scale", min=0, max=38, metavar="N", help="Decimals with N digits, not as text."),
    ] = None,
    strings_as: Annotated[
        Literal["string", "binary"],
        typer.Option("--strings-as", help="Column type of string fields: binary takes what is not UTF-8."),
    ] = "string",
    mask: Annotated[
        list[str] | None,
        typer.Option(
            "--mask",
            metavar="SPACE.FIELD=KIND",
            help="Have a field in the lake as sha256, as null, or redacted (***) only. May be repeated. Needs --spool.",
        ),
    ] = None,
    mask_salt: Annotated[
        str | None,
        typer.Option("--mask-salt", envvar=SALT_VARIABLE, show_envvar=True, help="Makes sha256 an HMAC with this key."),
    ] = None,
    spool: Annotated[
        str | None,
        typer.Option(
            "--spool",
            metavar="DIR",
            help="Where the log of live sources is kept until it is in the lake, and with --mask the exact tuples, for "
            "good. Default: _flowstone_spool in a local lake.",
        ),
    ] = None,
    trigger_seconds: Annotated[
        float,
        typer.Option("--trigger-seconds", metavar="SECONDS", min=0, help="At least this long between two batches."),
    ] = 1.0,
    max_rows: Annotated[
        int, typer.Option("--max-rows", metavar="ROWS", min=1, help="About so many rows of the log in a batch.")
    ] = 500_000,
    register: Annotated[
        bool,
        typer.Option(
            "--register", help="Become a member of live replica sets: they keep their logs until we have them."
        ),
    ] = False,
    fail_on_data_loss: Annotated[
        bool,
        typer.Option(
            "--fail-on-data-loss/--no-fail-on-data-loss",
            help="Stop where rows are gone for good, or else replace the tables by the state of a new snapshot.",
        ),
    ] = True,
    compact_every: Annotated[
        float,
        typer.Option("--compact-every", metavar="SECONDS", min=0, help="Between compactions of tables; 0: never."),
    ] = 300.0,
    vacuum_after: Annotated[
        float,
        typer.Option(
            "--vacuum-after",
            metavar="HOURS",
            min=0,
            help="Files of older versions are removed after so long; 0: never.",
        ),
    ] = 168.0,
    master: Annotated[str, typer.Option("--master", help="Of Spark, as `spark-submit --master`.")] = MASTER,
    conf: Annotated[
        list[str] | None, typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark. May be repeated.")
    ] = None,
    transport: Annotated[
        Literal["auto", "file", "inline", "tcp"],
        typer.Option("--transport", help="How executors get the log: file is for a directory that they share."),
    ] = "auto",
    transport_address: Annotated[
        str | None,
        typer.Option(
            "--transport-address",
            metavar="HOST",
            help="Of this machine, where executors get the log by tcp. Default: spark.driver.host.",
        ),
    ] = None,
    catalog: Annotated[
        str | None, typer.Option("--catalog", metavar="SCHEMA", help="Register the tables there, in Spark's catalog.")
    ] = None,
    username: Annotated[
        str | None, typer.Option("--username", "-u", help=f"User to replicate as; else {USERNAME_VARIABLE} is asked.")
    ] = None,
    password: Annotated[str | None, typer.Option("--password", "-p", help=PASSWORD_HELP)] = None,
    http_listen: HttpListen = None,
    http_token: HttpToken = None,
    log_format: LogFormat = PLAIN,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what happens as JSON, an object per line (docs/reference/mirror.md).")
    ] = False,
) -> int:
    """Mirror Tarantool's spaces into Delta tables, exactly once: what is settled, and nothing that was rolled back.

    Begins with a snapshot, then follows the log, and goes on where it stopped. Tables follow the definitions of their
    spaces. Users of live sources need the role `replication`.
    """
    extras.need("spark", "flowstone mirror")
    from flowstone.spark.masks import Masking
    from flowstone.spark.mirror import Mirror, MirrorOptions, Place
    from flowstone.spark.mirror_choice import Choice
    from flowstone.spark.mirror_start import check_start
    from flowstone.xlog.columns import ColumnOptions

    note_compilation()
    place = place_of(http_listen, http_token)
    places: list[Source] = [_source(text, username, password) for text in sources]
    with _usage_errors():
        choice = Choice.parse(space or (), exclude or (), columns or ())
        masking = Masking.parse(mask or (), mask_salt)
        has_live = any(not isinstance(each, str) for each in places)
        where = Place.of(lake, spool, is_masked=bool(masking), has_live=has_live)
    options = MirrorOptions(
        choice=choice,
        masking=masking,
        types=ColumnOptions(unsigned_as, decimal_scale, strings_as),
        history=history,
        once=once,
        trigger_seconds=trigger_seconds,
        max_rows=max_rows,
        register=register,
        fail_on_data_loss=fail_on_data_loss,
        compact_every=compact_every or None,
        vacuum_after=vacuum_after * 3600 or None,
        transport=transport,
        transport_address=transport_address,
        catalog=catalog,
    )
    settings = _settings(conf or ())
    from flowstone.spark.session import session

    with _usage_errors(), advice(force=False), ExitStack() as stack:
        checked = check_start(places, lake, options)
        set_format(log_format)
        teller = stack.enter_context(_telling(as_json, log_format))
        tell = _watched(teller, place, lake, stack)
        spark = stack.enter_context(session("flowstone mirror", master=master, conf=settings))
        job = Mirror(spark, checked, where, options, on_event=tell)
        stack.enter_context(stopped_by_signals(job))
        job.run()
    return OK


@contextmanager
def _usage_errors() -> Iterator[None]:
    """What was asked for and cannot be is a mistake of the command line, wherever it is noticed."""
    from flowstone.spark.masks import WrongMask
    from flowstone.spark.mirror_choice import WrongChoice
    from flowstone.spark.mirror_start import OtherSettings, WrongPlace

    try:
        yield
    except (WrongMask, WrongChoice, WrongPlace, OtherSettings) as error:
        raise UsageError(error.message, hint=error.hint) from error


def _source(text: str, username: str | None, password: str | None) -> Sequence[Uri] | str:
    """The members of a replica set, or a directory."""
    from flowstone.iproto.uri import UriError, means_a_path

    if os.path.isdir(text):
        return text
    if means_a_path(text):
        raise UsageError(f"{text}: there is no such directory", hint="name an archive, a log directory, or host:port")
    try:
        return [address(member, username, password) for member in text.split(",")]
    except UriError as error:
        if "@" in text or "?" in text:
            raise  # what is shown of it here could be part of a password
        raise UsageError(f"{text!r} is neither a directory that is there nor an address (host:port)") from error


def _settings(texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise UsageError(f"--conf {name!r} has no value", hint="write it as NAME=VALUE")
    return {name: value for name, _, value in pairs}


@contextmanager
def stopped_by_signals(job: Mirror) -> Iterator[None]:
    """SIGTERM and SIGINT end the job in good order; a second one ends it at once."""

    def stop(number: int, frame: FrameType | None) -> None:
        job.stop()
        with suppress(OSError):  # nobody may listen
            os.write(STDERR, STOPPING)  # print may be under way already, and does not bear to be interrupted by itself
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


def _watched(teller: Teller, place: HttpPlace | None, lake: str, stack: ExitStack) -> Callable[[Event], None]:
    """What is to be told of events: the teller, and whoever asks by HTTP, from now on."""
    if place is None:
        return teller.tell
    from flowstone.web.background import BackgroundServer
    from flowstone.web.mirror_metrics import MirrorMetrics

    metrics = MirrorMetrics(lake)
    place.tell(stack.enter_context(BackgroundServer(lambda: place.server(metrics))).url)

    def tell(event: Event) -> None:
        metrics.note(event)
        teller.tell(event)

    return tell


@contextmanager
def _telling(as_json: bool, log_format: str) -> Iterator[Teller]:
    teller = Teller(as_json, log_format)
    try:
        yield teller
    finally:
        teller.close()


class Teller:
    """Events as JSON lines on stdout, or as sentences on stderr, with a table of figures that lives on a terminal."""

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
        self._unsaid: Progress | None = None
        self._screen = screen if screen is not None else sys.stderr
        self._is_terminal = self._screen is not None and self._screen.isatty()
        self._live: Live | None = None
        self._lock = threading.Lock()

    def tell(self, event: Event) -> None:
        """Spools have threads of their own to tell from: a line is one person's."""
        with self._lock:
            self._tell(event)

    def _tell(self, event: Event) -> None:
        from flowstone.spark.mirror_progress import CaughtUp, Progress, Stopped

        if self._as_json:
            import msgspec

            print(msgspec.json.encode(event).decode(), flush=True)
        elif self._log_format == JSON:
            if not isinstance(event, Progress):
                say_event(event, LOGGER)
        elif not isinstance(event, Progress):
            if isinstance(event, (CaughtUp, Stopped)):
                self._say_progress()
            self._say(f"flowstone: {event}")
        elif self._is_terminal:
            self._draw(event)
        elif event.changes_per_second or self._unsaid is not None:
            self._unsaid = event
            if self._now() >= self._line_at:
                self._say_progress()

    def _say_progress(self) -> None:
        """What has changed since the last line."""
        if self._unsaid is not None:
            say(f"flowstone: {self._unsaid}")
            self._line_at = self._now() + LINE_SECONDS
            self._unsaid = None

    def _say(self, line: str) -> None:
        if self._live is not None:
            self._live.console.print(line, highlight=False, markup=False)
        else:
            say(line)

    def _draw(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.live import Live

        if self._live is None:
            self._live = Live(console=Console(file=self._screen), auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(figures(progress), refresh=True)

    def close(self) -> None:
        """Takes the figures away; where there are none, says the last ones."""
        self._say_progress()
        if self._live is not None:
            self._live.stop()
            self._live = None


def figures(progress: Progress) -> RichTable:
    """Per table, and for all of them in the last line."""
    from rich.table import Table

    lag = "?" if progress.lag is None else f"{progress.lag:.1f} s"
    table = Table(title=f"lag {lag} and {progress.lag_lsn:,} rows", title_justify="left")
    for name, justify in (("table", "left"), ("changes", "right"), ("changes/s", "right"), ("version", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]  # two of its words
    for name, each in progress.tables.items():
        version = "" if each.version is None else f"{each.version:,}"
        table.add_row(name, f"{each.changes:,}", f"{each.changes_per_second:,.0f}", version)
    table.add_section()
    table.add_row("all", f"{progress.changes:,}", f"{progress.changes_per_second:,.0f}", "")
    return table
