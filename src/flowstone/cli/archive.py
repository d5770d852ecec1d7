"""`flowstone archive`: receives the log of a live server and keeps it in files that a server can be started from."""

from __future__ import annotations

import os
import sys
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Annotated, Final, TextIO

import typer

from flowstone.cli.console import OK, UsageError, note_compilation, say
from flowstone.cli.http_options import HttpListen, HttpToken, Place, place_of
from flowstone.cli.log import JSON, PLAIN, LogFormat, say_event, set_format
from flowstone.cli.play import PASSWORD_HELP, URI_HELP, USERNAME_VARIABLE, address

if TYPE_CHECKING:
    from flowstone.node.archive import Archive
    from flowstone.node.archive_events import Event
    from flowstone.web.archive_metrics import ArchiveMetrics

EXAMPLE = (
    "Example: `TT_CLI_USERNAME=replicator TT_CLI_PASSWORD=secret flowstone archive db1:3301 /backup/db1`\n\n"
    "Start a server from it: copy the directory, and run `tarantool` there with `box.cfg{}`."
)

EXIT_CODES = """Exit codes: 0 stopped by a signal, or with --once at the end; 1 the server refuses or is of another
replica set, has lost rows, or (with --once) is away, the directory is in use, or the disk is full; 2 the command line
or a path on it is wrong."""

DAY: Final = 86400.0
WAL_MAX_SIZE: Final = 256 * 1024 * 1024
LOGGER: Final = "flowstone.archive"
CLEAR_LINE: Final = "\r\x1b[K"


def archive(
    uri: Annotated[str, typer.Argument(metavar="URI", help=URI_HELP)],
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Where the archive is, or is to be; it is made if need be.")
    ],
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Stop when all is here that the server had at the start; do not wait for one that is away."
        ),
    ] = False,
    register: Annotated[
        bool,
        typer.Option(
            "--register",
            help="Become a member of the replica set: the server then keeps its logs until the archive has them. It "
            "takes one of 31 ids, and counts in N of the quorum formula. Else the archive is anonymous, and a server "
            "before 3.3 keeps no logs for it: what it collects while the archive is away is a gap.",
        ),
    ] = False,
    images: Annotated[
        bool,
        typer.Option(
            "--images",
            help="Add to each row the tuples it replaced and made. Takes the memory of all data, and the time to load "
            "it at each start.",
        ),
    ] = False,
    snapshot_interval: Annotated[
        float,
        typer.Option(
            "--snapshot-interval", metavar="SECONDS", min=0, help="Between snapshots of all data; 0: only the first."
        ),
    ] = DAY,
    wal_max_size: Annotated[
        int, typer.Option("--wal-max-size", metavar="BYTES", min=1, help="A log of this size is followed by the next.")
    ] = WAL_MAX_SIZE,
    replication_timeout: Annotated[
        float,
        typer.Option(
            "--replication-timeout",
            metavar="SECONDS",
            min=0.01,
            help="Between heartbeats, as the server's; four of them in silence end a connection.",
        ),
    ] = 1.0,
    username: Annotated[
        str | None, typer.Option("--username", "-u", help=f"User to replicate as; else {USERNAME_VARIABLE} is asked.")
    ] = None,
    password: Annotated[str | None, typer.Option("--password", "-p", help=PASSWORD_HELP)] = None,
    http_listen: HttpListen = None,
    http_token: HttpToken = None,
    log_format: LogFormat = PLAIN,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what happens as JSON, an object per line (docs/reference/archive.md).")
    ] = False,
) -> int:
    """Receive the log of a live Tarantool and keep it, durably, in files that a Tarantool recovers from.

    Begins with a snapshot, then writes the log as it comes and acknowledges what is on disk. After an interruption of
    either side it goes on where it stopped. Rows that the server no longer has are replaced by a new snapshot, and
    manifest.json names them. The user needs the role `replication`.
    """
    from flowstone.cli import event_loop
    from flowstone.node.archive import Archive
    from flowstone.node.archive_manifest import NotAnArchive

    note_compilation()
    place = place_of(http_listen, http_token)
    set_format(log_format)
    teller = _Teller(as_json, log_format)
    watch = _watch(directory) if place is not None else None

    def tell(event: Event) -> None:
        teller.tell(event)
        if watch is not None:
            watch.note(event)

    missing = _missing(directory)
    receiver = Archive(
        address(uri, username, password),
        directory,
        register=register,
        images=images,
        snapshot_interval=snapshot_interval,
        wal_max_size=wal_max_size,
        replication_timeout=replication_timeout,
        on_event=tell,
    )
    try:
        event_loop.run(_run(receiver, once, place, watch))
    except NotAnArchive as error:
        raise UsageError(error.message, hint=error.hint) from error
    finally:
        teller.close()
        for made in missing:
            with suppress(OSError):  # there is something in it, or it was not made
                os.rmdir(made)
    return OK


def _missing(directory: str) -> list[str]:
    """Directories that will be made for this one, itself included, from the innermost on."""
    path, found = os.path.abspath(directory), []
    while not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def _watch(directory: str) -> ArchiveMetrics:
    from flowstone.web.archive_metrics import ArchiveMetrics

    return ArchiveMetrics(directory)


async def _run(receiver: Archive, once: bool, place: Place | None, watch: ArchiveMetrics | None) -> None:
    import asyncio
    import logging
    import signal

    # What matters of the log comes as events.
    logging.getLogger("flowstone").addHandler(logging.NullHandler())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, receiver.stop)
    try:
        async with AsyncExitStack() as stack:
            if place is not None and watch is not None:
                web = await stack.enter_async_context(place.server(watch))
                place.tell(web.url)
            await receiver.run(once=once)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class _Teller:
    """Events as lines: sentences on stderr, of which the progress stays in one place on a terminal; or JSON."""

    def __init__(self, as_json: bool, log_format: str = PLAIN, screen: TextIO | None = None) -> None:
        self._as_json = as_json
        self._log_format = log_format
        self._screen = screen if screen is not None else sys.stderr
        self._is_terminal = self._screen is not None and self._screen.isatty()
        self._has_line = False

    def tell(self, event: Event) -> None:
        from flowstone.node.archive_events import Progress

        if self._as_json:
            import msgspec

            print(msgspec.json.encode(event).decode(), flush=True)
        elif self._log_format == JSON:
            if not isinstance(event, Progress):
                say_event(event, LOGGER)
        elif isinstance(event, Progress):
            self._show(str(event))
        else:
            self.close()
            say(f"flowstone: {event}")

    def _show(self, line: str) -> None:
        if self._is_terminal:
            self._screen.write(f"{CLEAR_LINE}{line}")
            self._screen.flush()
            self._has_line = True

    def close(self) -> None:
        """Takes the progress away, so that the next line has a place of its own."""
        if self._has_line:
            self._screen.write(CLEAR_LINE)
            self._screen.flush()
            self._has_line = False
